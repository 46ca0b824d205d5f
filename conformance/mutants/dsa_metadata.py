"""Wrong DSA metadata, one fault each, and correct metadata written in other ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine import calls
from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.oracles import dsa_metadata as oracles

BLOCK = 128
Function = Callable[..., None]

# ---------------------------------------------------------------- the rule, in parts that can break


def _live(kv_len: int, max_len: int) -> int:
    return min(max_len, -(-kv_len // BLOCK) * BLOCK)


def _columns(live: int, span: int) -> int:
    return -(-live // span)


def _values(tokens: Tensor, columns: int, span: int) -> Tensor:
    return tokens[: columns * span : span] // span


def _sums(values: Sequence[int]) -> list[int]:
    return [0, *accumulate(values)]


def _rows_of(extends: Sequence[int], total_len: int) -> list[tuple[int, int, int] | None]:
    """For each row its request, offset and extend; None past the last request."""
    rows: list[tuple[int, int, int] | None] = [
        (request, offset, extend)
        for request, extend in enumerate(extends)
        for offset in range(min(extend, total_len))
    ]
    return (rows + [None] * total_len)[:total_len]


@dataclass(frozen=True)
class Rules:
    """The rule of all four ops in small parts, each of which a mutant can replace.

    Attributes
    ----------
    live : callable
        (KV length, max_len) -> live positions.
    columns : callable
        (live positions, page size) -> table columns to write.
    values : callable
        (a request's row of req_to_token, columns, page size) -> what goes into them.
    rest : int, optional
        What dead columns are filled with; None: nothing.
    pool_row : callable
        (request, pool rows) -> row of req_to_token.
    tokens : callable
        The map as the implementation sees it.
    kv_len : callable
        (sequence length, next_n) -> KV length; next_n is 0 for decode and extend.
    table_kv_len : callable
        The same for the tables alone.
    clamp : callable
        (length, topk) -> length for sparse attention.
    sums : callable
        lengths -> what goes into cu_*.
    seen_verify : callable
        (sequence length, draft offset, next_n) -> tokens that the row sees.
    verify_row : callable
        (request, offset, bs, next_n) -> table row.
    ctx_len : callable
        (KV length, draft offset, next_n) -> entry of paged_mqa_ctx_lens_2d.
    extends : callable
        (extend lengths, static, max_extend_len) -> rows of each request.
    rows : callable
        (rows of each request, total_len) -> owner of each row.
    seen_extend : callable
        (sequence length, offset, extend) -> tokens that the row sees.
    seen_padding : callable
        (sequence lengths) -> what a row past the last request sees; None: it is not written.
    padding_has_tables : bool
        Rows past the last request get request 0's table rows.
    entries : callable
        (entries due, entries there) -> entries written in a 1-D output.
    step_lengths : callable
        (sequence lengths, draft step) -> those that the step uses.
    """

    live: Callable[[int, int], int] = _live
    columns: Callable[[int, int], int] = _columns
    values: Callable[[Tensor, int, int], Tensor] = _values
    rest: int | None = None
    pool_row: Callable[[int, Sequence[int]], int] = lambda request, rows: rows[request]
    tokens: Callable[[Tensor], Tensor] = lambda tokens: tokens
    kv_len: Callable[[int, int], int] = lambda seq, next_n: seq + next_n
    table_kv_len: Callable[[int, int], int] = lambda seq, next_n: seq + next_n
    clamp: Callable[[int, int], int] = min
    sums: Callable[[Sequence[int]], list[int]] = _sums
    seen_verify: Callable[[int, int, int], int] = lambda seq, offset, next_n: seq + offset + 1
    verify_row: Callable[[int, int, int, int], int] = lambda request, offset, bs, next_n: (
        request * next_n + offset
    )
    ctx_len: Callable[[int, int, int], int] = lambda kv_len, offset, next_n: kv_len
    extends: Callable[[list[int], bool, int], list[int]] = lambda extends, static, most: (
        extends[:1] * len(extends) if static else extends
    )
    rows: Callable[[Sequence[int], int], list[tuple[int, int, int] | None]] = _rows_of
    seen_extend: Callable[[int, int, int], int] = lambda seq, offset, extend: max(
        0, seq - extend + offset + 1
    )
    seen_padding: Callable[[Sequence[int]], int | None] = lambda lengths: lengths[0]
    padding_has_tables: bool = False
    entries: Callable[[int, int], int] = lambda due, there: due
    step_lengths: Callable[[list[int], int], list[int]] = lambda lengths, step: lengths


# ---------------------------------------------------------------- the ops by these rules


class _Writer:
    """Writes lengths and table rows as some rules say."""

    def __init__(self, rules: Rules, args: Mapping[str, Any]) -> None:
        self.rules = rules
        self.max_len: int = args["max_len"]
        self.topk: int = args["dsa_index_topk"]
        self.page: int = args["physical_page_size"]
        self.tokens = rules.tokens(args["req_to_token"])
        self.pool_rows: list[int] = args["req_pool_indices"].tolist()

    def vector(self, output: Tensor, values: Sequence[int]) -> None:
        entries = self.rules.entries(len(values), len(output))
        padded = [*values, *[0] * entries][:entries]
        output[:entries] = torch.tensor(padded, dtype=torch.int32, device=output.device)

    def with_sums(self, values: Sequence[int], lengths: Tensor, sums: Tensor) -> None:
        self.vector(lengths, values)
        self.vector(sums, self.rules.sums(values))

    def seen(self, values: Sequence[int], args: Mapping[str, Any]) -> None:
        self.vector(args["seqlens_expanded"], values)
        clamped = [self.rules.clamp(value, self.topk) for value in values]
        self.with_sums(clamped, args["dsa_cache_seqlens"], args["dsa_cu_seqlens_k"])

    def row(
        self, slots: Tensor | None, pages: Tensor | None, row: int, request: int, kv_len: int
    ) -> None:
        tokens = self.tokens[self.rules.pool_row(request, self.pool_rows)]
        live = self.rules.live(kv_len, self.max_len)
        for table, span in ((slots, 1), (pages, self.page)):
            if table is None:
                continue
            columns = min(self.rules.columns(live, span), table.shape[1])
            values = self.rules.values(tokens, columns, span)
            table[row, : len(values)] = values
            if self.rules.rest is not None:
                table[row, columns : -(-self.max_len // span)] = self.rules.rest


def _decode(rules: Rules, step: int = 0, **args: Any) -> None:
    writer = _Writer(rules, args)
    lengths = rules.step_lengths(args["seq_lens"].tolist(), step)
    kv_lens = [rules.kv_len(length, 0) for length in lengths]
    writer.with_sums(kv_lens, args["cache_seqlens"], args["cu_seqlens_k"])
    clamped = [rules.clamp(kv_len, writer.topk) for kv_len in kv_lens]
    writer.with_sums(clamped, args["dsa_cache_seqlens"], args["dsa_cu_seqlens_k"])
    for request, length in enumerate(lengths):
        kv_len = rules.table_kv_len(length, 0)
        writer.row(args["page_table_1"], args["real_page_table"], request, request, kv_len)


def _verify(rules: Rules, *, next_n: int, **args: Any) -> None:
    writer = _Writer(rules, args)
    lengths = args["seq_lens"].tolist()
    bs = len(lengths)
    kv_lens = [rules.kv_len(length, next_n) for length in lengths]
    writer.with_sums(kv_lens, args["cache_seqlens"], args["cu_seqlens_k"])
    rows = [(request, offset) for request in range(bs) for offset in range(next_n)]
    writer.seen([rules.seen_verify(lengths[b], j, next_n) for b, j in rows], args)
    for request, offset in rows:
        row = rules.verify_row(request, offset, bs, next_n)
        kv_len = rules.table_kv_len(lengths[request], next_n)
        writer.row(args["page_table_1"], args["real_page_table"], row, request, kv_len)
        if (ctx_lens := args.get("paged_mqa_ctx_lens_2d")) is not None:
            ctx_lens[request, offset] = rules.ctx_len(kv_lens[request], offset, next_n)


def _extend(
    rules: Rules,
    *,
    total_len: int,
    max_extend_len: int,
    static_extend_len: bool = False,
    **args: Any,
) -> None:
    writer = _Writer(rules, args)
    lengths = args["seq_lens"].tolist()
    kv_lens = [rules.kv_len(length, 0) for length in lengths]
    writer.with_sums(kv_lens, args["cache_seqlens"], args["cu_seqlens_k"])
    extends = rules.extends(args["extend_seq_lens"].tolist(), static_extend_len, max_extend_len)
    owners = rules.rows(extends, total_len)
    seen = []
    for row, owner in enumerate(owners):
        if owner is not None:
            request, offset, extend = owner
            seen.append(rules.seen_extend(lengths[request], offset, extend))
        elif (padding := rules.seen_padding(lengths)) is not None:
            request = 0
            seen.append(padding)
        if owner is not None or rules.padding_has_tables:
            kv_len = rules.table_kv_len(lengths[request], 0)
            writer.row(args["page_table_1"], args["real_page_table"], row, request, kv_len)
    writer.seen(seen, args)


def _draft(rules: Rules, *, steps: Sequence[Any], **args: Any) -> None:
    for number, step in enumerate(steps):
        _decode(rules, number, **vars(step), **args)


OPS: Mapping[str, Function] = {
    "dsa_decode_metadata": _decode,
    "dsa_target_verify_metadata": _verify,
    "dsa_draft_extend_metadata": _extend,
    "dsa_draft_decode_metadata": _draft,
}


# ---------------------------------------------------------------- mutants of every op


def _ignores_strides(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, (tensor.shape[1], 1))


def _at_most(bound: int) -> Callable[[int, Sequence[int]], int]:
    return lambda request, rows: rows[min(request, bound - 1)]


def _without_overflow(kv_len: int, max_len: int) -> int:
    """Live columns where the rounding up is done in int32: none, once it wraps."""
    return 0 if kv_len > 2**31 - BLOCK else _live(kv_len, max_len)


def _known_page(span: int) -> int:
    return span if span in (1, 16, 64, 256) else 64


SHARED_FAULTS: Iterable[tuple[str, str, tuple[str, ...], dict[str, Any]]] = (
    (
        "one_column_too_few",
        "leaves the last live column out",
        ("eager",),
        {"live": lambda kv, most: max(_live(kv, most) - 1, 0)},
    ),
    (
        "writes_past_live_columns",
        "fills rows up to max_len",
        ("eager",),
        {"live": lambda kv, most: most},
    ),
    (
        "block_not_filled",
        "stops at the KV length instead of at the end of its block",
        ("eager",),
        {"live": lambda kv, most: min(kv, most)},
    ),
    (
        "extra_block_at_multiples_of_128",
        "takes kv // 128 + 1 blocks",
        ("eager",),
        {"live": lambda kv, most: min(most, (kv // BLOCK + 1) * BLOCK if kv else 0)},
    ),
    (
        "block_begun_is_dropped",
        "takes kv // 128 blocks",
        ("eager",),
        {"live": lambda kv, most: min(most, kv // BLOCK * BLOCK)},
    ),
    (
        "blocks_of_64",
        "rounds live columns up to 64 instead of 128",
        ("eager",),
        {"live": lambda kv, most: min(most, -(-kv // 64) * 64)},
    ),
    (
        "last_block_not_cut_at_max_len",
        "fills the last block although max_len ends within it",
        ("eager", "guards"),
        {"live": lambda kv, most: min(-(-kv // BLOCK), -(-most // BLOCK)) * BLOCK},
    ),
    (
        "blocks_beyond_256_dropped",
        "gives a row 256 programs of one block each",
        ("eager",),
        {"live": lambda kv, most: min(_live(kv, most), 256 * BLOCK)},
    ),
    (
        "dead_columns_zeroed",
        "clears what lies behind the live columns",
        ("eager",),
        {"rest": 0},
    ),
    (
        "part_of_a_page_dropped",
        "rounds the pages of a row down",
        ("eager",),
        {"columns": lambda live, span: live // span},
    ),
    (
        "page_not_divided",
        "stores slots where pages belong",
        ("eager",),
        {"values": lambda tokens, columns, span: tokens[: columns * span : span]},
    ),
    (
        "page_of_consecutive_columns",
        "takes column c instead of c * page size",
        ("eager",),
        {"values": lambda tokens, columns, span: tokens[:columns] // span},
    ),
    (
        "page_of_the_position",
        "takes the page number in the request for the page in memory",
        ("eager",),
        {
            "values": lambda tokens, columns, span: (
                tokens[:columns]
                if span == 1
                else torch.arange(columns, dtype=tokens.dtype, device=tokens.device)
            )
        },
    ),
    (
        "request_taken_for_its_pool_row",
        "reads row b of req_to_token",
        ("eager",),
        {"pool_row": lambda request, rows: request},
    ),
    (
        "requests_beyond_32_repeat_the_last",
        "has a block of 32 requests",
        ("eager",),
        {"pool_row": _at_most(32)},
    ),
    (
        "token_map_taken_for_contiguous",
        "takes the width of req_to_token for its row stride",
        ("strided",),
        {"tokens": _ignores_strides},
    ),
    (
        "topk_not_applied",
        "does not clamp to dsa_index_topk",
        ("eager",),
        {"clamp": lambda length, topk: length},
    ),
    (
        "block_end_wraps",
        "rounds a length near 2^31 up in int32",
        ("eager",),
        {"live": _without_overflow},
    ),
    (
        "lengths_of_16_bits",
        "fills tables up to the lower 16 bits of the length",
        ("eager",),
        {"live": lambda kv, most: _live(kv & 0xFFFF, most)},
    ),
    (
        "slot_0_taken_for_none",
        "keeps slot 0 for padding",
        ("eager",),
        {"values": lambda tokens, columns, span: _values(tokens.clamp(min=1), columns, span)},
    ),
    (
        "pool_row_of_8_bits",
        "reads the lower 8 bits of a pool row",
        ("eager",),
        {"pool_row": lambda request, rows: rows[request] & 0xFF},
    ),
    (
        "pool_row_of_16_bits",
        "reads the lower 16 bits of a pool row",
        ("eager",),
        {"pool_row": lambda request, rows: rows[request] & 0xFFFF},
    ),
    (
        "other_pages_taken_for_64",
        "knows pages of 1, 16, 64 and 256",
        ("eager",),
        {
            "values": lambda tokens, columns, span: (
                tokens[: columns * span : span] // _known_page(span)
            )
        },
    ),
    (
        "topk_at_most_2048",
        "clamps to 2048 whatever dsa_index_topk says",
        ("eager",),
        {"clamp": lambda length, topk: min(length, topk, 2048)},
    ),
    (
        "clamped_in_fp32",
        "clamps lengths as floats",
        ("eager",),
        {"clamp": lambda length, topk: int(torch.tensor(min(length, topk)).float()) & 0x7FFFFFFF},
    ),
    (
        "sums_exclusive",
        "shifts the running sums by one",
        ("eager",),
        {"sums": lambda values: [0, 0, *accumulate(values)][: len(values) + 1]},
    ),
    (
        "sums_restart_after_128",
        "sums in blocks of 128 without carrying over",
        ("eager",),
        {"sums": lambda values: [0, *accumulate(values[:128]), *accumulate(values[128:])]},
    ),
    (
        "leading_zero_missing",
        "writes the sums from the first entry on",
        ("eager",),
        {"sums": lambda values: list(accumulate(values))},
    ),
    (
        "excess_entries_cleared",
        "writes 1-D outputs to their very end",
        ("eager",),
        {"entries": lambda due, there: there},
    ),
)


def _mutants(op: str, faults: Iterable[tuple[str, str, tuple[str, ...], dict[str, Any]]]) -> list:
    return [
        Mutant(name, op, fault, killed_by, partial(OPS[op], replace(Rules(), **change)))
        for name, fault, killed_by, change in faults
    ]


# ---------------------------------------------------------------- mutants of one op

VERIFY_FAULTS = (
    (
        "tables_without_the_drafts",
        "fills tables up to the committed length",
        ("eager",),
        {"table_kv_len": lambda seq, next_n: seq},
    ),
    (
        "cache_without_the_drafts",
        "takes the committed length for the KV length",
        ("eager",),
        {"kv_len": lambda seq, next_n: seq},
    ),
    (
        "draft_does_not_see_itself",
        "expands to seq_len + j",
        ("eager",),
        {"seen_verify": lambda seq, offset, next_n: seq + offset},
    ),
    (
        "drafts_see_each_other",
        "expands every row to the KV length",
        ("eager",),
        {"seen_verify": lambda seq, offset, next_n: seq + next_n},
    ),
    (
        "rows_by_draft_first",
        "puts draft j of request b into table row j * bs + b",
        ("eager",),
        {"verify_row": lambda request, offset, bs, next_n: offset * bs + request},
    ),
    (
        "ctx_lens_expanded",
        "gives each draft its own context length",
        ("eager",),
        {"ctx_len": lambda kv_len, offset, next_n: kv_len - next_n + offset + 1},
    ),
    (
        "drafts_beyond_8_share_a_row",
        "has a block of 8 drafts",
        ("eager",),
        {"verify_row": lambda request, offset, bs, next_n: request * next_n + min(offset, 7)},
    ),
)

EXTEND_FAULTS = (
    (
        "expanded_below_zero",
        "does not stop at 0 in requests shorter than their extend",
        ("eager",),
        {"seen_extend": lambda seq, offset, extend: seq - extend + offset + 1},
    ),
    (
        "query_does_not_see_itself",
        "expands to one token too few",
        ("eager",),
        {"seen_extend": lambda seq, offset, extend: max(0, seq - extend + offset)},
    ),
    (
        "extend_comes_behind_the_cache",
        "takes the extend for tokens that the length does not count yet",
        ("eager",),
        {"seen_extend": lambda seq, offset, extend: seq + offset + 1},
    ),
    (
        "static_ignored",
        "reads every request's own extend in the static case",
        ("eager",),
        {"extends": lambda extends, static, most: extends},
    ),
    (
        "always_static",
        "gives all requests the extend of the first",
        ("eager",),
        {"extends": lambda extends, static, most: extends[:1] * len(extends)},
    ),
    (
        "every_extend_is_the_largest",
        "gives all requests max_extend_len rows",
        ("eager",),
        {"extends": lambda extends, static, most: [most] * len(extends)},
    ),
    (
        "extend_cut_at_max_extend_len",
        "takes max_extend_len for a bound of each request",
        ("eager",),
        {
            "extends": lambda extends, static, most: [
                min(extend, most) for extend in (extends[:1] * len(extends) if static else extends)
            ]
        },
    ),
    (
        "static_extend_cut_at_max_extend_len",
        "takes max_extend_len for a bound of the static length",
        ("eager",),
        {
            "extends": lambda extends, static, most: (
                [min(extend, most) for extend in extends[:1] * len(extends)] if static else extends
            )
        },
    ),
    (
        "skips_one_request_without_query_only",
        "looks one request further at most where one has no query",
        ("eager",),
        {
            "extends": lambda extends, static, most: [
                extend + (index > 0 and not extend and not extends[index - 1] and sum(extends) > 0)
                for index, extend in enumerate(extends[:1] * len(extends) if static else extends)
            ]
        },
    ),
    (
        "no_query_counts_as_one",
        "gives requests without a query a row",
        ("eager",),
        {
            "extends": lambda extends, static, most: [
                max(extend, 1) for extend in (extends[:1] * len(extends) if static else extends)
            ]
        },
    ),
    (
        "rows_written_beyond_total_len",
        "writes the rows of all requests",
        ("eager", "guards"),
        {
            "rows": lambda extends, total_len: _rows_of(
                extends, max(total_len, min(sum(extends), total_len + 8))
            )
        },
    ),
    (
        "padding_rows_not_counted",
        "leaves rows past the last request out of the lengths",
        ("eager",),
        {"seen_padding": lambda lengths: None},
    ),
    (
        "padding_rows_see_nothing",
        "takes 0 for the length of rows past the last request",
        ("eager",),
        {"seen_padding": lambda lengths: 0},
    ),
    (
        "padding_rows_belong_to_the_last_request",
        "gives rows past the last request the length of the last",
        ("eager",),
        {"seen_padding": lambda lengths: lengths[-1]},
    ),
    (
        "padding_rows_have_tables",
        "writes table rows past the last request",
        ("eager",),
        {"padding_has_tables": True},
    ),
)  # fmt: skip


def _extend_without_rows_writes_nothing(*, total_len: int, **args: Any) -> None:
    if total_len:
        _extend(Rules(), total_len=total_len, **args)


DRAFT_FAULTS = (
    (
        "steps_grow",
        "adds the number of the step to the lengths",
        ("eager",),
        {"step_lengths": lambda lengths, step: [length + step for length in lengths]},
    ),
    (
        "steps_grow_from_one",
        "counts the token of the step itself",
        ("eager",),
        {"step_lengths": lambda lengths, step: [length + step + 1 for length in lengths]},
    ),
)


def _draft_last_step_missing(*, steps: Sequence[Any], **args: Any) -> None:
    _draft(Rules(), steps=steps[: max(1, len(steps) - 1)], **args)


def _draft_three_steps_at_most(*, steps: Sequence[Any], **args: Any) -> None:
    _draft(Rules(), steps=steps[:3], **args)


def _draft_tables_of_first_step_only(*, steps: Sequence[Any], **args: Any) -> None:
    _draft(Rules(), steps=steps[:1], **args)
    for step in steps[1:]:
        scratch = {**vars(step)}
        for name in ("page_table_1", "real_page_table"):
            if scratch[name] is not None:
                scratch[name] = scratch[name].clone()
        _decode(Rules(), **scratch, **args)


def _draft_tables_that_the_first_step_has(*, steps: Sequence[Any], **args: Any) -> None:
    first = vars(steps[0])
    for step in steps:
        outputs = {
            name: None if first[name] is None else value for name, value in vars(step).items()
        }
        _decode(Rules(), **{**args, **outputs})


def _draft_strides_of_the_first_step(*, steps: Sequence[Any], **args: Any) -> None:
    first = vars(steps[0])
    for step in steps:
        tables = {
            name: value.as_strided(value.shape, first[name].stride())
            for name, value in vars(step).items()
            if name.endswith(("table", "table_1")) and None not in (value, first[name])
        }
        _decode(Rules(), **{**vars(step), **tables}, **args)


def _draft_column_strides_of_the_first_step(*, steps: Sequence[Any], **args: Any) -> None:
    first = vars(steps[0])
    for step in steps:
        tables = {
            name: value.as_strided(value.shape, (value.stride(0), first[name].stride(1)))
            for name, value in vars(step).items()
            if name.endswith(("table", "table_1")) and None not in (value, first[name])
        }
        _decode(Rules(), **{**vars(step), **tables}, **args)


def _pages_with_column_stride_of_slots(op: str, **args: Any) -> None:
    for out in args.get("steps", [SimpleNamespace(**args)]):
        slots, pages = out.page_table_1, out.real_page_table
        if None in (slots, pages):
            continue
        columns = -(-args["max_len"] // args["physical_page_size"])
        if columns > 1 and slots.stride(1) != pages.stride(1):
            # What such a kernel leaves: the columns stay, others are hit.
            old = pages.clone()
            OPS[op](Rules(), **args)
            pages[:, 1:] = old[:, 1:]
            return
    OPS[op](Rules(), **args)


_POOL_ROWS: dict[tuple[Any, ...], Tensor] = {}


def _keeps_tables_for_known_lengths(op: str, *, seq_lens: Tensor, **args: Any) -> None:
    """Takes the map of requests for unchanged when an address holds lengths seen there before."""
    key = (op, seq_lens.data_ptr(), tuple(seq_lens.tolist()), args["req_to_token"].shape)
    rows = args["req_pool_indices"]
    known = _POOL_ROWS.setdefault(key, rows.clone())
    if known.shape == rows.shape and known.dtype == rows.dtype:
        args["req_pool_indices"] = known
    OPS[op](Rules(), seq_lens=seq_lens, **args)


def _draft_copies_whole_rows(*, steps: Sequence[Any], **args: Any) -> None:
    bs = len(args["seq_lens"])
    for step in steps:
        _decode(Rules(), **vars(step), **args)
        for name in ("page_table_1", "real_page_table"):
            ours, theirs = getattr(steps[0], name), getattr(step, name)
            if ours is not None and theirs is not None:
                width = min(ours.shape[1], theirs.shape[1])
                theirs[:bs, :width] = ours[:bs, :width]


def _draft_checks_step_by_step(*, steps: Sequence[Any], **args: Any) -> None:
    for step in steps:
        oracles.dsa_draft_decode_metadata(steps=[step], **args)
    oracles.dsa_draft_decode_metadata(steps=steps, **args)


def _writes_before_it_checks(op: str, **args: Any) -> None:
    try:
        OPS[op](Rules(), **args)
    except Exception as error:
        raise ValueError("too late") from error
    getattr(oracles, op)(**args)


def _checks_nothing(op: str, **args: Any) -> None:
    OPS[op](Rules(), **args)


_SEEN: dict[tuple[Any, ...], Tensor] = {}


def _keeps_lengths_by_address(op: str, *, seq_lens: Tensor, **args: Any) -> None:
    key = (op, seq_lens.data_ptr(), tuple(seq_lens.shape), seq_lens.dtype)
    OPS[op](Rules(), seq_lens=_SEEN.setdefault(key, seq_lens.clone()), **args)


_TOPK: dict[tuple[Any, ...], int] = {}


def _keeps_topk_by_address(op: str, *, seq_lens: Tensor, dsa_index_topk: int, **args: Any) -> None:
    topk = _TOPK.setdefault((op, seq_lens.data_ptr(), len(seq_lens)), dsa_index_topk)
    OPS[op](Rules(), seq_lens=seq_lens, dsa_index_topk=topk, **args)


def _empty_batch_not_validated(op: str, *, seq_lens: Any, **args: Any) -> None:
    if seq_lens.dim() != 1 or len(seq_lens):
        return getattr(oracles, op)(seq_lens=seq_lens, **args)
    return OPS[op](Rules(), seq_lens=seq_lens, **args)


def _rank_not_checked(op: str, **args: Any) -> None:
    def flat(path: str, tensor: Tensor) -> Tensor:
        rank = 2 if path.endswith(("page_table_1", "_table", "_2d", "req_to_token")) else 1
        return tensor[..., 0] if tensor.dim() == rank + 1 and tensor.shape[-1] == 1 else tensor

    getattr(oracles, op)(**calls.replace(args, flat))


def _extend_static_by_default(*, static_extend_len: bool = True, **args: Any) -> None:
    _extend(Rules(), static_extend_len=static_extend_len, **args)


MUTANTS = [
    mutant
    for op, faults in (
        ("dsa_decode_metadata", ()),
        ("dsa_target_verify_metadata", VERIFY_FAULTS),
        ("dsa_draft_extend_metadata", EXTEND_FAULTS),
        ("dsa_draft_decode_metadata", DRAFT_FAULTS),
    )
    for mutant in (
        *_mutants(op, [*SHARED_FAULTS, *faults]),
        Mutant(
            "graph_reads_stale_lengths",
            op,
            "keeps the lengths that it first saw at an address",
            ("repeat",),
            partial(_keeps_lengths_by_address, op),
        ),
        Mutant(
            "writes_before_it_checks",
            op,
            "validates its arguments after the work",
            ("invalid",),
            partial(_writes_before_it_checks, op),
        ),
        Mutant(
            "topk_kept_by_address",
            op,
            "keeps the top-k that it first saw with the lengths at an address",
            ("repeat",),
            partial(_keeps_topk_by_address, op),
        ),
        Mutant(
            "pool_rows_kept_for_known_lengths",
            op,
            "looks the requests up again only when a length has changed",
            ("repeat",),
            partial(_keeps_tables_for_known_lengths, op),
        ),
        Mutant(
            "pages_with_column_stride_of_slots",
            op,
            "has one column stride for both page tables",
            ("strided",),
            partial(_pages_with_column_stride_of_slots, op),
        ),
        Mutant(
            "rank_not_checked",
            op,
            "looks at the entries and rows of a tensor, not at its rank",
            ("invalid",),
            partial(_rank_not_checked, op),
        ),
        Mutant(
            "empty_batch_not_validated",
            op,
            "does not look at the other arguments of a batch without requests",
            ("invalid",),
            partial(_empty_batch_not_validated, op),
        ),
        Mutant(
            "checks_nothing",
            op,
            "has no validation",
            ("invalid",),
            partial(_checks_nothing, op),
        ),
    )
]

MUTANTS += [
    Mutant(
        "no_rows_writes_nothing",
        "dsa_draft_extend_metadata",
        "returns at once when total_len is 0",
        ("eager",),
        _extend_without_rows_writes_nothing,
    ),
    Mutant(
        "static_by_default",
        "dsa_draft_extend_metadata",
        "takes extends for static where nothing is said",
        ("eager",),
        _extend_static_by_default,
    ),
    *(
        Mutant(name, "dsa_draft_decode_metadata", fault, killed_by, function)
        for name, fault, killed_by, function in (
            (
                "last_step_missing",
                "leaves the last of several steps out",
                ("eager",),
                _draft_last_step_missing,
            ),
            ("three_steps_at_most", "serves three steps", ("eager",), _draft_three_steps_at_most),
            (
                "tables_of_first_step_only",
                "writes lengths for every step, tables for the first",
                ("eager",),
                _draft_tables_of_first_step_only,
            ),
            (
                "tables_that_the_first_step_has",
                "asks only the first step which tables there are",
                ("eager",),
                _draft_tables_that_the_first_step_has,
            ),
            (
                "strides_of_the_first_step",
                "takes the strides of the first step for all",
                ("eager", "guards"),
                _draft_strides_of_the_first_step,
            ),
            (
                "column_strides_of_the_first_step",
                "takes the column strides of the first step for all",
                ("strided",),
                _draft_column_strides_of_the_first_step,
            ),
            (
                "copies_whole_rows",
                "copies the first step's rows, dead columns included",
                ("eager",),
                _draft_copies_whole_rows,
            ),
            (
                "checks_step_by_step",
                "writes a step before it looks at the next",
                ("invalid",),
                _draft_checks_step_by_step,
            ),
        )
    ),
]


# ---------------------------------------------------------------- correct variants


def _checked(op: str, args: Mapping[str, Any]) -> None:
    """Raise for a bad call by running the oracle on a copy."""
    getattr(oracles, op)(**calls.replace(args, lambda _, tensor: tensor.clone()))


def _one_row_at_a_time(op: str, **args: Any) -> None:
    _checked(op, args)
    OPS[op](Rules(), **args)


def _all_rows_at_once(op: str, **args: Any) -> None:
    _checked(op, args)
    seq = args["seq_lens"].long()
    bs, device = len(seq), seq.device
    if op == "dsa_draft_extend_metadata":
        row = torch.arange(args["total_len"], device=device)
        extends = args["extend_seq_lens"].long()
        if args.get("static_extend_len"):
            extends = extends.narrow(0, 0, min(bs, 1)).expand(bs)
        ends = extends.cumsum(0)
        owner = torch.searchsorted(ends, row, right=True)
        real = owner < bs
        owner = owner * real
        kv_lens = seq
        # The last query of a request sees its whole length.
        behind = (ends[owner] - 1 - row) * real
        seen = (seq[owner] - behind).clamp(min=0)
        row_kv_lens = seq[owner] * real
    else:
        next_n = args.get("next_n", 0)
        owner = torch.arange(bs * max(next_n, 1), device=device) // max(next_n, 1)
        kv_lens = seq + next_n
        row_kv_lens = kv_lens[owner]
        offset = torch.arange(len(owner), device=device) - owner * max(next_n, 1)
        seen = seq[owner] + offset + 1 if next_n else seq
    for out in args.get("steps", [SimpleNamespace(**args)]):
        _put_with_sums(kv_lens, out.cache_seqlens, out.cu_seqlens_k)
        _put_with_sums(
            seen.clamp(max=args["dsa_index_topk"]), out.dsa_cache_seqlens, out.dsa_cu_seqlens_k
        )
        if "seqlens_expanded" in args:
            _put(seen, args["seqlens_expanded"])
        if args.get("paged_mqa_ctx_lens_2d") is not None:
            args["paged_mqa_ctx_lens_2d"][:bs, : args["next_n"]].copy_(
                kv_lens[:, None].expand(bs, args["next_n"])
            )
        for table, span in (
            (out.page_table_1, 1),
            (out.real_page_table, args["physical_page_size"]),
        ):
            if table is None:
                continue
            position = torch.arange(0, args["max_len"], span, device=device)
            live = position // BLOCK * BLOCK < row_kv_lens[:, None]
            rows = table[: len(owner), : len(position)]
            pool_rows = args["req_pool_indices"].long()[owner]
            values = args["req_to_token"][pool_rows[:, None], position] // span
            rows.copy_(torch.where(live, values, rows))


def _put(values: Tensor, output: Tensor) -> None:
    output.narrow(0, 0, len(values)).copy_(values)


def _put_with_sums(values: Tensor, lengths: Tensor, sums: Tensor) -> None:
    _put(values, lengths)
    _put(torch.nn.functional.pad(values.cumsum(0), (1, 0)), sums)


def _one_program_per_request(op: str, **args: Any) -> None:
    # Here, not at the top: mutants are read before it is known how Triton is to run.
    from draftproof.kernels import dsa_metadata as kernels

    name = kernels.PROGRAM_BUDGET_VARIABLE
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        getattr(kernels, op)(**args)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


VARIANTS = [
    variant
    for op in OPS
    for variant in (
        Variant(
            "one_row_at_a_time",
            op,
            "reads lengths on the host and copies row after row",
            partial(_one_row_at_a_time, op),
            capturable=False,
        ),
        Variant(
            "all_rows_at_once",
            op,
            "selects live columns of whole tables by one mask, on the device",
            partial(_all_rows_at_once, op),
        ),
        Variant(
            "one_program_per_request",
            op,
            "the bounded kernel with the smallest budget: one program walks all live tiles",
            partial(_one_program_per_request, op),
        ),
    )
]
