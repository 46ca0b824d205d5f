"""Specs of the DSA metadata ops: the calls, good and bad, that implementations must handle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    BenchPoint,
    Case,
    Effect,
    OpSpec,
    Params,
)
from draftproof.oracles.dsa_metadata import COLUMN_BLOCK, MAX_DRAFT_STEPS, StepTables

DTYPES = {"int32": torch.int32, "int64": torch.int64}
INT32_MAX = 2**31 - 1

HUGE_OFFSET = 2**31
"""Elements: in a huge table the last row begins just behind this, beyond 32-bit arithmetic."""

AROUND_BLOCKS = (0, 1, 127, 128, 129, 255, 256, 257)
"""Lengths at which a block of 128 columns begins, ends, or is just passed."""

CONTEXT = 65536
"""Positions of a long request, and the width of the narrower of the benchmark's tables."""

WIDEST = 1 << 20
"""Positions of the longest context that the tables are made for."""


# ---------------------------------------------------------------- building a call


def _params(
    seq_lens: Sequence[int],
    max_len: int,
    *,
    pool_rows: Sequence[int] | None = None,
    page: int = 64,
    topk: int = 100,
    tables: str = "both",
    dtypes: Sequence[str] = ("int32", "int32", "int32"),
    excess: int = 1,
    wider: int = 3,
    huge: bool = False,
    content: str = "noise",
    **more: Any,
) -> dict[str, Any]:
    """Params of one call.

    Parameters
    ----------
    pool_rows : sequence of int, optional
        Row of `req_to_token` of each request; None: distinct ones, in reverse.
    tables : "both", "slots" or "pages"
        Which of the page tables are given. With a page size of 1 there are slots only.
    dtypes : sequence of str
        Types of `seq_lens`, `req_pool_indices` and `extend_seq_lens`.
    excess : int
        Entries, rows and columns that outputs have beyond what is needed.
    wider : int
        Columns of `req_to_token` beyond `max_len`.
    huge : bool
        Rows of `req_to_token` and of the page tables stand so far apart that the last one begins
        behind `HUGE_OFFSET`.
    content : "noise" or "blank"
        What tables hold before the call: random bits, or (where they are too large) zeros.
    more
        What the op's own builder reads.
    """
    bs = len(seq_lens)
    return {
        "seq_lens": list(seq_lens),
        "pool_rows": list(range(bs, 0, -1)) if pool_rows is None else list(pool_rows),
        "max_len": max_len,
        "page": page,
        "topk": topk,
        "tables": tables,
        "dtypes": list(dtypes),
        "excess": excess,
        "wider": wider,
        "huge": huge,
        "content": content,
        **more,
    }


