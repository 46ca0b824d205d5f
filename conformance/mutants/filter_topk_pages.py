"""Wrong implementations of `filter_topk_pages`, one fault each, and right ones made differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.oracles.filter_topk_pages import validate

OP = "filter_topk_pages"
MINUS_INFINITY = float("-inf")


# ---------------------------------------------------------------- one right way, in parts


@dataclass(frozen=True)
class _Call:
    """A validated call; indices as int64."""

    scores: Tensor
    indices: Tensor
    page_table: Tensor
    page_size: int


def _in_range(call: _Call) -> Tensor:
    return (call.indices >= 0) & (call.indices < call.scores.shape[1])


def _accepts(score: Tensor) -> Tensor:
    return score > MINUS_INFINITY


def _page(position: Tensor, page_size: int) -> Tensor:
    return position // page_size


def _slot(page: Tensor, position: Tensor, page_size: int) -> Tensor:
    return page.long() * page_size + position % page_size


def _given(indices: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, indices, -1)


def _in_torch(
    edit: Callable[[_Call], _Call] = lambda call: call,
    in_range: Callable[[_Call], Tensor] = _in_range,
    accepts: Callable[[Tensor], Tensor] = _accepts,
    page_of: Callable[[Tensor, int], Tensor] = _page,
    slot: Callable[[Tensor, Tensor, int], Tensor] = _slot,
    raw: Callable[[Tensor, Tensor, Tensor], Tensor] = _given,
    finish: Callable[[Tensor, Tensor], Tensor] = lambda slots, valid: slots,
    invalid: int = -1,
) -> Callable[..., None]:
    """Put an implementation together from right parts and, in a mutant, a wrong one.

    Parameters
    ----------
    edit : callable
        Changes what the rest is given.
    in_range : callable
        `in_range(call)`: entries whose score may be looked up.
    accepts : callable
        `accepts(score)`: scores that make an entry valid.
    page_of : callable
        `page_of(position, page_size)`: the logical page.
    slot : callable
        `slot(page, position, page_size)`.
    raw : callable
        `raw(indices, slots, valid)`: what is given back.
    finish : callable
        `finish(slots, valid)`: the last change of the slots.
    invalid : int
        The slot of an invalid entry.
    """

    def function(
        scores: Tensor,
        indices: Tensor,
        page_table: Tensor,
        page_indices: Tensor,
        page_size: int,
        raw_indices: Tensor | None = None,
    ) -> None:
        validate(scores, indices, page_table, page_indices, page_size, raw_indices)
        call = edit(_Call(scores, indices.long(), page_table, page_size))
        valid = in_range(call)
        # A wrong position must show as a wrong slot, not as an index error.
        position = torch.where(valid, call.indices, 0) % scores.shape[1]
        valid = valid & accepts(call.scores.gather(1, position))
        page = page_of(position, page_size) % call.page_table.shape[1]
        slots = slot(call.page_table.gather(1, page), position, page_size)
        slots = finish(torch.where(valid, slots, invalid), valid)
        kept = raw(call.indices, slots, valid)
        page_indices.copy_(slots)
        if raw_indices is not None:
            raw_indices.copy_(kept)

    return function


def _mutant(name: str, fault: str, *killed_by: str, **parts: Any) -> Mutant:
    return Mutant(name, OP, fault, killed_by or ("eager",), _in_torch(**parts))


# ---------------------------------------------------------------- wrong validity

_VALIDITY_MUTANTS = [
    _mutant(
        "nan_accepted",
        "rejects -inf alone, so that NaN passes",
        accepts=lambda score: score != MINUS_INFINITY,
    ),
    _mutant(
        "infinity_rejected", "accepts finite scores alone", accepts=lambda score: score.isfinite()
    ),
    _mutant(
        "minus_infinity_accepted",
        "rejects NaN alone",
        accepts=lambda score: ~score.isnan(),
    ),
    _mutant(
        "lowest_finite_rejected",
        "takes the lowest finite score for a masked one",
        accepts=lambda score: score > torch.finfo(torch.float32).min,
    ),
    _mutant("negative_scores_rejected", "wants scores above zero", accepts=lambda s: s > 0),
    _mutant(
        "zero_rejected", "takes a score of zero for none", accepts=lambda s: _accepts(s) & (s != 0)
    ),
    _mutant(
        "subnormals_rejected",
        "loses negative subnormal scores",
        accepts=lambda s: _accepts(s) & ~((s < 0) & (s > -1.1754943508222875e-38)),
    ),
    _mutant("scores_not_looked_at", "checks the index alone", accepts=torch.ones_like),
    _mutant(
        "width_itself_in_range",
        "takes the index `width` for one in range",
        in_range=lambda call: (call.indices >= 0) & (call.indices <= call.scores.shape[1]),
    ),
    _mutant(
        "last_position_out_of_range",
        "takes the last position for one out of range",
        in_range=lambda call: (call.indices >= 0) & (call.indices < call.scores.shape[1] - 1),
    ),
    _mutant(
        "position_0_invalid",
        "takes position 0 for padding",
        in_range=lambda call: _in_range(call) & (call.indices > 0),
    ),
    _mutant(
        "negative_counts_from_the_end",
        "takes -1 for the last position",
        in_range=lambda call: call.indices < call.scores.shape[1],
        edit=lambda call: replace(
            call,
            indices=torch.where(
                (call.indices < 0) & (call.indices >= -call.scores.shape[1]),
                call.indices + call.scores.shape[1],
                torch.where(call.indices < 0, call.scores.shape[1], call.indices),
            ),
        ),
    ),
    _mutant(
        "index_clamped",
        "clamps an index out of range to the last position",
        edit=lambda call: replace(call, indices=call.indices.clamp(max=call.scores.shape[1] - 1)),
    ),
    _mutant(
        "index_truncated_to_32_bits",
        "takes the lower half of int64 indices",
        edit=lambda call: replace(call, indices=call.indices.int().long()),
    ),
]


# ---------------------------------------------------------------- wrong slots


def _masked_offset(page: Tensor, position: Tensor, page_size: int) -> Tensor:
    return page.long() * page_size + (position & (page_size - 1))


def _compacted(slots: Tensor, valid: Tensor) -> Tensor:
    order = (~valid).long().sort(dim=1, stable=True).indices
    return slots.gather(1, order)


def _first_of_duplicates(slots: Tensor, valid: Tensor) -> Tensor:
    if slots.shape[1] > 512:
        return slots
    earlier = (slots[:, :, None] == slots[:, None, :]).tril(-1).any(2)
    return torch.where(valid & earlier, -1, slots)


_SLOT_MUTANTS = [
    _mutant("page_for_slot", "gives the page", slot=lambda page, position, size: page.long()),
    _mutant(
        "offset_forgotten",
        "gives the first slot of the page",
        slot=lambda page, position, size: page.long() * size,
    ),
    _mutant(
        "logical_page_for_physical",
        "gives the position itself",
        slot=lambda page, position, size: position,
    ),
    _mutant(
        "offset_by_mask",
        "masks the offset, which is right for pages of a power of two only",
        slot=_masked_offset,
    ),
    _mutant(
        "page_by_shift",
        "shifts for the page, which is right for pages of a power of two only",
        page_of=lambda position, size: position >> (size.bit_length() - 1),
    ),
    _mutant(
        "product_through_float32",
        "multiplies in float32, which holds 24 bits",
        slot=lambda page, position, size: (page.float() * size).long() + position % size,
    ),
    _mutant(
        "page_of_64",
        "has the page size of production built in",
        page_of=lambda position, size: position // 64,
        slot=lambda page, position, size: page.long() * 64 + position % 64,
    ),
    _mutant(
        "first_row_of_the_table",
        "maps every row through the first one's pages",
        edit=lambda call: replace(call, page_table=call.page_table[:1].expand_as(call.page_table)),
    ),
    _mutant(
        "first_row_of_the_scores",
        "checks every row against the first one's scores",
        edit=lambda call: replace(call, scores=call.scores[:1].expand_as(call.scores)),
    ),
    _mutant("invalid_is_slot_0", "gives slot 0 to invalid entries", invalid=0),
    _mutant("invalid_is_minus_2", "gives -2 to invalid entries", invalid=-2),
    _mutant(
        "slots_sorted", "sorts a row's slots", finish=lambda slots, _: slots.sort(dim=1).values
    ),
    _mutant("slots_compacted", "moves valid slots to the front", finish=_compacted),
    _mutant("duplicates_removed", "keeps the first of equal slots", finish=_first_of_duplicates),
    _mutant(
        "raw_not_filtered",
        "gives invalid indices back as they were",
        raw=lambda indices, slots, valid: indices,
    ),
    _mutant("raw_is_the_slot", "gives the slot back as the index", raw=lambda i, slots, v: slots),
    _mutant(
        "places_beyond_256_skipped",
        "has a block of 256 places",
        finish=lambda slots, _: torch.where(
            torch.arange(slots.shape[1], device=slots.device) < 256, slots, -1
        ),
    ),
]


# ---------------------------------------------------------------- wrong as a function


def _indices_modified(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)
    indices.copy_(torch.where(page_indices < 0, -1, indices))


def _raw_ignored(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    _in_torch()(scores, indices, page_table, page_indices, page_size, None)


def _raw_written_first(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    if raw_indices is not None:
        raw_indices.fill_(-1)
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)


def _valid_slots_only_written(
    scores, indices, page_table, page_indices, page_size, raw_indices=None
):
    slots = torch.empty_like(page_indices)
    _in_torch()(scores, indices, page_table, slots, page_size, raw_indices)
    page_indices.copy_(torch.where(slots >= 0, slots, page_indices))


def _validates_after_writing(
    scores, indices, page_table, page_indices, page_size, raw_indices=None
):
    if page_indices.device == scores.device and page_indices.dim() == 2:
        page_indices[:, :1] = -1
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)


def _table_not_validated(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    if page_table.dim() == 2 and page_size > 0 and page_table.dtype is torch.int32:
        missing = -(-scores.shape[-1] // page_size) - page_table.shape[1]
        page_table = torch.nn.functional.pad(page_table, (0, max(0, missing)))
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)


def _rows_as_if_contiguous(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    rows, width = scores.shape
    if rows and scores.stride(0) >= width:
        scores = scores.as_strided((rows, width), (width, 1))
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)


def _slots_as_if_contiguous(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    rows, k = page_indices.shape
    if rows and page_indices.stride(0) >= k:
        page_indices = page_indices.as_strided((rows, k), (k, 1))
    _in_torch()(scores, indices, page_table, page_indices, page_size, raw_indices)


_kept_tables: dict[int, Tensor] = {}


def _table_kept_by_address(scores, indices, page_table, page_indices, page_size, raw_indices=None):
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    kept = _kept_tables.get(page_table.data_ptr())
    if kept is None or kept.shape != page_table.shape:
        kept = _kept_tables[page_table.data_ptr()] = page_table.clone()
    _in_torch()(scores, indices, kept, page_indices, page_size, raw_indices)


_kept_sizes: dict[tuple[int, ...], int] = {}


def _page_size_kept_by_address(
    scores, indices, page_table, page_indices, page_size, raw_indices=None
):
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    key = (page_table.data_ptr(), *page_table.shape, *scores.shape)
    kept = _kept_sizes.setdefault(key, page_size)
    # One that would not even be legal is no page size that anybody kept.
    size = kept if kept * page_table.shape[1] >= scores.shape[1] else page_size
    _in_torch()(scores, indices, page_table, page_indices, size, raw_indices)


_FUNCTION_MUTANTS = [
    Mutant(
        "indices_modified", OP, "filters the indices in place too", ("eager",), _indices_modified
    ),
    Mutant("raw_ignored", OP, "leaves raw_indices as it was", ("eager", "poison"), _raw_ignored),
    Mutant(
        "raw_written_first",
        OP,
        "fills raw_indices before it reads the indices, which may be the same memory",
        ("eager",),
        _raw_written_first,
    ),
    Mutant(
        "valid_slots_only_written",
        OP,
        "leaves what stood at an invalid entry",
        ("eager", "poison"),
        _valid_slots_only_written,
    ),
    Mutant(
        "validates_after_writing",
        OP,
        "writes the first column before it looks at the arguments",
        ("invalid",),
        _validates_after_writing,
    ),
    Mutant(
        "table_not_validated",
        OP,
        "takes pages that a short table lacks for page 0",
        ("invalid",),
        _table_not_validated,
    ),
    Mutant(
        "rows_as_if_contiguous",
        OP,
        "takes the scores' rows to lie one behind the other",
        ("eager", "strided"),
        _rows_as_if_contiguous,
    ),
    Mutant(
        "slots_as_if_contiguous",
        OP,
        "writes the slots' rows one behind the other",
        ("guards", "strided"),
        _slots_as_if_contiguous,
    ),
    Mutant(
        "table_kept_by_address",
        OP,
        "keeps the pages that it first saw at an address",
        ("repeat",),
        _table_kept_by_address,
    ),
    Mutant(
        "page_size_kept_by_address",
        OP,
        "keeps the page size that it first saw with a table",
        ("repeat",),
        _page_size_kept_by_address,
    ),
]


# ---------------------------------------------------------------- kernels, right and wrong


@triton.jit
def _serial_kernel(
    scores,
    indices,
    page_table,
    page_indices,
    raw_indices,
    score_stride,
    index_stride,
    table_stride,
    slot_stride,
    raw_stride,
    width,
    entries,
    page_size,
    HAS_RAW: tl.constexpr,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        exists = entry < entries
        if FAULT == "tail_not_masked":
            exists = entry < entries + 1
        index = tl.load(indices + row * index_stride + entry, mask=exists, other=-1)
        position = index.to(tl.int64)
        in_range = (position >= 0) & (position < width)
        looked_up = in_range
        if FAULT == "width_looked_up":
            looked_up = (position >= 0) & (position <= width)
        if FAULT == "minus_1_looked_up":
            looked_up = (position >= -1) & (position < width)
        score = tl.load(scores + row * score_stride + position, mask=looked_up, other=0.0)
        bits = score.to(tl.int32, bitcast=True)
        minus_infinity: tl.constexpr = -(1 << 23)
        not_nan = (bits & 0x7FFFFFFF) <= 0x7F800000
        valid = in_range & not_nan & (bits != minus_infinity)
        paged = valid
        if FAULT == "page_of_width_looked_up":
            paged = (position >= 0) & (position <= width)
        page = tl.load(page_table + row * table_stride + position // page_size, mask=paged, other=0)
        slot = page * page_size + (position % page_size).to(tl.int32)
        tl.store(
            page_indices + row * slot_stride + entry,
            tl.where(valid, slot, -1).to(tl.int32),
            mask=exists,
        )
        if HAS_RAW:
            raw = tl.where(valid, index, -1)
            tl.store(raw_indices + row * raw_stride + entry, raw, mask=exists)


def _in_triton(fault: str) -> Callable[..., None]:
    def function(
        scores: Tensor,
        indices: Tensor,
        page_table: Tensor,
        page_indices: Tensor,
        page_size: int,
        raw_indices: Tensor | None = None,
    ) -> None:
        validate(scores, indices, page_table, page_indices, page_size, raw_indices)
        rows, entries = indices.shape
        if rows == 0 or entries == 0:
            return
        raw = indices if raw_indices is None else raw_indices
        _serial_kernel[(rows,)](
            scores,
            indices,
            page_table,
            page_indices,
            raw,
            scores.stride(0),
            indices.stride(0),
            page_table.stride(0),
            page_indices.stride(0),
            raw.stride(0),
            scores.shape[1],
            entries,
            # A page beyond int32 is as good as one that holds the row.
            min(page_size, 2**31 - 1),
            raw_indices is not None,
            256,
            fault,
            num_warps=4,
            enable_fp_fusion=False,
        )

    return function


_KERNEL_MUTANTS = [
    Mutant(name, OP, fault, ("guards",), _in_triton(name))
    for name, fault in (
        ("tail_not_masked", "handles one entry more than a row has"),
        ("width_looked_up", "loads the score behind a row, though it does not count"),
        ("minus_1_looked_up", "loads the score before a row, though it does not count"),
        ("page_of_width_looked_up", "loads a page for the index `width`"),
    )
]

MUTANTS = [*_VALIDITY_MUTANTS, *_SLOT_MUTANTS, *_FUNCTION_MUTANTS, *_KERNEL_MUTANTS]


# ---------------------------------------------------------------- right, but different


def _slot_table(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    width = scores.shape[1]
    positions = torch.arange(width, device=scores.device)
    slots = page_table[:, positions // page_size].long() * page_size + positions % page_size
    # One column more, of which every index out of range has its -1.
    slots = torch.where(scores > MINUS_INFINITY, slots, -1)
    slots = torch.nn.functional.pad(slots, (0, 1), value=-1)
    stray = (indices < 0) | (indices >= width)
    found = slots.gather(1, indices.masked_fill(stray, width).long())
    kept = indices.masked_fill(found < 0, -1)
    page_indices.copy_(found)
    if raw_indices is not None:
        raw_indices.copy_(kept)


def _entry_by_entry(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    width = scores.shape[1]
    for row, chosen in enumerate(indices.tolist()):
        known, pages = scores[row].tolist(), page_table[row].tolist()
        valid = [0 <= index < width and known[index] > MINUS_INFINITY for index in chosen]
        slots = [
            pages[index // page_size] * page_size + index % page_size if good else -1
            for index, good in zip(chosen, valid, strict=True)
        ]
        kept = [index if good else -1 for index, good in zip(chosen, valid, strict=True)]
        page_indices[row] = torch.tensor(slots, dtype=torch.int32)
        if raw_indices is not None:
            raw_indices[row] = torch.tensor(kept, dtype=indices.dtype)


VARIANTS = [
    Variant("slot_table", OP, "makes the slots of all positions first, then looks up", _slot_table),
    Variant(
        "entry_by_entry",
        OP,
        "walks the entries on the host in Python",
        _entry_by_entry,
        capturable=False,
    ),
    Variant(
        "row_in_a_program",
        OP,
        "a Triton kernel whose program walks a row, and judges scores by their bits",
        _in_triton(""),
    ),
]
