"""Wrong implementations of `candidate_blocks`, one fault each, and right ones made differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.oracles.candidate_blocks import validate

OP = "candidate_blocks"
INFINITY = float("inf")
MINUS_INFINITY = float("-inf")


# ---------------------------------------------------------------- one right way, in parts


@dataclass(frozen=True)
class _Rows:
    """What the parts are given of a call."""

    logits: Tensor
    """fp32, [rows, width]"""

    lengths: Tensor
    """int64, [rows, 1], clamped"""

    size: int
    blocks: int

    @property
    def columns(self) -> Tensor:
        return torch.arange(self.logits.shape[1], device=self.logits.device)

    @property
    def block_ids(self) -> Tensor:
        return torch.arange(self.blocks, device=self.logits.device)


def _lengths(seq_lens: Tensor, width: int) -> Tensor:
    return seq_lens.long().clamp(0, width)[:, None]


def _visible(rows: _Rows) -> Tensor:
    return rows.columns < rows.lengths


def _mask(logits: Tensor, visible: Tensor) -> Tensor:
    return logits.masked_fill(~visible, MINUS_INFINITY)


def _score(members: Tensor) -> Tensor:
    # amax hands a NaN on.
    return members.amax(2)


def _newest(rows: _Rows) -> Tensor:
    return (rows.lengths > 0) & (rows.block_ids == (rows.lengths - 1) // rows.size)


def _choose(scores: Tensor, places: int) -> Tensor:
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(1, scores.topk(places, dim=1).indices, True)


def _kept(scores: Tensor) -> Tensor:
    return scores > MINUS_INFINITY


def _expand(kept: Tensor, rows: _Rows) -> Tensor:
    return kept.repeat_interleave(rows.size, dim=1)[:, : rows.logits.shape[1]]


def _places(topk_blocks: int, rows: _Rows) -> int:
    return min(topk_blocks, rows.blocks)


def _as_published(visible: Tensor, published: Tensor) -> Tensor:
    return visible & published


def _in_torch(
    widen: Callable[[Tensor], Tensor] = lambda logits: logits.float(),
    lengths: Callable[[Tensor, int], Tensor] = _lengths,
    visible: Callable[[_Rows], Tensor] = _visible,
    mask: Callable[[Tensor, Tensor], Tensor] = _mask,
    seen: Callable[[Tensor, Tensor], Tensor] = lambda masked, logits: masked,
    score: Callable[[Tensor], Tensor] = _score,
    newest: Callable[[_Rows], Tensor] = _newest,
    newest_score: float = INFINITY,
    places: Callable[[int, _Rows], int] = _places,
    choose: Callable[[Tensor, int], Tensor] = _choose,
    kept: Callable[[Tensor], Tensor] = _kept,
    expand: Callable[[Tensor, _Rows], Tensor] = _expand,
    consume: Callable[[Tensor, Tensor], Tensor] = _as_published,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Put an implementation together from right parts and, in a mutant, a wrong one.

    Parameters
    ----------
    widen : callable
        `widen(logits)`: as fp32.
    lengths : callable
        `lengths(seq_lens, width)`: int64 [rows, 1].
    visible : callable
        `visible(rows)`: columns that count.
    mask : callable
        `mask(logits, visible)`.
    seen : callable
        `seen(masked, logits)`: what blocks are scored by.
    score : callable
        `score(members)`: scores of [rows, blocks, size].
    newest : callable
        `newest(rows)`: bool [rows, blocks].
    newest_score : float
        Score of the newest block.
    places : callable
        `places(topk_blocks, rows)`.
    choose : callable
        `choose(scores, places)`: bool [rows, blocks].
    kept : callable
        `kept(scores)`: whether a chosen block of this score is kept.
    expand : callable
        `expand(kept, rows)`: one flag a column.
    consume : callable
        `consume(visible, published)`.
    """

    def function(
        logits: Tensor,
        seq_lens: Tensor,
        *,
        topk_blocks: int,
        block_size: int,
        published: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        validate(logits, seq_lens, topk_blocks, block_size, published)
        width = logits.shape[1]
        size = min(block_size, width)
        rows = _Rows(widen(logits), lengths(seq_lens, width), size, -(-width // size))
        if published is not None:
            return mask(rows.logits, consume(visible(rows), published)), None
        masked = mask(rows.logits, visible(rows))
        padding = (0, rows.blocks * size - width)
        members = torch.nn.functional.pad(
            seen(masked, rows.logits), padding, value=MINUS_INFINITY
        ).view(len(logits), rows.blocks, size)
        scores = score(members).masked_fill(newest(rows), newest_score)
        chosen = choose(scores, places(topk_blocks, rows))
        return masked, expand(chosen & kept(scores), rows)

    return function


def _mutant(name: str, fault: str, *killed_by: str, **parts: Any) -> Mutant:
    return Mutant(name, OP, fault, killed_by or ("eager",), _in_torch(**parts))


# ---------------------------------------------------------------- wrong masks


def _lowest_finite(logits: Tensor, visible: Tensor) -> Tensor:
    return logits.masked_fill(~visible, torch.finfo(torch.float32).min)


def _through_arithmetic(logits: Tensor, visible: Tensor) -> Tensor:
    return logits + torch.where(visible, 0.0, MINUS_INFINITY)


def _nan_lost(logits: Tensor, visible: Tensor) -> Tensor:
    return _mask(
        logits.nan_to_num(nan=MINUS_INFINITY, posinf=INFINITY, neginf=MINUS_INFINITY), visible
    )


_MASK_MUTANTS = [
    _mutant(
        "masked_with_lowest_finite", "masks with the lowest finite number", mask=_lowest_finite
    ),
    _mutant(
        "masked_by_addition",
        "adds -inf to what is hidden, so that NaN and +inf there become NaN",
        mask=_through_arithmetic,
    ),
    _mutant("nan_masked", "takes NaN for a masked logit", mask=_nan_lost),
    _mutant(
        "infinity_made_finite",
        "clamps logits to the finite numbers",
        widen=lambda logits: torch.where(
            logits.float() == INFINITY, torch.finfo(torch.float32).max, logits.float()
        ),
    ),
    _mutant(
        "negative_zero_lost",
        "adds 0.0 to every logit, which makes -0 positive",
        widen=lambda logits: logits.float() + 0.0,
    ),
    _mutant(
        "rounded_to_bfloat16",
        "keeps float32 logits in bfloat16",
        widen=lambda logits: logits.bfloat16().float(),
    ),
    _mutant(
        "length_included",
        "takes the position at the length for visible",
        visible=lambda rows: rows.columns <= rows.lengths,
    ),
    _mutant(
        "last_position_hidden",
        "hides the last position of a row",
        visible=lambda rows: rows.columns < rows.lengths - 1,
    ),
    _mutant(
        "length_of_the_first_row",
        "takes every row to be as long as the first",
        lengths=lambda seq_lens, width: _lengths(seq_lens, width)[:1].expand(len(seq_lens), 1),
    ),
    _mutant(
        "lengths_in_whole_blocks",
        "shows whole blocks",
        visible=lambda rows: rows.columns // rows.size * rows.size < rows.lengths,
    ),
    _mutant(
        "negative_length_counts_from_the_end",
        "takes a negative length from the width",
        lengths=lambda seq_lens, width: torch.where(
            seq_lens < 0, (seq_lens.long() + width).clamp(min=0), seq_lens.long().clamp(max=width)
        )[:, None],
    ),
    _mutant(
        "consumer_ignores_the_length",
        "masks a consumer's logits by what was published alone",
        consume=lambda visible, published: published,
    ),
    _mutant(
        "consumer_ignores_published",
        "masks a consumer's logits by the length alone",
        consume=lambda visible, published: visible,
    ),
    _mutant(
        "consumer_inverts_published",
        "shows what was not published",
        consume=lambda visible, published: visible & ~published,
    ),
    _mutant(
        "published_in_whole_groups",
        "shows eight positions where one is published",
        consume=lambda visible, published: (
            visible
            & torch.nn.functional.pad(published, (0, -published.shape[1] % 8))
            .unflatten(1, (-1, 8))
            .any(2)
            .repeat_interleave(8, dim=1)[:, : published.shape[1]]
        ),
    ),
]


# ---------------------------------------------------------------- wrong scores


def _nan_skipped(members: Tensor) -> Tensor:
    return members.masked_fill(members.isnan(), MINUS_INFINITY).amax(2)


def _nan_of_the_first(members: Tensor) -> Tensor:
    return torch.where(members[:, :, 0].isnan(), members[:, :, 0], _nan_skipped(members))


def _newest_if_number(rows: _Rows) -> Tensor:
    visible = rows.logits.masked_fill(~_visible(rows), 0.0)
    padded = torch.nn.functional.pad(visible, (0, rows.blocks * rows.size - visible.shape[1]))
    clean = ~padded.view(len(visible), rows.blocks, rows.size).isnan().any(2)
    return _newest(rows) & clean


_SCORE_MUTANTS = [
    _mutant("nan_skipped_in_the_maximum", "leaves NaN out of a block's score", score=_nan_skipped),
    _mutant(
        "nan_of_the_first_alone", "looks for NaN in a block's first place", score=_nan_of_the_first
    ),
    _mutant("block_mean", "scores a block by its mean", score=lambda members: members.mean(2)),
    _mutant("first_of_a_block", "scores a block by its first logit", score=lambda m: m[:, :, 0]),
    _mutant(
        "last_of_a_block_missed",
        "leaves a block's last logit out",
        score=lambda m: m[:, :, :-1].amax(2) if m.shape[2] > 1 else m.amax(2),
    ),
    _mutant("magnitude_for_score", "takes the largest magnitude", score=lambda m: m.abs().amax(2)),
    _mutant("maximum_from_zero", "starts the maximum at 0", score=lambda m: m.amax(2).relu()),
    _mutant(
        "hidden_logits_scored", "scores what lies behind the length", seen=lambda m, logits: logits
    ),
    _mutant(
        "cut_block_dropped",
        "has no block for the columns behind the last whole one",
        kept=lambda scores: _kept(scores),
        expand=lambda kept, rows: (
            _expand(kept, rows)
            & (rows.columns < max(1, rows.logits.shape[1] // rows.size) * rows.size)
        ),
    ),
    _mutant(
        "newest_not_forced",
        "scores the newest block like any other",
        newest=lambda rows: torch.zeros_like(_newest(rows)),
    ),
    _mutant(
        "newest_by_length",
        "takes length // block_size for the newest block",
        newest=lambda rows: (rows.lengths > 0) & (rows.block_ids == rows.lengths // rows.size),
    ),
    _mutant(
        "newest_of_the_width",
        "takes the last block of the row for the newest, whatever the length",
        newest=lambda rows: (rows.lengths > 0) & (rows.block_ids == rows.blocks - 1),
    ),
    _mutant(
        "newest_of_an_empty_row",
        "keeps the first block of a row without positions",
        newest=lambda rows: rows.block_ids == (rows.lengths - 1).clamp(min=0) // rows.size,
    ),
    _mutant(
        "newest_with_nan_lost", "scores a newest block with NaN as NaN", newest=_newest_if_number
    ),
    _mutant(
        "newest_scores_finite",
        "scores the newest block with the largest finite number",
        newest_score=torch.finfo(torch.float32).max,
    ),
    _mutant("newest_scores_nan", "puts the newest block above NaN", newest_score=float("nan")),
]


# ---------------------------------------------------------------- wrong choices


def _nan_last(scores: Tensor, places: int) -> Tensor:
    return _choose(
        scores.nan_to_num(nan=MINUS_INFINITY, posinf=INFINITY, neginf=MINUS_INFINITY), places
    )


def _threshold(scores: Tensor, places: int) -> Tensor:
    clean = scores.nan_to_num(nan=INFINITY, posinf=INFINITY, neginf=MINUS_INFINITY)
    return clean >= clean.topk(places, dim=1).values[:, -1:]


def _above_threshold(scores: Tensor, places: int) -> Tensor:
    clean = scores.nan_to_num(nan=INFINITY, posinf=INFINITY, neginf=MINUS_INFINITY)
    return clean > clean.topk(places, dim=1).values[:, -1:]


def _smallest(scores: Tensor, places: int) -> Tensor:
    order = scores.masked_fill(~(scores > MINUS_INFINITY), INFINITY)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(1, order.topk(places, dim=1, largest=False).indices, True)


def _newest_always(scores: Tensor, places: int) -> Tensor:
    return _choose(scores, places) | (scores == INFINITY)


def _coarse(scores: Tensor, places: int) -> Tensor:
    # Through bfloat16, where near scores tie.
    return _choose(scores.bfloat16().float(), places)


def _first_flag_alone(kept: Tensor, rows: _Rows) -> Tensor:
    return _expand(kept, rows) & (rows.columns % rows.size == 0)


_CHOICE_MUTANTS = [
    _mutant(
        "one_block_too_few",
        "has one place less",
        places=lambda k, rows: max(1, _places(k, rows) - 1),
    ),
    _mutant(
        "one_block_too_many", "has one place more", places=lambda k, rows: min(k + 1, rows.blocks)
    ),
    _mutant(
        "places_counted_in_positions",
        "takes topk_blocks for positions",
        places=lambda k, rows: max(1, min(k // rows.size, rows.blocks)),
    ),
    _mutant("every_tie_kept", "keeps all that reach the boundary score", choose=_threshold),
    _mutant(
        "no_tie_kept", "keeps what is strictly above the boundary score", choose=_above_threshold
    ),
    _mutant("nan_orders_last", "gives a NaN block's place to another", choose=_nan_last),
    _mutant("worst_blocks_chosen", "chooses the lowest scores", choose=_smallest),
    _mutant(
        "infinity_always_chosen", "keeps every block of +inf, places or not", choose=_newest_always
    ),
    _mutant("scores_rounded", "compares scores as bfloat16", choose=_coarse),
    _mutant(
        "nan_block_kept",
        "keeps a chosen block of NaN",
        kept=lambda scores: scores != MINUS_INFINITY,
    ),
    _mutant("chosen_is_kept", "keeps a chosen block of -inf", kept=lambda s: ~s.isnan()),
    _mutant(
        "infinite_block_not_kept",
        "keeps finite blocks alone",
        kept=lambda scores: scores.isfinite(),
    ),
    _mutant(
        "first_position_kept", "keeps a block's first position alone", expand=_first_flag_alone
    ),
    _mutant(
        "hidden_positions_not_kept",
        "keeps the visible columns of the newest block alone",
        expand=lambda kept, rows: _expand(kept, rows) & _visible(rows),
    ),
    _mutant(
        "last_column_not_kept",
        "has no flag for the last column",
        expand=lambda kept, rows: _expand(kept, rows) & (rows.columns < len(rows.columns) - 1),
    ),
]


# ---------------------------------------------------------------- wrong as a function

_right = _in_torch()


def _lengths_clamped_in_place(logits, seq_lens, **rest):
    validate(logits, seq_lens, rest["topk_blocks"], rest["block_size"], rest.get("published"))
    seq_lens.clamp_(0, logits.shape[1])
    return _right(logits, seq_lens, **rest)


def _masked_in_place(logits, seq_lens, **rest):
    masked, keep = _right(logits, seq_lens, **rest)
    logits.copy_(masked)
    return masked, keep


def _keep_in_a_consumer_forgotten(logits, seq_lens, **rest):
    masked, keep = _right(logits, seq_lens, **rest)
    return (masked,) if keep is not None else (masked, None)


def _keep_of_blocks(logits, seq_lens, **rest):
    masked, keep = _right(logits, seq_lens, **rest)
    return masked, keep if keep is None else keep[:, :: rest["block_size"]]


def _keep_not_cleared(logits, seq_lens, **rest):
    masked, keep = _right(logits, seq_lens, **rest)
    if keep is None:
        return masked, None
    fresh = torch.empty_like(keep)
    # What no block sets stays what the memory held; only 0 and 1 are flags.
    fresh = (fresh.view(torch.uint8) != 0) | keep
    return masked, fresh


_kept_masks: dict[tuple[Any, ...], Tensor] = {}


def _lengths_kept_by_address(logits, seq_lens, **rest):
    validate(logits, seq_lens, rest["topk_blocks"], rest["block_size"], rest.get("published"))
    kept = _kept_masks.setdefault((seq_lens.data_ptr(), len(seq_lens)), seq_lens.clone())
    return _right(logits, kept, **rest)


_kept_results: dict[tuple[Any, ...], Tensor] = {}


def _result_memory_shared(logits, seq_lens, **rest):
    masked, keep = _right(logits, seq_lens, **rest)
    shared = _kept_results.setdefault((*masked.shape, masked.device), torch.empty_like(masked))
    return shared.copy_(masked), keep


_calls = 0


def _ties_take_turns(logits, seq_lens, **rest):
    global _calls
    _calls += 1

    def choose(scores: Tensor, places: int) -> Tensor:
        turned = scores.flip(1) if _calls % 2 else scores
        order = turned.nan_to_num(nan=INFINITY, posinf=3e38, neginf=MINUS_INFINITY)
        best = order.sort(dim=1, descending=True, stable=True).indices[:, :places]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        return chosen.flip(1) if _calls % 2 else chosen

    return _in_torch(choose=choose)(logits, seq_lens, **rest)


def _published_not_validated(logits, seq_lens, **rest):
    published = rest.pop("published", None)
    if published is not None and published.dtype is torch.uint8:
        published = published != 0
    return _right(logits, seq_lens, published=published, **rest)


def _rows_as_if_contiguous(logits, seq_lens, **rest):
    validate(logits, seq_lens, rest["topk_blocks"], rest["block_size"], rest.get("published"))
    rows, width = logits.shape
    if rows and logits.stride(0) >= width:
        logits = logits.as_strided((rows, width), (width, 1))
    return _right(logits, seq_lens, **rest)


def _columns_as_if_contiguous(logits, seq_lens, *, published=None, **rest):
    if published is not None and published.numel() and published.stride(1) > 1:
        validate(logits, seq_lens, rest["topk_blocks"], rest["block_size"], published)
        published = published.as_strided(published.shape, (published.stride(0), 1))
    return _right(logits, seq_lens, published=published, **rest)


_FUNCTION_MUTANTS = [
    Mutant(name, OP, fault, killed_by, function)
    for name, fault, killed_by, function in (
        (
            "lengths_clamped_in_place",
            "writes the clamped lengths back",
            ("eager",),
            _lengths_clamped_in_place,
        ),
        ("masked_in_place", "masks the caller's logits", ("eager", "repeat"), _masked_in_place),
        ("keep_forgotten", "returns no keep", ("eager",), _keep_in_a_consumer_forgotten),
        ("keep_of_blocks", "returns one flag a block", ("eager",), _keep_of_blocks),
        (
            "keep_not_cleared",
            "leaves in keep what its memory held before",
            ("poison",),
            _keep_not_cleared,
        ),
        (
            "lengths_kept_by_address",
            "keeps the lengths that it first saw at an address",
            ("repeat",),
            _lengths_kept_by_address,
        ),
        (
            "result_memory_shared",
            "returns the same memory from every call of a shape",
            ("repeat",),
            _result_memory_shared,
        ),
        (
            "ties_take_turns",
            "takes the lower and the upper of tied blocks by turns",
            ("guards", "poison", "repeat"),
            _ties_take_turns,
        ),
        (
            "published_not_validated",
            "takes bytes for flags",
            ("invalid",),
            _published_not_validated,
        ),
        (
            "rows_as_if_contiguous",
            "takes the logits' rows to lie one behind the other",
            ("eager", "strided"),
            _rows_as_if_contiguous,
        ),
        (
            "columns_as_if_contiguous",
            "takes the published columns to lie one behind the other",
            ("eager", "strided"),
            _columns_as_if_contiguous,
        ),
    )
]


# ---------------------------------------------------------------- kernels, right and wrong


@triton.jit
def _row_kernel(
    logits,
    seq_lens,
    masked,
    scores,
    row_stride,
    width,
    blocks,
    block_size,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + row), 0), width)
    for block in range(0, blocks):
        place = tl.arange(0, BLOCK)
        column = block * block_size + place
        inside = (place < block_size) & (column < width)
        reads = inside & (column < length)
        if FAULT == "block_not_cut_at_the_width":
            reads = (place < block_size) & (length > block * block_size)
        x = tl.load(logits + row * row_stride + column, mask=reads, other=float("-inf"))
        x = tl.where(inside & (column < length), x.to(tl.float32), float("-inf"))
        tl.store(masked + row * width + column, x, mask=inside)
        bits = x.to(tl.int32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        best = tl.max(tl.where(nan, float("-inf"), x), axis=0)
        best = tl.where(tl.max(nan.to(tl.int32), axis=0) > 0, float("nan"), best)
        newest = (length > block * block_size) & (length <= (block + 1) * block_size)
        tl.store(scores + row * blocks + block, tl.where(newest, float("inf"), best))


def _in_triton(fault: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def function(
        logits: Tensor,
        seq_lens: Tensor,
        *,
        topk_blocks: int,
        block_size: int,
        published: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rows, width = logits.shape[0], logits.shape[-1]
        # A kernel of a block a turn: rows of many blocks go the other way.
        if published is not None or rows == 0 or width == 0 or block_size < 1 or width > 4096:
            return _right(
                logits,
                seq_lens,
                topk_blocks=topk_blocks,
                block_size=block_size,
                published=published,
            )
        validate(logits, seq_lens, topk_blocks, block_size, published)
        size = min(block_size, width)
        blocks = -(-width // size)
        masked = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
        scores = masked.new_empty(rows, blocks)
        given = logits
        if logits.dtype is torch.bfloat16:
            given = logits.float()
        _row_kernel[(rows,)](
            given,
            seq_lens,
            masked,
            scores,
            given.stride(0),
            width,
            blocks,
            size,
            triton.next_power_of_2(size),
            fault,
            num_warps=4,
            enable_fp_fusion=False,
        )
        kept = _choose(scores, min(topk_blocks, blocks)) & _kept(scores)
        return masked, kept.repeat_interleave(size, dim=1)[:, :width]

    return function


_KERNEL_MUTANTS = [
    Mutant(
        "block_not_cut_at_the_width",
        OP,
        "loads whole blocks, behind a row too",
        ("guards",),
        _in_triton("block_not_cut_at_the_width"),
    )
]

MUTANTS = [
    *_MASK_MUTANTS,
    *_SCORE_MUTANTS,
    *_CHOICE_MUTANTS,
    *_FUNCTION_MUTANTS,
    *_KERNEL_MUTANTS,
]


# ---------------------------------------------------------------- right, but different


def _upper_ties(scores: Tensor, places: int) -> Tensor:
    """Choose the upper of tied blocks, where the oracle takes the lower."""
    clean = scores.flip(1).nan_to_num(nan=INFINITY, posinf=3.4028234e38, neginf=MINUS_INFINITY)
    # Between the largest finite score and +inf a number is missing, so both are ranked by sorting
    # twice: first by score, then by what they are.
    kind = scores.flip(1).isposinf().int() + 2 * scores.flip(1).isnan().int()
    by_score = clean.sort(dim=1, descending=True, stable=True).indices
    order = kind.gather(1, by_score).sort(dim=1, descending=True, stable=True).indices
    best = by_score.gather(1, order)[:, :places]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True).flip(1)


def _one_at_a_time(scores: Tensor, places: int) -> Tensor:
    """Count for each block how many others stand before it."""
    if scores.shape[1] > 512:
        return _choose(scores, places)
    mine, theirs = scores[:, :, None], scores[:, None, :]
    nan = scores.isnan()
    before = (theirs > mine) & ~nan[:, :, None]
    before |= nan[:, None, :] & ~nan[:, :, None]
    tied = (theirs == mine) | (nan[:, None, :] & nan[:, :, None])
    return (before | (tied.tril(-1))).sum(2) < places


VARIANTS = [
    Variant(
        "upper_ties",
        OP,
        "takes the upper of tied blocks",
        _in_torch(choose=_upper_ties),
    ),
    Variant(
        "ranks_counted",
        OP,
        "counts which blocks stand before each, instead of sorting",
        _in_torch(choose=_one_at_a_time),
    ),
    Variant(
        "row_in_a_program",
        OP,
        "a Triton kernel that scores a row's blocks one after another, all else in torch",
        _in_triton(""),
    ),
]