class _Maker:
    """Makes the tensors of one call."""

    def __init__(self, params: Params, seed: int) -> None:
        self.params = params
        self.generator = torch.Generator().manual_seed(seed)

    def indices(self, name: str, place: int) -> Tensor:
        return torch.tensor(self.params[name], dtype=DTYPES[self.params["dtypes"][place]])

    def req_to_token(self) -> Tensor:
        # One row more than is named: row 0 is also where padded requests point.
        rows = self.params.get("pool_size", 1 + max(self.params["pool_rows"], default=0))
        tokens = self._matrix(rows, self.params["max_len"] + self.params["wider"])
        # The largest slots are among them, and slot 0, in any column; none is negative.
        tokens.copy_(
            torch.randint(2**31, tokens.shape, dtype=torch.int32, generator=self.generator)
        )
        kind = tokens % 8
        tokens[kind < 2] |= 0x7FFFFF00
        tokens[kind == 2] = 0
        return tokens

    def lengths(self, size: int) -> Tensor:
        return self._noise(size + self.params["excess"])

    def tables(
        self, rows: int, tables: str | None = None, excess: int | None = None
    ) -> dict[str, Tensor | None]:
        """Both page tables, None where they are not given; stale content everywhere."""
        tables = self.params["tables"] if tables is None else tables
        excess = self.params["excess"] if excess is None else excess
        page, max_len = self.params["page"], self.params["max_len"]
        made: dict[str, Tensor | None] = {"page_table_1": None, "real_page_table": None}
        if tables != "pages" or page == 1:
            made["page_table_1"] = self._stale(rows + excess, max_len + excess)
        if tables != "slots" and page > 1:
            made["real_page_table"] = self._stale(rows + excess, -(-max_len // page) + excess)
        return made

    def _stale(self, rows: int, columns: int) -> Tensor:
        table = self._matrix(rows, columns)
        if self.params["content"] == "noise":
            table.copy_(self._noise(rows, columns))
        return table

    def _matrix(self, rows: int, columns: int) -> Tensor:
        if not self.params["huge"]:
            return torch.zeros(rows, columns, dtype=torch.int32)
        # Whole 16 bytes apart, so that the kernels' wide accesses are used here too.
        stride = (HUGE_OFFSET // (rows - 1) // 4 + 1) * 4
        room = torch.empty((rows - 1) * stride + columns, dtype=torch.int32)
        return room.as_strided((rows, columns), (stride, 1))

    def _noise(self, *shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=self.generator)

    def inputs(self, *, extends: bool = False) -> Args:
        return {
            "seq_lens": self.indices("seq_lens", 0),
            **({"extend_seq_lens": self.indices("extends", 2)} if extends else {}),
            "req_pool_indices": self.indices("pool_rows", 1),
            "req_to_token": self.req_to_token(),
        }

    def sizes(self) -> Args:
        return {
            "max_len": self.params["max_len"],
            "dsa_index_topk": self.params["topk"],
            "physical_page_size": self.params["page"],
        }

    def decode_lengths(self, bs: int) -> dict[str, Tensor]:
        return {
            "cache_seqlens": self.lengths(bs),
            "cu_seqlens_k": self.lengths(bs + 1),
            "dsa_cache_seqlens": self.lengths(bs),
            "dsa_cu_seqlens_k": self.lengths(bs + 1),
        }

    def row_lengths(self, bs: int, rows: int) -> dict[str, Tensor]:
        return {
            "cache_seqlens": self.lengths(bs),
            "cu_seqlens_k": self.lengths(bs + 1),
            "seqlens_expanded": self.lengths(rows),
            "dsa_cache_seqlens": self.lengths(rows),
            "dsa_cu_seqlens_k": self.lengths(rows + 1),
        }


def build_decode(params: Params, seed: int) -> Args:
    """Make the arguments of a decode call on the CPU."""
    maker, bs = _Maker(params, seed), len(params["seq_lens"])
    return {**maker.inputs(), **maker.decode_lengths(bs), **maker.tables(bs), **maker.sizes()}


def build_verify(params: Params, seed: int) -> Args:
    """Make the arguments of a target-verify call; reads `next_n`, `ctx` and `defaults` too."""
    maker, bs = _Maker(params, seed), len(params["seq_lens"])
    next_n, excess = params["next_n"], params["excess"]
    ctx_lens = None
    if params["ctx"]:
        ctx_lens = maker._noise(bs + excess, next_n + excess)
    return {
        **maker.inputs(),
        **maker.row_lengths(bs, bs * next_n),
        **maker.tables(bs * next_n),
        **({} if params.get("defaults") else {"paged_mqa_ctx_lens_2d": ctx_lens}),
        **maker.sizes(),
        "next_n": next_n,
    }


def build_extend(params: Params, seed: int) -> Args:
    """Make the arguments of a draft-extend call; reads `extends` and what bounds the rows too."""
    maker, bs, rows = _Maker(params, seed), len(params["seq_lens"]), params["total_len"]
    return {
        **maker.inputs(extends=True),
        **maker.row_lengths(bs, rows),
        **maker.tables(rows),
        "total_len": rows,
        "max_extend_len": params["max_extend_len"],
        **maker.sizes(),
        # Left out where the case is about defaults.
        **({} if params.get("defaults") else {"static_extend_len": params["static"]}),
    }


def build_draft(params: Params, seed: int) -> Args:
    """Make the arguments of a draft-decode call.

    Reads `steps` too: for each step its tables and excess (None: as in the whole call); and
    `plain`: steps are objects with the right attributes, but no `StepTables`.
    """
    maker, bs = _Maker(params, seed), len(params["seq_lens"])
    kind: Callable[..., Any] = SimpleNamespace if params["plain"] else StepTables
    steps = [
        kind(**{**maker.decode_lengths(bs), **maker.tables(bs, tables, excess)})
        for tables, excess in params["steps"]
    ]
    return {**maker.inputs(), "steps": steps, **maker.sizes()}


def _adds(params: Mapping[str, Any]) -> int:
    """What the op adds to a sequence length to make the KV length."""
    return params.get("next_n", 0)


def replays(params: Params) -> list[Params]:
    """Calls of the same geometry: lengths grow, return, shrink, end in padding, and fall to 0.

    What the case's own numbers keep to, these keep to: `max_len`, `max_extend_len`, as many rows as
    there are, extends that are all alike. Beyond any of them are cases of their own.
    """
    lengths, pool_rows = params["seq_lens"], params["pool_rows"]
    bs, real = len(lengths), (len(lengths) + 1) // 2
    # The map changes, the lengths do not: tables may not be kept for lengths that were seen before.
    moved: dict[str, Any] = {"pool_rows": pool_rows[::-1]}
    bound = INT32_MAX // 4
    if max(lengths, default=0) + _adds(params) <= params["max_len"]:
        bound = params["max_len"] - _adds(params)
    # Where the longest can grow no more, all lengths are others still.
    grown = [min(length + COLUMN_BLOCK + 2, bound) for length in lengths]
    if grown == lengths:
        grown = [max(length - 1, 0) for length in lengths]
    # A batch smaller than the captured one: its tail is of length 1 or 0, all in pool row 0.
    padded = {
        "seq_lens": lengths[:real] + [index % 2 for index in range(bs - real)],
        "pool_rows": pool_rows[:real] + [0] * (bs - real),
    }
    changes = [
        {"seq_lens": grown, **moved},
        {"seq_lens": [length // 3 for length in lengths]},
        padded,
        {"seq_lens": [0] * bs},
    ]
    if "extends" in params:
        extends = params["extends"]
        for change, other in zip(
            changes, (_longer(params), extends[::-1], extends, [0] * bs), strict=True
        ):
            change["extends"] = other
    changes.insert(1, moved)
    # The map keeps its rows when the padding points elsewhere.
    size = 1 + max(pool_rows, default=0)
    return [{**params, "pool_size": size, **change} for change in changes]


def _longer(params: Params) -> list[int]:
    """Extends of one token more each, where they stay what they are: within their bounds, or not.

    Else those of the next request, or, where all are alike, one token less.
    """
    extends, rows = params["extends"], params["total_len"]
    bound = INT32_MAX
    if max(extends, default=0) <= params["max_extend_len"]:
        bound = params["max_extend_len"]
    more = [min(extend + 1, bound) for extend in extends]
    same_kind = sum(more) <= rows or sum(extends) > rows
    if same_kind and more != extends and len(set(more)) == len(set(extends)):
        return more
    turned = extends[1:] + extends[:1]
    return turned if turned != extends else [max(extend - 1, 0) for extend in extends]


def rescale(args: Args) -> Args:
    """The same tensors, with every Python number another one that leaves the call what it is."""
    other = {**args, "dsa_index_topk": max(1, args["dsa_index_topk"] // 2)}
    longest = int(args["seq_lens"].max()) if args["seq_lens"].numel() else 0
    if not args["max_len"] - 1 < longest + _adds(args) <= args["max_len"]:
        other["max_len"] = max(1, args["max_len"] - 1)
    if args["physical_page_size"] > 1:
        other["physical_page_size"] = 2 * args["physical_page_size"]
    if "next_n" in args:
        other["next_n"] = max(1, args["next_n"] - 1)
    if "total_len" in args:
        extends = args["extend_seq_lens"].long()
        if not args["total_len"] - 1 < int(extends.sum()) <= args["total_len"]:
            other["total_len"] = max(0, args["total_len"] - 1)
        if "static_extend_len" in args and len(extends.unique()) <= 1:
            other["static_extend_len"] = not args["static_extend_len"]
    return other


# ---------------------------------------------------------------- what all four have in common

TABLES_ALONE: Mapping[str, dict[str, Any]] = {
    "page_1": {"page": 1},
    "pages_only": {"tables": "pages"},
    "slots_only": {"tables": "slots"},
}
"""Params of calls with one table, for what else a kernel is compiled for."""

_SOME = ("eager", "guards", "graph")
"""The checks of most cases: layouts and old contents add nothing to another length."""


def _shared_cases(
    params: Callable[..., dict[str, Any]],
    shift: int = 0,
    batch: Mapping[str, Any] = MappingProxyType({}),
    long: int = CONTEXT // 4,
    lone: Mapping[str, Any] = MappingProxyType({}),
    lone_shift: int = 0,
    huge: Mapping[str, Any] = MappingProxyType({}),
) -> list[Case]:
    """Cases of decode, verify and draft decode alike.

    Parameters
    ----------
    params : callable
        As `_params`, with the op's own params filled in.
    shift : int
        What the op adds to a sequence length to make the KV length.
    batch : mapping
        Own params of the case with a batch of 64.
    long : int
        Width of the long table, in positions.
    lone : mapping
        Own params that give a lone request one row.
    lone_shift : int
        `shift` with these.
    huge : mapping
        Own params of the case whose tensors reach past 2^31 elements, for few of those.
    """

    def at(*kv_lens: int) -> list[int]:
        return [max(kv_len - shift, 0) for kv_len in kv_lens]

    return [
        # A width that is a multiple of neither a block nor a page; all lengths around a block.
        Case("around_blocks", params(at(0, 1, 127, 128, 129), 300)),
        Case(
            "around_second_block",
            params(at(255, 256, 257, 300), 300, page=16, topk=200),
            checks=("eager", "poison", "graph"),
        ),
        # Up to the last column, and past it: nothing is written at or behind max_len.
        Case("exactly_max_len", params(at(300, 299, 301), 300, page=256), checks=_SOME),
        Case("past_max_len", params(at(1000, 384, 385), 257, page=16), checks=_SOME),
        Case(
            "max_len_of_whole_blocks",
            params(at(256, 1, 255, 257), 256, excess=0, wider=0),
            checks=_SOME,
        ),
        Case("empty_requests", params([0, 0, 0], 200), checks=_SOME),
        Case("empty_between_long", params(at(200, 0, 129), 200), checks=("eager", "graph")),
        Case("page_1", params(at(1, 129), 300, page=1), checks=("eager", "guards", "strided")),
        Case("page_256", params(at(1, 257, 256), 600, page=256), checks=_SOME),
        # The other page sizes: one that is not known must not fall back on another.
        *(
            Case(
                f"page_{page}",
                params(at(page + 1), page + 9, page=page, excess=0),
                checks=("eager", "graph"),
            )
            for page in (4, 8, 32, 128, 512)
        ),
        Case("page_wider_than_table", params(at(1, 129), 200, page=1024), checks=("eager",)),
        Case("page_2_pages_only", params(at(129, 3), 131, page=2, tables="pages"), checks=_SOME),
        Case(
            "pages_only",
            params(at(1, 128, 129), 300, tables="pages", dtypes=("int64", "int32", "int64")),
            checks=("eager", "guards", "strided", "graph"),
        ),
        Case(
            "slots_only",
            params(at(1, 129), 300, tables="slots", dtypes=("int32", "int64", "int32")),
            checks=("eager", "strided", "graph"),
        ),
        Case(
            "all_indices_int64",
            params(at(5, 130, 64), 200, dtypes=("int64", "int64", "int64")),
            checks=("eager", "graph"),
        ),
        # Padded requests all point to pool row 0.
        Case(
            "padded_rows_alias_slot_0",
            params([at(200)[0], 1, 0, 1], 200, pool_rows=(2, 0, 0, 0), topk=1),
            checks=("eager", "repeat", "graph"),
        ),
        Case(
            "pool_rows_repeat", params(at(9, 140, 70), 200, pool_rows=(1, 1, 3)), checks=("eager",)
        ),
        Case("topk_below_every_length", params(at(30, 40, 50), 64, topk=3), checks=("eager",)),
        Case(
            "topk_above_every_length", params(at(30, 40, 0), 64, topk=INT32_MAX), checks=("eager",)
        ),
        Case(
            "one_column",
            params(at(1, 5), 1, page=2, excess=0, wider=0),
            checks=("eager", "guards"),
        ),
        Case("one_request", params(at(77), 130, excess=0)),
        Case("no_requests", params([], 200, excess=2)),
        Case("lengths_near_2_31", params([INT32_MAX - 1000, 3], 200), checks=("eager",)),
        # Rounded up to a whole block it is no int32 any more. Top-k hides nothing of it.
        Case(
            "longest_length",
            params([INT32_MAX - lone_shift], 200, topk=INT32_MAX, **lone),
            checks=("eager", "graph"),
        ),
        # Beyond what 16 bits and fp32 hold, in the clamped lengths and in their sums too.
        Case(
            "lengths_beyond_2_24",
            params(at((1 << 24) + 1, 1 << 16, (1 << 25) + 3), 200, topk=INT32_MAX),
            checks=("eager", "graph"),
        ),
        # Pool rows beyond 8, 15 and 16 bits, and far beyond the batch.
        Case(
            "far_pool_rows",
            params(at(1, 4, 3), 2, page=2, pool_rows=(65539, 300, 32770), excess=0, wider=0),
            checks=("eager", "graph"),
        ),
        Case(
            "batch_of_64",
            params([37 * request % 150 for request in range(64)], 128, page=32, **batch),
            checks=("eager", "graph"),
        ),
        # More requests than a block that sums lengths may be meant for.
        *(
            Case(
                f"batch_of_{bs}",
                params([request % 4 for request in range(bs)], 2, page=2, tables="pages", excess=0),
                profile=profile,
                checks=("eager", "graph"),
                tags=("beyond_range",),
            )
            for bs, profile in ((130, "quick"), (1030, "full"))
        ),
        # More live blocks than a request ever gets programs: each must stride over several.
        Case(
            "live_beyond_256_blocks",
            params(at(256 * 128 + 130), 256 * 128 + 200, tables="pages", excess=0, wider=0),
            checks=("eager", "graph"),
        ),
        # Rows 2^31 elements into their tensors; memory is touched lazily.
        Case(
            "rows_beyond_2_31",
            params(at(100, 129), 200, pool_rows=(2, 1), huge=True, excess=0, **huge),
            checks=("eager", "graph"),
        ),
        # One long table through the production grid; most of its columns are dead.
        Case(
            "long_table",
            params(at(4100), long, topk=2048, wider=0),
            checks=("eager", "graph"),
        ),
        Case(
            "widest_table",
            params(
                at(1024, 0, CONTEXT + 130, 129),
                WIDEST,
                topk=2048,
                dtypes=("int64", "int32", "int32"),
                wider=64,
            ),
            checks=("eager", "guards", "graph"),
            device="cuda",
        ),
        Case(
            "widest_table_full_of_lengths",
            params(
                [1024 + 4096 * request for request in range(15)] + [WIDEST],
                WIDEST,
                topk=2048,
                content="blank",
            ),
            profile="full",
            checks=("eager", "graph"),
            device="cuda",
        ),
    ]


@st.composite
def _drawn(draw: st.DrawFn, most_requests: int = 4) -> dict[str, Any]:
    """Params of small calls that all ops have."""
    max_len = draw(
        st.one_of(st.integers(1, 40), st.sampled_from((127, 128, 129, 200, 256, 257, 300)))
    )
    length = st.one_of(
        st.sampled_from(AROUND_BLOCKS), st.integers(0, max_len + 10), st.integers(0, 6)
    )
    requests = draw(st.lists(st.tuples(length, st.integers(0, 4)), max_size=most_requests))
    return _params(
        [length for length, _ in requests],
        max_len,
        pool_rows=[row for _, row in requests],
        page=draw(st.sampled_from((64, 1, 16, 2, 4, 8, 32, 128, 256, 512, 4096))),
        topk=draw(st.sampled_from((1, 5, 100, 128, 2048))),
        tables=draw(st.sampled_from(("both", "slots", "pages"))),
        dtypes=draw(st.tuples(*[st.sampled_from(("int32", "int64"))] * 3)),
        excess=draw(st.integers(0, 2)),
        wider=draw(st.integers(0, 3)),
    )


STRIDES: dict[str, Literal["rows", "any"]] = {
    "seq_lens": "any",
    "req_pool_indices": "any",
    "req_to_token": "any",
}

TABLE_STRIDES: dict[str, Literal["rows", "any"]] = {"page_table_1": "any", "real_page_table": "any"}

COLUMNS_RULE = (
    "columns [0, min(max_len, 128 * ceil(KV / 128))) of a request's rows receive req_to_token"
)
SLOTS_RULE = f"{COLUMNS_RULE}[pool row, column]; all other bytes stay"
PAGES_RULE = (
    "real column c with c * page size among the live columns receives "
    "req_to_token[pool row, c * page size] // page size; all other bytes stay"
)


def _effects(kv: str, seen: str, prefix: str = "", *, expanded: bool = False) -> list[Effect]:
    """Effects of an op, worded for its KV lengths and what its rows see."""
    effects = [
        Effect(f"{prefix}cache_seqlens", rule=f"the first bs entries are the KV lengths, {kv}"),
        Effect(f"{prefix}cu_seqlens_k", rule=f"0, then the inclusive sums of the KV lengths, {kv}"),
        Effect(
            f"{prefix}dsa_cache_seqlens",
            rule=f"one entry a row: min({seen}, dsa_index_topk); entries behind them stay",
        ),
        Effect(f"{prefix}dsa_cu_seqlens_k", rule="0, then the inclusive sums of dsa_cache_seqlens"),
        Effect(f"{prefix}page_table_1", rule=SLOTS_RULE),
        Effect(f"{prefix}real_page_table", rule=PAGES_RULE),
    ]
    if expanded:
        effects.append(Effect("seqlens_expanded", rule=f"one entry a row: {seen}"))
    return effects


# ---------------------------------------------------------------- bad inputs


def _argument(name: str, change: Callable[[Any], Any]) -> Callable[[Args], Args]:
    return lambda args: {**args, name: change(args[name])}


def _value(name: str, value: Any) -> Callable[[Args], Args]:
    return lambda args: {**args, name: value}


TENSOR_FAULTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda t: t.to(torch.float32),
    "int16": lambda t: t.to(torch.int16),
    "of_another_rank": lambda t: t[None],
    # As many entries or rows as are due: only a look at the rank refuses it.
    "with_one_dimension_more": lambda t: t[..., None],
    "on_another_device": lambda t: t.to("meta"),
}
"""What is wrong with every tensor that has it."""


def _shared_bad_inputs(
    indices: Sequence[str], lengths: Sequence[str], empty: Params
) -> list[BadInput]:
    """Bad inputs of an op that reads the 1-D `indices` and writes the 1-D `lengths`.

    `empty` is a call without requests, which is validated all the same.
    """
    bad = [
        BadInput(f"{name}_{fault}", _argument(name, change), names=name)
        for name in indices
        for fault, change in TENSOR_FAULTS.items()
    ]
    bad += [
        BadInput(f"{name}_{fault}", _argument(name, change), names=name)
        for name in indices[1:]
        for fault, change in (
            ("too_long", lambda t: torch.cat([t, t[:1]])),
            ("too_short", lambda t: t[:-1]),
        )
    ]
    bad += [
        BadInput("seq_lens_too_short", _argument("seq_lens", lambda t: t[:-1]), names="seq_lens"),
        BadInput("seq_lens_0d", _argument("seq_lens", lambda t: t[0]), names="seq_lens"),
        BadInput(
            "req_to_token_int64",
            _argument("req_to_token", lambda t: t.long()),
            names="req_to_token",
        ),
        BadInput(
            "req_to_token_1d", _argument("req_to_token", lambda t: t[0]), names="req_to_token"
        ),
        BadInput(
            "req_to_token_3d",
            _argument("req_to_token", lambda t: t[..., None]),
            names="req_to_token",
        ),
        BadInput(
            "req_to_token_on_another_device",
            _argument("req_to_token", lambda t: t.to("meta")),
            names="req_to_token",
        ),
        BadInput("max_len_zero", _value("max_len", 0), names="max_len"),
        BadInput("max_len_negative", _value("max_len", -5), names="max_len"),
        BadInput(
            "max_len_beyond_req_to_token",
            _argument("req_to_token", lambda t: t[:, :199]),
            names="max_len",
        ),
        BadInput("topk_zero", _value("dsa_index_topk", 0), names="dsa_index_topk"),
        BadInput("topk_negative", _value("dsa_index_topk", -1), names="dsa_index_topk"),
        *(
            BadInput(
                f"page_size_{page}".replace("-", "minus_"),
                _value("physical_page_size", page),
                names="physical_page_size",
            )
            for page in (0, -64, 3, 48, 65)
        ),
    ]
    bad += [
        BadInput(f"{name}_without_requests", edit, names=names, params=empty)
        for name, names, edit in (
            ("topk_zero", "dsa_index_topk", _value("dsa_index_topk", 0)),
            ("page_size_3", "physical_page_size", _value("physical_page_size", 3)),
            ("max_len_zero", "max_len", _value("max_len", 0)),
            ("seq_lens_int16", "seq_lens", _argument("seq_lens", lambda t: t.short())),
            (
                "req_pool_indices_too_long",
                "req_pool_indices",
                _argument("req_pool_indices", lambda t: t.new_zeros(1)),
            ),
            *(
                (f"{name}_int64", name, _argument(name, lambda t: t.long()))
                for name in lengths[-1:]
            ),
        )
    ]
    for name in lengths:
        bad += _bad_output(name, {"int64": lambda t: t.long(), "too_short": _without_last})
    return bad


def _bad_output(name: str, more: Mapping[str, Callable[[Tensor], Tensor]]) -> list[BadInput]:
    faults = {**TENSOR_FAULTS, **more}
    return [
        BadInput(f"{name}_{fault}", _argument(name, change), names=name)
        for fault, change in faults.items()
    ]


def _without_last(tensor: Tensor) -> Tensor:
    return tensor[:-1]


TABLE_FAULTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda t: t.long(),
    "with_too_few_rows": _without_last,
    "too_narrow": lambda t: t[:, :-1],
}


def _table_bad_inputs() -> list[BadInput]:
    """Bad page tables of an op that has them as arguments."""
    bad = [
        BadInput(
            "both_tables_missing",
            lambda args: {**args, "page_table_1": None, "real_page_table": None},
            names="page_table_1",
        ),
        BadInput(
            "page_table_1_missing_with_page_size_1",
            lambda args: {
                **args, "page_table_1": None, "real_page_table": None, "physical_page_size": 1
            },
            names="page_table_1",
        ),
        BadInput(
            "real_page_table_with_page_size_1",
            lambda args: {
                **args,
                "physical_page_size": 1,
                "real_page_table": torch.empty_like(args["page_table_1"]),
            },
            names="real_page_table",
        ),
    ]  # fmt: skip
    for name in ("page_table_1", "real_page_table"):
        bad += _bad_output(name, TABLE_FAULTS)
    return bad


# ---------------------------------------------------------------- benchmark

BENCH_ROWS = 5
"""Verify and extend rows of a request in the benchmark."""

BENCH_TOPK = 2048
BENCH_PAGE = 64
BENCH_BATCHES = (1, 4, 16)
BENCH_LIVE = {"1k": 1024, "64k": CONTEXT}

PUBLISHED_US = {
    ("decode", "1k"): ((5.1, 1.8), (17.4, 2.2), (67.2, 2.8)),
    ("decode", "64k"): ((5.5, 2.8), (17.7, 3.5), (67.3, 5.1)),
    ("verify", "1k"): ((21.9, 2.3), (83.6, 2.6), (332.1, 2.9)),
    ("verify", "64k"): ((22.2, 3.1), (84.0, 3.9), (331.7, 7.9)),
    ("extend", "1k"): ((6.4, 2.4), (18.8, 2.7), (68.3, 2.9)),
    ("extend", "64k"): ((6.5, 3.2), (19.1, 4.4), (68.6, 9.6)),
    ("draft3", "1k"): ((11.9, 2.4), (33.6, 2.4), (123.1, 2.7)),
    ("draft3", "64k"): ((11.7, 3.1), (33.6, 3.9), (123.6, 6.5)),
    ("draft4", "1k"): ((21.0, 2.3), (47.2, 2.6), (168.6, 3.1)),
    ("draft4", "64k"): ((20.9, 3.0), (47.2, 3.9), (169.0, 6.9)),
}
"""Microseconds of a published graph replay on a GB300, unbounded then bounded, for each batch of
`BENCH_BATCHES`."""

RESOLUTION_US = 0.3
"""Microseconds by which a cell may miss what the published ratio asks of it."""

WIDTH_SHARE = 0.05
"""How much longer a table of 1M columns may take than one of 64k."""


def _arm(
    op: str, suffix: str, max_len: int | None = None
) -> Callable[[Args], Callable[[], object]]:
    """What is timed: the op's kernel, on the call's own tables or on narrower ones."""

    def prepare(args: Args) -> Callable[[], object]:
        # Here, not at the top: a spec is read before it is known how Triton is to run.
        from draftproof.kernels import dsa_metadata

        function = getattr(dsa_metadata, f"{op}{suffix}")
        call = args if max_len is None else _narrowed(args, max_len)
        return lambda: function(**call)

    return prepare


def _narrowed(args: Args, max_len: int) -> Args:
    """The same call with tables of `max_len` columns, in memory of their own."""

    def narrow(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        widths = {"page_table_1": max_len, "real_page_table": max_len // BENCH_PAGE}
        return {
            name: tensor[:, : widths[name]].clone() if name in widths else tensor
            for name, tensor in tables.items()
        }

    narrowed = {
        **args,
        "max_len": max_len,
        "req_to_token": args["req_to_token"][:, :max_len].clone(),
    }
    if "steps" in args:
        return {**narrowed, "steps": [StepTables(**narrow(vars(step))) for step in args["steps"]]}
    return narrow(narrowed)


def _reach(published: tuple[float, float]) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    unbounded, bounded = published

    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        net, of = us["bounded"] - us["empty"], us["unbounded"] - us["empty"]
        allowed = of * bounded / unbounded
        narrow = us["bounded_64k_wide"]
        alike = us["bounded"] <= (1 + WIDTH_SHARE) * narrow
        return net <= allowed + RESOLUTION_US and alike, (
            f"net of the empty replay {net:.2f} of {of:.2f} us, ratio {net / of:.3f} (published "
            f"{bounded / unbounded:.3f}, not net): at most {allowed:.2f} + {RESOLUTION_US} us; "
            f"at most {WIDTH_SHARE:.0%} more than a 64k-wide table ({narrow:.2f} us)"
        )

    return reach


def _bench(
    op: str,
    label: str,
    rows: int,
    own: Callable[[int], Mapping[str, Any]] = lambda bs: {},
    shift: int = 0,
) -> Callable[[], list[BenchPoint]]:
    """The published grid of one op, cold L2.

    Parameters
    ----------
    op, label : str
        Its name, and its key in `PUBLISHED_US`.
    rows : int
        Table rows written per request.
    own : callable
        `own(bs)` gives the op's own params.
    shift : int
        What the op adds to a sequence length to make the KV length.
    """

    def points() -> list[BenchPoint]:
        found = []
        for live, kv_len in BENCH_LIVE.items():
            for bs, published in zip(BENCH_BATCHES, PUBLISHED_US[label, live], strict=True):
                params = _params(
                    [kv_len - shift] * bs,
                    WIDEST,
                    page=BENCH_PAGE,
                    topk=BENCH_TOPK,
                    excess=0,
                    wider=0,
                    content="blank",
                    **own(bs),
                )
                written = rows * (kv_len + kv_len // BENCH_PAGE)
                found.append(
                    BenchPoint(
                        f"{label}_live{live}_bs{bs}",
                        params,
                        arms={
                            "bounded": _arm(op, ""),
                            "unbounded": _arm(op, "_baseline"),
                            "bounded_64k_wide": _arm(op, "", CONTEXT),
                        },
                        baseline="unbounded",
                        cold=True,
                        bytes_moved=4 * bs * (kv_len + written),
                        published_us={"unbounded": published[0], "bounded": published[1]},
                        reach=_reach(published),
                    )
                )
        return found

    return points


# ---------------------------------------------------------------- decode

DECODE_LENGTHS = ("cache_seqlens", "cu_seqlens_k", "dsa_cache_seqlens", "dsa_cu_seqlens_k")
ROW_LENGTHS = ("cache_seqlens", "cu_seqlens_k", "seqlens_expanded", *DECODE_LENGTHS[2:])

DECODE = OpSpec(
    name="dsa_decode_metadata",
    family="dsa_metadata",
    summary="lengths and page tables of sparse-attention decode before a graph replay",
    build=build_decode,
    effects=_effects("seq_lens[b]", "seq_lens[b]"),
    cases=_shared_cases(_params, long=CONTEXT),
    strategy=_drawn,
    bad_inputs=[
        *_shared_bad_inputs(("seq_lens", "req_pool_indices"), DECODE_LENGTHS, _params([], 200)),
        *_table_bad_inputs(),
    ],
    bad_input_params=_params([5, 129], 200, excess=0),
    replays=replays,
    rescale=rescale,
    strides={**STRIDES, **TABLE_STRIDES},
    bench=_bench("dsa_decode_metadata", "decode", 1),
)


# ---------------------------------------------------------------- target verify


def _verify_params(
    seq_lens: Sequence[int], max_len: int, *, next_n: int = 3, ctx: bool = True, **more: Any
) -> dict[str, Any]:
    return _params(seq_lens, max_len, next_n=next_n, ctx=ctx, **more)


@st.composite
def _drawn_verify(draw: st.DrawFn) -> Params:
    next_n = draw(st.integers(1, 10))
    drawn = draw(_drawn(most_requests=3))
    return {**drawn, "next_n": next_n, "ctx": draw(st.booleans())}


VERIFY = OpSpec(
    name="dsa_target_verify_metadata",
    family="dsa_metadata",
    summary="lengths and page tables of sparse-attention target verify before a graph replay",
    build=build_verify,
    effects=[
        *_effects("seq_lens[b] + next_n", "seq_lens[b] + j + 1", expanded=True),
        Effect(
            "paged_mqa_ctx_lens_2d", rule="[b, j < next_n] is the KV length, seq_lens[b] + next_n"
        ),
    ],
    cases=[
        # The last column is 4095; the drafts themselves lie past the table.
        Case(
            "drafts_past_the_table",
            _verify_params([4095], 4096, next_n=5, wider=0, excess=0, topk=2048),
            checks=("eager", "guards", "graph"),
        ),
        Case("one_draft", _verify_params([0, 127, 128], 200, next_n=1), checks=("eager", "guards")),
        Case("three_drafts", _verify_params([125, 126, 124], 260, next_n=3), checks=_SOME),
        Case(
            "nine_drafts",
            _verify_params([119, 120, 0], 140, next_n=9, topk=124, excess=3),
            checks=("eager", "guards", "graph"),
        ),
        Case(
            "many_drafts",
            _verify_params([3, 100], 40, next_n=33, topk=20, page=16),
            checks=("eager", "graph"),
        ),
        *(
            Case(
                f"drafts_{next_n}",
                _verify_params([129 - next_n, 3], 140, next_n=next_n, tables="pages"),
                checks=("eager", "graph"),
            )
            for next_n in (6, 7, 8)
        ),
        # Rows of one request straddle top-k.
        Case(
            "topk_between_drafts",
            _verify_params([97, 98, 100], 130, topk=100, next_n=4),
            checks=("eager", "repeat", "graph"),
        ),
        Case(
            "no_ctx_lens",
            _verify_params([1, 130], 200, next_n=2, ctx=False),
            checks=("eager", "guards", "graph"),
        ),
        *(
            Case(
                f"no_ctx_lens_{label}",
                _verify_params([1, 127], 130, next_n=2, ctx=False, **tables),
                checks=("eager", "graph"),
            )
            for label, tables in TABLES_ALONE.items()
        ),
        Case(
            "ctx_lens_left_out",
            _verify_params([1, 130], 200, next_n=2, ctx=False, defaults=True),
            checks=("eager",),
        ),
        *_shared_cases(_verify_params, 3, {"next_n": 9}, lone={"next_n": 1}, lone_shift=1),
    ],
    strategy=_drawn_verify,
    bad_inputs=[
        *_shared_bad_inputs(("seq_lens", "req_pool_indices"), ROW_LENGTHS, _verify_params([], 200)),
        *_table_bad_inputs(),
        *_bad_output("paged_mqa_ctx_lens_2d", TABLE_FAULTS),
        BadInput("next_n_zero", _value("next_n", 0), names="next_n"),
        BadInput("next_n_negative", _value("next_n", -1), names="next_n"),
        # Enough for the requests, not for their rows.
        BadInput(
            "outputs_with_one_row_a_request",
            lambda args: {**args, "dsa_cache_seqlens": args["dsa_cache_seqlens"][:2]},
            names="dsa_cache_seqlens",
        ),
    ],
    bad_input_params=_verify_params([5, 129], 200, next_n=3, excess=0),
    replays=replays,
    rescale=rescale,
    strides={**STRIDES, **TABLE_STRIDES},
    bench=_bench(
        "dsa_target_verify_metadata",
        "verify",
        BENCH_ROWS,
        lambda bs: {"next_n": BENCH_ROWS, "ctx": True},
        shift=BENCH_ROWS,
    ),
)


# ---------------------------------------------------------------- draft extend


def _extend_params(
    seq_lens: Sequence[int],
    extends: Sequence[int],
    max_len: int = 200,
    *,
    total_len: int | None = None,
    max_extend_len: int = 6,
    static: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Params of a draft-extend call; a `total_len` of None is exactly the rows of the requests."""
    if total_len is None:
        total_len = extends[0] * len(extends) if static and extends else sum(extends)
    return _params(
        seq_lens,
        max_len,
        extends=list(extends),
        total_len=total_len,
        max_extend_len=max_extend_len,
        static=static,
        **more,
    )


def _as_extend(seq_lens: Sequence[int], max_len: int, **more: Any) -> dict[str, Any]:
    """The shared cases, with extends that differ from request to request."""
    extends = more.pop("extends", [(3, 1, 0, 2, 4)[row % 5] for row in range(len(seq_lens))])
    return _extend_params(seq_lens, extends, max_len, **more)


@st.composite
def _drawn_extend(draw: st.DrawFn) -> Params:
    drawn = draw(_drawn(most_requests=3))
    bs = len(drawn["seq_lens"])
    most = draw(st.integers(0, 5))
    return {
        **drawn,
        "extends": draw(st.lists(st.integers(0, 6), min_size=bs, max_size=bs)),
        "max_extend_len": most,
        "total_len": draw(st.integers(0, bs * most)),
        "static": draw(st.booleans()),
    }


EXTEND = OpSpec(
    name="dsa_draft_extend_metadata",
    family="dsa_metadata",
    summary="lengths and page tables of sparse-attention draft extend before a graph replay",
    build=build_extend,
    effects=_effects(
        "seq_lens[b]",
        "max(0, seq_lens[b] - q_b + j + 1); rows past the last request: seq_lens[0]",
        expanded=True,
    ),
    cases=[
        # A padded request: one token in the cache, six queries.
        Case("shorter_than_its_extend", _extend_params([1, 3, 0], [6, 5, 2]), checks=_SOME),
        Case("as_long_as_its_extend", _extend_params([6, 5, 130], [6, 6, 4]), checks=("eager",)),
        Case(
            "no_query_in_the_middle",
            _extend_params([9, 50, 131], [2, 0, 3], topk=20),
            checks=(*_SOME, "repeat"),
        ),
        Case("no_query_at_either_end", _extend_params([9, 50, 131, 7], [0, 3, 0, 0]), checks=_SOME),
        # Several requests in a row, at the start too, begin at the same table row.
        Case(
            "no_query_several_times",
            _extend_params([9, 50, 131, 7, 8, 70], [0, 0, 2, 0, 0, 3], topk=20),
            checks=("eager", "graph"),
        ),
        # The row behind the last request is the last request's first row, which it has not.
        Case(
            "no_query_before_padding",
            _extend_params([9, 131, 50], [2, 1, 0], total_len=5),
            checks=("eager", "graph"),
        ),
        # No request has a row: all of them are padding.
        Case("no_query_at_all", _extend_params([9, 50], [0, 0], total_len=3), checks=_SOME),
        Case(
            "rows_past_the_last_request",
            _extend_params([40, 7], [2, 1], total_len=9, topk=30),
            checks=(*_SOME, "strided"),
        ),
        Case(
            "rows_cut_within_a_request",
            _extend_params([40, 60, 70], [2, 4, 3], total_len=4),
            checks=("eager", "poison", "graph"),
        ),
        Case(
            "rows_cut_between_requests",
            _extend_params([40, 60, 70], [2, 3, 3], total_len=5, excess=4),
            checks=_SOME,
        ),
        Case("static", _extend_params([40, 2, 130], [4, 4, 4], static=True), checks=_SOME),
        # Static: only the first entry counts.
        Case(
            "static_other_entries_differ",
            _extend_params([40, 2, 130], [3, 0, 5], static=True),
            checks=(*_SOME, "repeat"),
        ),
        Case(
            "static_rows_past_the_last_request",
            _extend_params([140, 60], [2, 2], total_len=7, static=True),
            checks=_SOME,
        ),
        Case(
            "static_rows_cut",
            _extend_params([140, 60], [4, 4], total_len=6, static=True, excess=3),
            checks=_SOME,
        ),
        Case(
            "static_no_query",
            _extend_params([140, 60], [0, 0], total_len=4, static=True),
            checks=_SOME,
        ),
        Case(
            "static_no_query_first_entry_only",
            _extend_params([140, 60], [0, 3], total_len=4, static=True),
            checks=_SOME,
        ),
        # Lengths and the leading zero are written all the same.
        Case("no_rows", _extend_params([140, 60], [2, 3], total_len=0, excess=2), checks=_SOME),
        Case(
            "static_no_rows", _extend_params([9], [2], total_len=0, static=True), checks=("eager",)
        ),
        # max_extend_len bounds total_len, and no request.
        Case(
            "extend_beyond_max_extend_len",
            _extend_params([50, 40], [5, 1], max_extend_len=3, total_len=6),
            checks=("eager", "graph"),
        ),
        Case(
            "static_extend_beyond_max_extend_len",
            _extend_params([50, 2], [5, 5], max_extend_len=3, total_len=6, static=True),
            checks=("eager", "graph"),
        ),
        Case(
            "long_rows_past_the_last_request",
            _extend_params([(1 << 24) + 1, 7], [1, 1], total_len=4, topk=INT32_MAX),
            checks=("eager", "graph"),
        ),
        Case(
            "static_batch_of_64",
            _extend_params(
                [37 * request % 150 for request in range(64)],
                [1] * 64,
                10,
                static=True,
                tables="pages",
            ),
            checks=("eager", "graph"),
        ),
        Case(
            "wide_extends",
            _extend_params([300, 90], [70, 41], 130, max_extend_len=70, topk=60),
            checks=("eager", "graph"),
        ),
        Case(
            "large_extends_cut",
            _extend_params([300, 90, 5], [3, INT32_MAX, INT32_MAX], total_len=8),
            checks=("eager",),
        ),
        Case(
            "static_extend_len_left_out",
            _extend_params([30, 129], [2, 3], defaults=True),
            checks=("eager",),
        ),
        Case(
            "mixed_types",
            _extend_params([30, 129], [2, 3], dtypes=("int32", "int32", "int64")),
            checks=("eager", "strided"),
        ),
        # Every mix of index types; static reads a single entry of one of them.
        *(
            Case(
                f"{'static_' if static else ''}types_"
                + "_".join(name.removeprefix("int") for name in dtypes),
                _extend_params([3, 5], [1, 1], 9, static=static, tables="pages", dtypes=dtypes),
                checks=("eager", "graph"),
            )
            for static in (False, True)
            for dtypes in product(("int32", "int64"), repeat=3)
        ),
        *_shared_cases(_as_extend, lone={"extends": [1]}),
    ],
    strategy=_drawn_extend,
    bad_inputs=[
        *_shared_bad_inputs(
            ("seq_lens", "extend_seq_lens", "req_pool_indices"), ROW_LENGTHS, _extend_params([], [])
        ),
        *(
            BadInput(
                f"{name}_without_rows",
                edit,
                names=names,
                params=_extend_params([5, 129], [2, 3], total_len=0),
            )
            for name, names, edit in (
                (
                    "extend_seq_lens_too_short",
                    "extend_seq_lens",
                    _argument("extend_seq_lens", lambda t: t[:1]),
                ),
                ("page_size_3", "physical_page_size", _value("physical_page_size", 3)),
                (
                    "page_table_1_int64",
                    "page_table_1",
                    _argument("page_table_1", lambda t: t.long()),
                ),
            )
        ),
        *_table_bad_inputs(),
        BadInput("total_len_negative", _value("total_len", -1), names="total_len"),
        BadInput("total_len_too_large", _value("total_len", 13), names="total_len"),
        BadInput("total_len_beyond_max_extend_len", _value("max_extend_len", 2), names="total_len"),
        BadInput("max_extend_len_negative", _value("max_extend_len", -1), names="total_len"),
        BadInput(
            "rows_without_requests",
            _value("total_len", 1),
            names="total_len",
            params=_extend_params([], []),
        ),
    ],
    bad_input_params=_extend_params([5, 129], [2, 3], excess=0),
    replays=replays,
    rescale=rescale,
    strides={**STRIDES, **TABLE_STRIDES, "extend_seq_lens": "any"},
    bench=_bench(
        "dsa_draft_extend_metadata",
        "extend",
        BENCH_ROWS,
        lambda bs: {
            "extends": [BENCH_ROWS] * bs,
            "total_len": BENCH_ROWS * bs,
            "max_extend_len": BENCH_ROWS,
            "static": True,
        },
    ),
)


# ---------------------------------------------------------------- draft decode

ALIKE = (None, None)
"""A step that has the tables and the excess of the whole call."""


def _draft_params(
    seq_lens: Sequence[int],
    max_len: int,
    *,
    steps: Sequence[tuple[str | None, int | None]] = (ALIKE, ALIKE),
    plain: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return _params(seq_lens, max_len, steps=[list(step) for step in steps], plain=plain, **more)


@st.composite
def _drawn_draft(draw: st.DrawFn) -> Params:
    step = st.one_of(
        st.just(ALIKE),
        st.tuples(st.sampled_from((None, "both", "slots", "pages")), st.integers(0, 2)),
    )
    drawn = draw(_drawn(most_requests=3))
    steps = draw(st.lists(step, min_size=1, max_size=MAX_DRAFT_STEPS))
    return {**drawn, "steps": [list(drawn) for drawn in steps], "plain": draw(st.booleans())}


def _steps(change: Callable[[list[Any]], list[Any]]) -> Callable[[Args], Args]:
    return lambda args: {**args, "steps": change(list(args["steps"]))}


def _last_step(name: str, change: Callable[[Any], Any]) -> Callable[[Args], Args]:
    """Spoil one tensor of the last step: who checks as they write has written the others."""

    def edit(args: Args) -> Args:
        *steps, last = args["steps"]
        spoilt = StepTables(**{**vars(last), name: change(getattr(last, name))})
        return {**args, "steps": [*steps, spoilt]}

    return edit


def _draft_bad_inputs() -> list[BadInput]:
    bad = [
        BadInput("no_steps", _steps(lambda steps: []), names="steps"),
        BadInput("five_steps", _steps(lambda steps: [*steps, *steps, steps[0]]), names="steps"),
        BadInput(
            "last_step_without_tables",
            lambda args: _last_step("page_table_1", lambda t: None)(
                _last_step("real_page_table", lambda t: None)(args)
            ),
            names="steps[1].page_table_1",
        ),
        BadInput(
            "last_step_int64_without_requests",
            _last_step("cu_seqlens_k", lambda t: t.long()),
            names="steps[1].cu_seqlens_k",
            params=_draft_params([], 200),
        ),
        BadInput(
            "page_size_1_with_real_page_tables",
            _value("physical_page_size", 1),
            names="real_page_table",
        ),
        # Wide enough for a page size of 1: not refused for its width.
        BadInput(
            "page_size_1_with_wide_real_page_tables",
            lambda args: {
                **args,
                "physical_page_size": 1,
                "steps": [
                    StepTables(
                        **{**vars(step), "real_page_table": torch.empty_like(step.page_table_1)}
                    )
                    for step in args["steps"]
                ],
            },
            names="real_page_table",
        ),
        BadInput(
            "first_step_too_short",
            _steps(
                lambda steps: [
                    StepTables(**{**vars(steps[0]), "cu_seqlens_k": steps[0].cu_seqlens_k[:-1]}),
                    *steps[1:],
                ]
            ),
            names="steps[0].cu_seqlens_k",
        ),
    ]
    for name in DECODE_LENGTHS:
        for fault, change in {
            **TENSOR_FAULTS,
            "int64": lambda t: t.long(),
            "too_short": _without_last,
        }.items():
            bad.append(
                BadInput(
                    f"last_step_{name}_{fault}", _last_step(name, change), names=f"steps[1].{name}"
                )
            )
    for name in ("page_table_1", "real_page_table"):
        for fault, change in {**TENSOR_FAULTS, **TABLE_FAULTS}.items():
            bad.append(
                BadInput(
                    f"last_step_{name}_{fault}", _last_step(name, change), names=f"steps[1].{name}"
                )
            )
    return bad


def _draft_bench() -> list[BenchPoint]:
    def grid(count: int) -> list[BenchPoint]:
        own = {"steps": [list(ALIKE)] * count, "plain": False}
        return _bench("dsa_draft_decode_metadata", f"draft{count}", count, lambda bs: own)()

    return [*grid(3), *grid(4)]


DRAFT = OpSpec(
    name="dsa_draft_decode_metadata",
    family="dsa_metadata",
    summary="decode metadata of every step of a multi-token draft, in one launch",
    build=build_draft,
    effects=_effects("seq_lens[b]", "seq_lens[b]", "steps[*]."),
    cases=[
        *(
            Case(
                f"steps_{count}",
                _draft_params([1, 129, 0], 200, steps=[ALIKE] * count, topk=50),
                checks=_SOME,
            )
            for count in (1, 3, 4)
        ),
        *(
            Case(
                f"steps_{count}_{label}",
                _draft_params([5, 129], 130, steps=[ALIKE] * count, **tables),
                checks=("eager", "graph"),
            )
            for count in (1, 3, 4)
            for label, tables in TABLES_ALONE.items()
        ),
        # Steps of other layouts: no single launch serves them.
        Case(
            "steps_of_other_widths",
            _draft_params([1, 129], 200, steps=[(None, 0), (None, 3)]),
            checks=(*_SOME, "strided"),
        ),
        Case(
            "steps_with_other_tables",
            _draft_params(
                [1, 129], 200, steps=[("both", None), ("pages", None), ("slots", None), ALIKE]
            ),
            checks=_SOME,
        ),
        Case(
            "first_step_with_fewer_tables",
            _draft_params([1, 129], 200, steps=[("pages", None), ALIKE]),
            checks=("eager", "graph"),
        ),
        Case(
            "last_step_of_another_width",
            _draft_params([130, 129], 200, steps=[ALIKE, ALIKE, (None, 4)]),
            checks=_SOME,
        ),
        Case(
            "steps_are_plain_objects",
            _draft_params([5, 129], 200, steps=[ALIKE] * 3, plain=True),
            checks=_SOME,
        ),
        *_shared_cases(_draft_params, batch={"steps": (ALIKE,)}, huge={"steps": (ALIKE,)}),
    ],
    strategy=_drawn_draft,
    bad_inputs=[
        *_shared_bad_inputs(("seq_lens", "req_pool_indices"), (), _draft_params([], 200)),
        *_draft_bad_inputs(),
    ],
    bad_input_params=_draft_params([5, 129], 200, excess=0),
    replays=replays,
    rescale=rescale,
    strides={
        **STRIDES,
        "steps[*].page_table_1": "any",
        "steps[*].real_page_table": "any",
    },
    bench=_draft_bench,
)


SPECS = [DECODE, VERIFY, EXTEND, DRAFT]
