"""Triton kernels of the sparse-attention (DSA) metadata: bounded, unbounded, and draft decode.

One kernel per op serves twice. The *unbounded* baseline launches one program for every 128 columns
of `max_len`; nearly all of them find nothing live and leave. The *bounded* launch gives each
request a few programs, which stride over its live columns. A CUDA graph can hold either: grids
follow from shapes alone, lengths are read on the device.

The first levels of the grid's second axis write lengths and running sums (one level per step, two
in verify and extend); the levels behind them write table rows: each column of `req_to_token` is
loaded once and stored into all rows of the request. The request is the fast grid axis, so programs
that have something live start before those that have not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.runtime import runs_triton
from draftproof.oracles.dsa_metadata import StepTables

__all__ = [
    "BOUNDED_SWITCH",
    "PROGRAM_BUDGET",
    "PROGRAM_BUDGET_VARIABLE",
    "StepTables",
    "draft_step_refreshes_schedule",
    "dsa_decode_metadata",
    "dsa_decode_metadata_baseline",
    "dsa_draft_decode_metadata",
    "dsa_draft_decode_metadata_baseline",
    "dsa_draft_extend_metadata",
    "dsa_draft_extend_metadata_baseline",
    "dsa_target_verify_metadata",
    "dsa_target_verify_metadata_baseline",
    "one_launch_serves",
    "program_budget",
    "programs_per_request",
    "use_bounded",
]

COLUMN_BLOCK = 128
"""Positions: live columns come in whole blocks of this. Also a baseline program's share."""

PROGRAM_BUDGET = 2048
"""Programs: what a bounded launch aims at in all, over all table rows. About the number of
programs that a large GPU holds at once, so that idle ones never queue in front of live ones."""

PROGRAM_BUDGET_VARIABLE = "DRAFTPROOF_DSA_PROGRAM_BUDGET"
"""Environment variable that overrides `PROGRAM_BUDGET`: a positive decimal integer."""

BOUNDED_SWITCH = "SGLANG_DSA_BOUNDED_REPLAY_METADATA"
"""Environment variable whose value "0" switches the bounded kernels off."""

MAX_PROGRAMS_PER_REQUEST = 256
MAX_STEPS = 4
MAX_GRID_Y = 65535
"""Programs: what CUDA allows on the second grid axis."""

TILE = 1024
"""Columns that a bounded program moves at a time: two 16-byte accesses per thread."""

PAGE_TILE = 128
"""Pages that a bounded program moves at a time where it writes no `page_table_1`."""

LENGTHS_TILE = 512
"""Lengths (of requests or rows) that are summed at a time. A larger tile would cost all programs
of the launch registers."""

OWNER_TILE = 32
"""Requests that rows of a draft extend are compared with at a time."""

OWNER_PAIRS = 2048
"""Pairs of a row and a request that are compared at a time. AMD GPUs hold the outcomes of each
thread's comparisons in scalar registers, of which there are about a hundred."""

MIN_TILE = 16
NUM_WARPS = 4
LAUNCH = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}

_COLUMN_BLOCK = tl.constexpr(COLUMN_BLOCK)


# ---------------------------------------------------------------------------------------------
# Dispatch rules
# ---------------------------------------------------------------------------------------------


def use_bounded(
    device_type: str, *, kpool: int, kpool_metadata_fused: bool, environ: Mapping[str, str]
) -> bool:
    """Say whether replay metadata is refreshed by the bounded kernels or by the unbounded ones.

    Parameters
    ----------
    device_type : str
        `torch.device.type` of the batch. Only "cuda" is served.
    kpool : int
        Keys that the indexer pools into one. Only 1 (no pooling) is served.
    kpool_metadata_fused : bool
        The KPool's own metadata kernel already writes these outputs.
    environ : mapping of str to str
        The process environment. `SGLANG_DSA_BOUNDED_REPLAY_METADATA` = "0" forbids; any other
        value, or none, allows.

    Returns
    -------
    bool
        True for the bounded kernels.
    """
    return (
        device_type == "cuda"
        and kpool == 1
        and not kpool_metadata_fused
        and environ.get(BOUNDED_SWITCH) != "0"
    )


def one_launch_serves(steps: Sequence[StepTables]) -> bool:
    """Say whether one launch can write all draft steps; if not, a launch per step does.

    The one-launch kernel has one set of table strides, so each output must have the same dtype,
    width (shape behind the rows) and strides in every step, and be None in all steps or in none.

    Parameters
    ----------
    steps : sequence of StepTables
        Outputs of each draft step.

    Returns
    -------
    bool
        True for one launch: 1 to 4 steps of one layout.
    """

    def layout(tensor: Tensor | None) -> tuple | None:
        if tensor is None:
            return None
        return tensor.dtype, tuple(tensor.shape[1:]), tensor.stride()

    layouts = {tuple(layout(tensor) for tensor in _outputs_of(step)) for step in steps}
    return 1 <= len(steps) <= MAX_STEPS and len(layouts) == 1


def draft_step_refreshes_schedule(*, seeded_from_draft_extend_topk: bool) -> bool:
    """Say whether a draft step must refresh the schedule of its paged indexer kernel.

    Parameters
    ----------
    seeded_from_draft_extend_topk : bool
        The step attends to the top-k tokens that the draft extend already chose, so that its
        indexer, and with it the indexer's schedule, is not used.

    Returns
    -------
    bool
        False exactly for a seeded step.
    """
    return not seeded_from_draft_extend_topk


def program_budget(environ: Mapping[str, str] = os.environ) -> int:
    """Return the program budget of a bounded launch: the module's, or the environment's.

    Parameters
    ----------
    environ : mapping of str to str
        Where `DRAFTPROOF_DSA_PROGRAM_BUDGET` is looked up.

    Returns
    -------
    int
        Programs, at least 1.

    Raises
    ------
    ValueError
        If the variable is set to anything but a positive decimal integer.
    """
    text = environ.get(PROGRAM_BUDGET_VARIABLE)
    if text is None:
        return PROGRAM_BUDGET
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{PROGRAM_BUDGET_VARIABLE} must be a positive integer, got {text!r}")
    return int(text)


def programs_per_request(rows: int, width: int, budget: int) -> int:
    """Return how many programs of a bounded launch share the table rows of one request.

    Parameters
    ----------
    rows : int
        Table rows of the whole batch.
    width : int
        Table columns in use (`max_len`), in positions.
    budget : int
        Programs for the whole batch.

    Returns
    -------
    int
        `budget // rows`, at most 256, at most one per two blocks of 128 columns, and at least 1;
        0 where there are no rows.
    """
    if rows == 0:
        return 0
    most = min(MAX_PROGRAMS_PER_REQUEST, _ceil_div(width, 2 * COLUMN_BLOCK))
    return max(1, min(budget // rows, most))


# ---------------------------------------------------------------------------------------------
# Device functions that the kernels share
# ---------------------------------------------------------------------------------------------


@triton.jit
def _write_rows(
    req_to_token,
    pool_row,
    kv_len,
    max_len,
    first_row,
    row_count,
    slot_tables,
    slot_strides,
    page_tables,
    page_strides,
    first_tile,
    tile_step,
    PAGE_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Write tiles of one request into its `row_count` equal rows of every table.

    `req_to_token` is (pointer, row stride, column stride), `pool_row` its row. Tables come as a
    tuple of pointers (empty if there is none) with one pair of strides. `first_row` is an int64
    scalar: row offsets pass 2^31.

    Pages are read from memory a second time, not picked from the slots: they lie in the same
    lines, and neither load waits for the other.
    """
    # No pool row is negative. But an end that needs the pool row keeps the compiler from loading
    # it only after the length has arrived, which would cost every live program a memory latency.
    end = tl.minimum(tl.where(pool_row >= 0, kv_len, 0), max_len)
    # Tiles are whole blocks of 128 columns: counting them needs no rounding of the length.
    span: tl.constexpr = TILE if len(slot_tables) > 0 else PAGES << PAGE_SHIFT
    for tile in range(first_tile, (end + span - 1) // span, tile_step):
        # The end of the last live block may pass max_len. Two comparisons, since the compiler
        # keeps masked accesses 16 bytes wide where it sees that a limit is a multiple of 16.
        limit = (end + _COLUMN_BLOCK - 1) // _COLUMN_BLOCK * _COLUMN_BLOCK
        tokens = req_to_token[0] + pool_row.to(tl.int64) * req_to_token[1]
        if len(slot_tables) > 0:
            columns = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
            live = (columns < limit) & (columns < max_len)
            slots = tl.load(tokens + columns * req_to_token[2], mask=live, other=0)
        if len(page_tables) > 0:
            pages = (tile * PAGES + tl.arange(0, PAGES)).to(tl.int64)
            positions = pages << PAGE_SHIFT
            live_pages = (positions < limit) & (positions < max_len)
            page_ids = tl.load(tokens + positions * req_to_token[2], mask=live_pages, other=0)
            page_ids = page_ids >> PAGE_SHIFT
        for offset in range(0, row_count):
            row = first_row + offset
            for n in tl.static_range(len(slot_tables)):
                ptr = slot_tables[n] + row * slot_strides[0] + columns * slot_strides[1]
                tl.store(ptr, slots, mask=live)
            for n in tl.static_range(len(page_tables)):
                ptr = page_tables[n] + row * page_strides[0] + pages * page_strides[1]
                tl.store(ptr, page_ids, mask=live_pages)


@triton.jit
def _store_with_sums(values, total, index, mask, lengths, sums):
    """Store values (0 where masked off) and their running sums on from `total`; return the sum."""
    tl.store(lengths + index, values, mask=mask)
    tl.store(sums + 1 + index, total + tl.cumsum(values, 0), mask=mask)
    return total + tl.sum(values, 0)


@triton.jit
def _write_request_lengths(seq_lens, bs, added, cache_seqlens, cu_seqlens_k, LENGTHS: tl.constexpr):
    """Write the KV length (sequence length plus `added`) of every request, and the sums."""
    tl.store(cu_seqlens_k, 0)
    total = 0
    for start in range(0, bs, LENGTHS):
        request = (start + tl.arange(0, LENGTHS)).to(tl.int64)
        mask = request < bs
        seq = tl.load(seq_lens[0] + request * seq_lens[1], mask=mask, other=0).to(tl.int32)
        kv_lens = tl.where(mask, seq + added, 0)
        total = _store_with_sums(kv_lens, total, request, mask, cache_seqlens, cu_seqlens_k)


@triton.jit
def _store_row_lengths(
    seen, total, row, mask, topk, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k
):
    """Store what rows see, clamped to top-k too, and the sums on from `total`; return the sum."""
    tl.store(seqlens_expanded + row, seen, mask=mask)
    clamped = tl.where(mask, tl.minimum(seen, topk), 0)
    return _store_with_sums(clamped, total, row, mask, dsa_cache_seqlens, dsa_cu_seqlens_k)


@triton.jit
def _write_step_lengths(
    seq_lens,
    bs,
    topk,
    cache_seqlens,
    cu_seqlens_k,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    LENGTHS: tl.constexpr,
):
    """Write all lengths of a decode step, reading each sequence length once."""
    tl.store(cu_seqlens_k, 0)
    tl.store(dsa_cu_seqlens_k, 0)
    total = 0
    dsa_total = 0
    for start in range(0, bs, LENGTHS):
        request = (start + tl.arange(0, LENGTHS)).to(tl.int64)
        mask = request < bs
        kv_lens = tl.load(seq_lens[0] + request * seq_lens[1], mask=mask, other=0).to(tl.int32)
        total = _store_with_sums(kv_lens, total, request, mask, cache_seqlens, cu_seqlens_k)
        clamped = tl.minimum(kv_lens, topk)
        dsa_total = _store_with_sums(
            clamped, dsa_total, request, mask, dsa_cache_seqlens, dsa_cu_seqlens_k
        )


@triton.jit
def _write_verify_row_lengths(
    seq_lens,
    bs,
    next_n,
    topk,
    seqlens_expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    ctx_lens,
    LENGTHS: tl.constexpr,
):
    """Write the lengths of every draft token's row, and `ctx_lens` if it is not None."""
    tl.store(dsa_cu_seqlens_k, 0)
    total = 0
    for start in range(0, bs * next_n, LENGTHS):
        row = start + tl.arange(0, LENGTHS)
        mask = row < bs * next_n
        request = (row // next_n).to(tl.int64)
        offset = row % next_n
        seq = tl.load(seq_lens[0] + request * seq_lens[1], mask=mask, other=0).to(tl.int32)
        total = _store_row_lengths(
            seq + offset + 1, total, row, mask, topk,
            seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k,
        )  # fmt: skip
        if ctx_lens is not None:
            ptr = ctx_lens[0] + request * ctx_lens[1] + offset.to(tl.int64) * ctx_lens[2]
            tl.store(ptr, seq + next_n, mask=mask)


@triton.jit
def _write_extend_row_lengths(
    seq_lens,
    extend_seq_lens,
    bs,
    total_len,
    topk,
    seqlens_expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    OWNERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the lengths of every extend row; each row finds its request by comparing starts."""
    tl.store(dsa_cu_seqlens_k, 0)
    # What rows past the last request see: the only row of a one-token extend of request 0.
    padding = tl.load(seq_lens[0], mask=total_len > 0, other=0).to(tl.int32)
    total = 0
    for row_start in range(0, total_len, ROWS):
        row = row_start + tl.arange(0, ROWS)
        mask = row < total_len
        # Row r of request b sees (seq_b - q_b - start_b + 1) + r: one number per request. Its
        # parts may wrap around 2^32, the result never leaves 32 bits.
        base = tl.zeros([ROWS], tl.int32)
        owned = 0
        for start in range(0, bs, OWNERS):
            request = (start + tl.arange(0, OWNERS)).to(tl.int64)
            real = request < bs
            seq = tl.load(seq_lens[0] + request * seq_lens[1], mask=real, other=0).to(tl.int32)
            ptr = extend_seq_lens[0] + request * extend_seq_lens[1]
            extend = tl.load(ptr, mask=real, other=0).to(tl.int32)
            # No request counts beyond total_len, so that sums stay small.
            shown = tl.minimum(extend, total_len)
            ends = owned + tl.cumsum(shown, 0)
            starts = ends - shown
            # One comparison says both start <= row and row < end: a row before the start wraps
            # around to a number above all counts.
            place = (row[:, None] - starts[None, :]).to(tl.uint32)
            mine = place < shown[None, :].to(tl.uint32)
            base += tl.sum(tl.where(mine, (seq - extend - starts + 1)[None, :], 0), 1)
            owned += tl.sum(shown, 0)
        seen = tl.where(row < owned, tl.maximum(base + row, 0), padding)
        total = _store_row_lengths(
            seen, total, row, mask, topk, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k
        )


# ---------------------------------------------------------------------------------------------
# Kernels
#
# Tuples stand for strided tensors: (pointer, strides...). The first levels of the second grid
# axis write lengths, the others tables. The request is the fast axis, so that tiles with
# something live start before those without.
# ---------------------------------------------------------------------------------------------


@triton.jit
def _decode_kernel(
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    slot_tables,
    slot_strides,
    page_tables,
    page_strides,
    bs,
    max_len,
    topk,
    PAGE_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Decode metadata of every step of one table layout; outputs are tuples, one entry a step."""
    level = tl.program_id(1)
    request = tl.program_id(0).to(tl.int64)
    if level >= len(cache_seqlens):
        kv_len = tl.load(seq_lens[0] + request * seq_lens[1])
        pool_row = tl.load(req_pool_indices[0] + request * req_pool_indices[1])
        _write_rows(
            req_to_token, pool_row, kv_len, max_len, request, 1,
            slot_tables, slot_strides, page_tables, page_strides,
            level - len(cache_seqlens), tl.num_programs(1) - len(cache_seqlens),
            PAGE_SHIFT, TILE, PAGES,
        )  # fmt: skip
    elif request == 0:
        for n in tl.static_range(len(cache_seqlens)):
            if level == n:
                _write_step_lengths(
                    seq_lens, bs, topk, cache_seqlens[n], cu_seqlens_k[n], dsa_cache_seqlens[n],
                    dsa_cu_seqlens_k[n], LENGTHS,
                )  # fmt: skip


@triton.jit
def _verify_kernel(
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    seqlens_expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    slot_tables,
    slot_strides,
    page_tables,
    page_strides,
    ctx_lens,
    bs,
    next_n,
    max_len,
    topk,
    SHARED_ROWS: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Target-verify metadata. A program writes all rows of a request, or (baseline) one row."""
    level = tl.program_id(1)
    item = tl.program_id(0).to(tl.int64)
    if level >= 2:
        if SHARED_ROWS:
            request = item
            first_row = item * next_n
            row_count = next_n
        else:
            request = item // next_n
            first_row = item
            row_count = 1
        kv_len = tl.load(seq_lens[0] + request * seq_lens[1]).to(tl.int64) + next_n
        pool_row = tl.load(req_pool_indices[0] + request * req_pool_indices[1])
        _write_rows(
            req_to_token, pool_row, kv_len, max_len, first_row, row_count,
            slot_tables, slot_strides, page_tables, page_strides,
            level - 2, tl.num_programs(1) - 2, PAGE_SHIFT, TILE, PAGES,
        )  # fmt: skip
    elif item == 0:
        if level == 0:
            _write_request_lengths(seq_lens, bs, next_n, cache_seqlens, cu_seqlens_k, LENGTHS)
        else:
            _write_verify_row_lengths(
                seq_lens, bs, next_n, topk, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k,
                ctx_lens, LENGTHS,
            )  # fmt: skip


@triton.jit
def _extend_kernel(
    seq_lens,
    extend_seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    seqlens_expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    slot_tables,
    slot_strides,
    page_tables,
    page_strides,
    bs,
    total_len,
    max_len,
    topk,
    PAGE_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    LENGTHS: tl.constexpr,
    REQUESTS: tl.constexpr,
    OWNERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Draft-extend metadata. A static extend is a stride of 0 in `extend_seq_lens`."""
    level = tl.program_id(1)
    request = tl.program_id(0).to(tl.int64)
    if level >= 2:
        kv_len = tl.load(seq_lens[0] + request * seq_lens[1])
        pool_row = tl.load(req_pool_indices[0] + request * req_pool_indices[1])
        # One vector and no loop over earlier requests, so that all loads stand side by side. No
        # request counts beyond total_len: sums stay small, and starts below total_len exact.
        extend = tl.load(extend_seq_lens[0] + request * extend_seq_lens[1]).to(tl.int32)
        earlier = tl.arange(0, REQUESTS).to(tl.int64)
        ptr = extend_seq_lens[0] + earlier * extend_seq_lens[1]
        extends = tl.load(ptr, mask=earlier < request, other=0).to(tl.int32)
        first_row = tl.sum(tl.minimum(extends, total_len), 0)
        row_count = tl.minimum(tl.minimum(extend, total_len), total_len - first_row)
        _write_rows(
            req_to_token, pool_row, tl.where(row_count > 0, kv_len, 0), max_len,
            first_row.to(tl.int64), row_count,
            slot_tables, slot_strides, page_tables, page_strides,
            level - 2, tl.num_programs(1) - 2, PAGE_SHIFT, TILE, PAGES,
        )  # fmt: skip
    elif request == 0:
        if level == 0:
            _write_request_lengths(seq_lens, bs, 0, cache_seqlens, cu_seqlens_k, LENGTHS)
        else:
            _write_extend_row_lengths(
                seq_lens, extend_seq_lens, bs, total_len, topk,
                seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k, OWNERS, ROWS,
            )  # fmt: skip


@triton.jit
def _copy_step_kernel(
    seq_lens,
    lengths,
    lengths_to,
    slots,
    slots_to,
    pages,
    pages_to,
    bs,
    max_len,
    PAGE_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Copy a precomputed decode step: four length vectors, and the live columns of its tables."""
    level = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64)
    if level > 0:
        end = tl.minimum(tl.load(seq_lens[0] + row * seq_lens[1]), max_len)
        limit = (end + _COLUMN_BLOCK - 1) // _COLUMN_BLOCK * _COLUMN_BLOCK
        for tile in range(level - 1, (end + TILE - 1) // TILE, tl.num_programs(1) - 1):
            if slots is not None:
                columns = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
                live = (columns < limit) & (columns < max_len)
                values = tl.load(slots[0] + row * slots[1] + columns * slots[2], mask=live)
                ptr = slots_to[0] + row * slots_to[1] + columns * slots_to[2]
                tl.store(ptr, values, mask=live)
            if pages is not None:
                columns = (tile * PAGES + tl.arange(0, PAGES)).to(tl.int64)
                live = ((columns << PAGE_SHIFT) < limit) & ((columns << PAGE_SHIFT) < max_len)
                values = tl.load(pages[0] + row * pages[1] + columns * pages[2], mask=live)
                ptr = pages_to[0] + row * pages_to[1] + columns * pages_to[2]
                tl.store(ptr, values, mask=live)
    elif row == 0:
        for start in range(0, bs + 1, LENGTHS):
            index = start + tl.arange(0, LENGTHS)
            # Lengths have one entry per request, running sums one more.
            for n in tl.static_range(4):
                mask = index < bs + n % 2
                tl.store(lengths_to[n] + index, tl.load(lengths[n] + index, mask=mask), mask=mask)


# ---------------------------------------------------------------------------------------------
# Arguments of a launch
# ---------------------------------------------------------------------------------------------


class _Batch:
    """What every op of the family reads, checked, and the checks of what it writes."""

    def __init__(
        self,
        req_to_token: Tensor,
        indices: Mapping[str, Tensor],
        max_len: int,
        topk: int,
        page_size: int,
    ) -> None:
        _check("req_to_token", req_to_token, (torch.int32,), (0, 0))
        self.req_to_token = req_to_token
        self.device = req_to_token.device
        for name, tensor in indices.items():
            _check(name, tensor, (torch.int32, torch.int64), (0,), self.device)
        self.bs: int = indices["seq_lens"].shape[0]
        for name, tensor in indices.items():
            if tensor.shape[0] != self.bs:
                raise ValueError(f"{name} has {tensor.shape[0]} entries, seq_lens {self.bs}")
        if max_len <= 0:
            raise ValueError(f"max_len is {max_len}, must be positive")
        if max_len > req_to_token.shape[1]:
            raise ValueError(
                f"max_len is {max_len}, but req_to_token is only {req_to_token.shape[1]} wide"
            )
        if topk <= 0:
            raise ValueError(f"dsa_index_topk is {topk}, must be positive")
        if page_size <= 0 or page_size.bit_count() != 1:
            raise ValueError(f"physical_page_size is {page_size}, must be a power of two")
        if not runs_triton(self.device):
            raise ValueError(
                f"req_to_token lies on {self.device}: Triton needs a GPU, or TRITON_INTERPRET=1"
            )
        self.max_len = max_len
        self.topk = topk
        self.page_size = page_size

    def check_lengths(self, outputs: Mapping[str, tuple[Tensor, int]]) -> None:
        """Check 1-D outputs, each with the entries that it must have."""
        for name, (tensor, size) in outputs.items():
            _check(name, tensor, (torch.int32,), (size,), self.device)
            if tensor.shape[0] > 1 and tensor.stride(0) != 1:
                raise ValueError(f"{name} has stride {tensor.stride(0)}, must be contiguous")

    def check_tables(
        self, slots: Tensor | None, pages: Tensor | None, rows: int, where: str = ""
    ) -> None:
        """Check that the tables are there that the page size asks for, and large enough."""
        if slots is None and (pages is None or self.page_size == 1):
            raise ValueError(
                f"{where}page_table_1 is None with real_page_table "
                f"{'None' if pages is None else 'given'} and physical_page_size {self.page_size}"
            )
        if pages is not None and self.page_size == 1:
            raise ValueError(f"{where}real_page_table is given with physical_page_size 1")
        width = self.max_len
        if slots is not None:
            _check(f"{where}page_table_1", slots, (torch.int32,), (rows, width), self.device)
        if pages is not None:
            width = _ceil_div(width, self.page_size)
            _check(f"{where}real_page_table", pages, (torch.int32,), (rows, width), self.device)

    def check_step(self, step: StepTables, where: str = "") -> None:
        """Check the six outputs of a decode step."""
        self.check_lengths(
            {
                f"{where}cache_seqlens": (step.cache_seqlens, self.bs),
                f"{where}cu_seqlens_k": (step.cu_seqlens_k, self.bs + 1),
                f"{where}dsa_cache_seqlens": (step.dsa_cache_seqlens, self.bs),
                f"{where}dsa_cu_seqlens_k": (step.dsa_cu_seqlens_k, self.bs + 1),
            }
        )
        self.check_tables(step.page_table_1, step.real_page_table, self.bs, where)

    def tiling(self, slots: Tensor | None, lengths: int, *, bounded: bool) -> dict[str, int]:
        """Constants of a launch that sums at most `lengths` lengths."""
        tile = TILE if bounded else COLUMN_BLOCK
        pages = PAGE_TILE if bounded and slots is None else max(1, tile // self.page_size)
        return {
            # Slots have 31 bits: all larger pages act like one of 2^31 tokens.
            "PAGE_SHIFT": min(self.page_size.bit_length() - 1, 31),
            "TILE": tile,
            "PAGES": pages,
            "LENGTHS": _tile(lengths, LENGTHS_TILE),
        }

    def programs(self, rows: int, levels: int, *, bounded: bool) -> int:
        """Programs on the second grid axis: `levels`, and the share of one request or row."""
        if rows == 0:
            return levels
        if bounded:
            return levels + programs_per_request(rows, self.max_len, program_budget())
        return min(levels + _ceil_div(self.max_len, COLUMN_BLOCK), MAX_GRID_Y)


def _check(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    least: Sequence[int],
    device: torch.device | None = None,
) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, must be a tensor")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, must be one of {list(dtypes)}")
    if tensor.dim() != len(least):
        raise ValueError(f"{name} has {tensor.dim()} dimensions, must have {len(least)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} lies on {tensor.device}, req_to_token on {device}")
    if any(size < need for size, need in zip(tensor.shape, least, strict=True)):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, needs at least {list(least)}")


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _tile(number: int, most: int) -> int:
    return min(most, max(MIN_TILE, triton.next_power_of_2(number)))


def _strided(tensor: Tensor) -> tuple:
    return (tensor, *tensor.stride())


def _copied(tensor: Tensor | None, other: Tensor | None) -> tuple | None:
    """One end of a copy, if both ends are there."""
    return None if tensor is None or other is None else _strided(tensor)


def _tables(slots: Sequence[Tensor | None], pages: Sequence[Tensor | None]) -> tuple:
    """Kernel arguments for tables of one layout: pointers and strides, nothing for None."""
    arguments: list[tuple] = []
    for tables in (slots, pages):
        present = tuple(table for table in tables if table is not None)
        arguments += [present, present[0].stride() if present else (0, 0)]
    return tuple(arguments)


def _outputs_of(step: StepTables) -> tuple[Tensor | None, ...]:
    return (
        step.cache_seqlens,
        step.cu_seqlens_k,
        step.dsa_cache_seqlens,
        step.dsa_cu_seqlens_k,
        step.page_table_1,
        step.real_page_table,
    )


# ---------------------------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------------------------


def dsa_decode_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh decode metadata in one bounded launch; the rule is that of the oracle of this name.

    The grid depends on the batch size, `max_len` and the program budget alone.

    Parameters
    ----------
    seq_lens, req_pool_indices : Tensor, [bs], int32 or int64, may be strided
    req_to_token : Tensor, [slots, width], int32, may be strided
    cache_seqlens, dsa_cache_seqlens : Tensor, [>= bs], int32
    cu_seqlens_k, dsa_cu_seqlens_k : Tensor, [>= bs + 1], int32
    page_table_1 : Tensor or None, [>= bs, >= max_len], int32, may be strided
    real_page_table : Tensor or None, [>= bs, >= ceil(max_len / physical_page_size)], int32, \
may be strided
    max_len, dsa_index_topk, physical_page_size : int
        Positions; tokens; tokens per page.

    Raises
    ------
    ValueError
        On an argument outside the contract or a bad `DRAFTPROOF_DSA_PROGRAM_BUDGET`, before
        anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    step = StepTables(
        cache_seqlens,
        cu_seqlens_k,
        dsa_cache_seqlens,
        dsa_cu_seqlens_k,
        page_table_1,
        real_page_table,
    )
    _decode(
        seq_lens,
        req_pool_indices,
        req_to_token,
        step,
        (max_len, dsa_index_topk, physical_page_size),
        bounded=True,
    )


def dsa_decode_metadata_baseline(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh decode metadata in one unbounded launch: a program per 128 columns of each row.

    Parameters, errors and effect are those of `dsa_decode_metadata`.
    """
    step = StepTables(
        cache_seqlens,
        cu_seqlens_k,
        dsa_cache_seqlens,
        dsa_cu_seqlens_k,
        page_table_1,
        real_page_table,
    )
    _decode(
        seq_lens,
        req_pool_indices,
        req_to_token,
        step,
        (max_len, dsa_index_topk, physical_page_size),
        bounded=False,
    )


def _decode(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    step: StepTables,
    sizes: tuple[int, int, int],
    *,
    bounded: bool,
) -> None:
    indices = {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}
    batch = _Batch(req_to_token, indices, *sizes)
    batch.check_step(step)
    _launch_decode(batch, seq_lens, req_pool_indices, [step], bounded=bounded)


def _launch_decode(
    batch: _Batch,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    steps: Sequence[StepTables],
    *,
    bounded: bool,
) -> None:
    """Launch for checked steps of one layout."""
    cache, cu, dsa_cache, dsa_cu, slots, pages = zip(*map(_outputs_of, steps), strict=True)
    grid = (max(1, batch.bs), batch.programs(batch.bs, len(steps), bounded=bounded))
    with torch.cuda.device_of(batch.req_to_token):
        _decode_kernel[grid](
            _strided(seq_lens),
            _strided(req_pool_indices),
            _strided(batch.req_to_token),
            cache,
            cu,
            dsa_cache,
            dsa_cu,
            *_tables(slots, pages),
            batch.bs,
            batch.max_len,
            batch.topk,
            **batch.tiling(slots[0], batch.bs, bounded=bounded),
            **LAUNCH,
        )


def dsa_target_verify_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    paged_mqa_ctx_lens_2d: Tensor | None = None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    next_n: int,
) -> None:
    """Refresh target-verify metadata in one bounded launch; the rule is the oracle's.

    A request's columns are loaded once and stored into all its rows. The grid depends on the
    batch size, `next_n`, `max_len` and the program budget alone.

    Parameters
    ----------
    seq_lens, req_pool_indices : Tensor, [bs], int32 or int64, may be strided
    req_to_token : Tensor, [slots, width], int32, may be strided
    cache_seqlens : Tensor, [>= bs], int32
    cu_seqlens_k : Tensor, [>= bs + 1], int32
    seqlens_expanded, dsa_cache_seqlens : Tensor, [>= bs * next_n], int32
    dsa_cu_seqlens_k : Tensor, [>= bs * next_n + 1], int32
    page_table_1 : Tensor or None, [>= bs * next_n, >= max_len], int32, may be strided
    real_page_table : Tensor or None, [>= bs * next_n, >= ceil(max_len / physical_page_size)], \
int32, may be strided
    paged_mqa_ctx_lens_2d : Tensor or None, [>= bs, >= next_n], int32, may be strided
    max_len, dsa_index_topk, physical_page_size, next_n : int
        Positions; tokens; tokens per page; draft tokens per request.

    Raises
    ------
    ValueError
        On an argument outside the contract or a bad `DRAFTPROOF_DSA_PROGRAM_BUDGET`, before
        anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    _verify(
        seq_lens,
        req_pool_indices,
        req_to_token,
        (cache_seqlens, cu_seqlens_k, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k),
        (page_table_1, real_page_table),
        paged_mqa_ctx_lens_2d,
        (max_len, dsa_index_topk, physical_page_size),
        next_n,
        bounded=True,
    )


def dsa_target_verify_metadata_baseline(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    paged_mqa_ctx_lens_2d: Tensor | None = None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    next_n: int,
) -> None:
    """Refresh target-verify metadata in one unbounded launch: a program per 128 columns of a row.

    Parameters, errors and effect are those of `dsa_target_verify_metadata`.
    """
    _verify(
        seq_lens,
        req_pool_indices,
        req_to_token,
        (cache_seqlens, cu_seqlens_k, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k),
        (page_table_1, real_page_table),
        paged_mqa_ctx_lens_2d,
        (max_len, dsa_index_topk, physical_page_size),
        next_n,
        bounded=False,
    )


def _verify(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
    ctx_lens: Tensor | None,
    sizes: tuple[int, int, int],
    next_n: int,
    *,
    bounded: bool,
) -> None:
    indices = {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}
    batch = _Batch(req_to_token, indices, *sizes)
    if next_n <= 0:
        raise ValueError(f"next_n is {next_n}, must be positive")
    rows = batch.bs * next_n
    _check_row_lengths(batch, lengths, rows)
    batch.check_tables(*tables, rows)
    if ctx_lens is not None:
        least = (batch.bs, next_n)
        _check("paged_mqa_ctx_lens_2d", ctx_lens, (torch.int32,), least, batch.device)

    # A bounded program serves all rows of a request, an unbounded one a row.
    items = batch.bs if bounded else rows
    grid = (max(1, items), batch.programs(rows, 2, bounded=bounded))
    with torch.cuda.device_of(req_to_token):
        _verify_kernel[grid](
            _strided(seq_lens),
            _strided(req_pool_indices),
            _strided(req_to_token),
            *lengths,
            *_tables(tables[:1], tables[1:]),
            None if ctx_lens is None else _strided(ctx_lens),
            batch.bs,
            next_n,
            batch.max_len,
            batch.topk,
            SHARED_ROWS=bounded,
            **batch.tiling(tables[0], rows, bounded=bounded),
            **LAUNCH,
        )


def _check_row_lengths(batch: _Batch, lengths: Sequence[Tensor], rows: int) -> None:
    """Check the length outputs of the ops that have more rows than requests."""
    names = (
        "cache_seqlens",
        "cu_seqlens_k",
        "seqlens_expanded",
        "dsa_cache_seqlens",
        "dsa_cu_seqlens_k",
    )
    sizes = (batch.bs, batch.bs + 1, rows, rows, rows + 1)
    batch.check_lengths(dict(zip(names, zip(lengths, sizes, strict=True), strict=True)))


def dsa_draft_extend_metadata(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    total_len: int,
    max_extend_len: int,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    static_extend_len: bool = False,
) -> None:
    """Refresh draft-extend metadata in one bounded launch; the rule is the oracle's.

    A request's columns are loaded once and stored into all its rows. The grid depends on the
    batch size, `total_len`, `max_len` and the program budget alone.

    Parameters
    ----------
    seq_lens, extend_seq_lens, req_pool_indices : Tensor, [bs], int32 or int64, may be strided
    req_to_token : Tensor, [slots, width], int32, may be strided
    cache_seqlens : Tensor, [>= bs], int32
    cu_seqlens_k : Tensor, [>= bs + 1], int32
    seqlens_expanded, dsa_cache_seqlens : Tensor, [>= total_len], int32
    dsa_cu_seqlens_k : Tensor, [>= total_len + 1], int32
    page_table_1 : Tensor or None, [>= total_len, >= max_len], int32, may be strided
    real_page_table : Tensor or None, [>= total_len, >= ceil(max_len / physical_page_size)], \
int32, may be strided
    total_len, max_extend_len : int
        Rows; query tokens of a request at most.
    max_len, dsa_index_topk, physical_page_size : int
        Positions; tokens; tokens per page.
    static_extend_len : bool
        Every request extends by `extend_seq_lens[0]`.

    Raises
    ------
    ValueError
        On an argument outside the contract or a bad `DRAFTPROOF_DSA_PROGRAM_BUDGET`, before
        anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    _extend(
        seq_lens,
        extend_seq_lens,
        req_pool_indices,
        req_to_token,
        (cache_seqlens, cu_seqlens_k, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k),
        (page_table_1, real_page_table),
        (max_len, dsa_index_topk, physical_page_size),
        (total_len, max_extend_len),
        static=static_extend_len,
        bounded=True,
    )


def dsa_draft_extend_metadata_baseline(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    total_len: int,
    max_extend_len: int,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    static_extend_len: bool = False,
) -> None:
    """Refresh draft-extend metadata in one unbounded launch: a program per 128 columns.

    As in the published kernel, such a program serves all rows of its request, which makes this a
    faster baseline than one program per row would be. Parameters, errors and effect are those of
    `dsa_draft_extend_metadata`.
    """
    _extend(
        seq_lens,
        extend_seq_lens,
        req_pool_indices,
        req_to_token,
        (cache_seqlens, cu_seqlens_k, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k),
        (page_table_1, real_page_table),
        (max_len, dsa_index_topk, physical_page_size),
        (total_len, max_extend_len),
        static=static_extend_len,
        bounded=False,
    )


def _extend(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
    sizes: tuple[int, int, int],
    extent: tuple[int, int],
    *,
    static: bool,
    bounded: bool,
) -> None:
    indices = {
        "seq_lens": seq_lens,
        "extend_seq_lens": extend_seq_lens,
        "req_pool_indices": req_pool_indices,
    }
    batch = _Batch(req_to_token, indices, *sizes)
    total_len, max_extend_len = extent
    if total_len < 0 or total_len > batch.bs * max_extend_len:
        raise ValueError(
            f"total_len is {total_len}, must lie in 0 ... {batch.bs * max_extend_len} "
            f"({batch.bs} requests of max_extend_len {max_extend_len})"
        )
    _check_row_lengths(batch, lengths, total_len)
    batch.check_tables(*tables, total_len)

    extend_stride = 0 if static else extend_seq_lens.stride(0)
    owners = _tile(batch.bs, OWNER_TILE)
    grid = (max(1, batch.bs), batch.programs(total_len, 2, bounded=bounded))
    with torch.cuda.device_of(req_to_token):
        _extend_kernel[grid](
            _strided(seq_lens),
            (extend_seq_lens, extend_stride),
            _strided(req_pool_indices),
            _strided(req_to_token),
            *lengths,
            *_tables(tables[:1], tables[1:]),
            batch.bs,
            total_len,
            batch.max_len,
            batch.topk,
            REQUESTS=max(MIN_TILE, triton.next_power_of_2(batch.bs)),
            OWNERS=owners,
            ROWS=_tile(total_len, OWNER_PAIRS // owners),
            **batch.tiling(tables[0], batch.bs, bounded=bounded),
            **LAUNCH,
        )


def dsa_draft_decode_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    steps: Sequence[StepTables],
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh decode metadata of 1 to 4 draft steps; the rule is the oracle's.

    One bounded launch loads each column once and stores it into every step's tables, if
    `one_launch_serves` allows; otherwise there is one bounded launch per step.

    Parameters
    ----------
    seq_lens, req_pool_indices, req_to_token, max_len, dsa_index_topk, physical_page_size
        As in `dsa_decode_metadata`.
    steps : sequence of StepTables
        Outputs of each step.

    Raises
    ------
    ValueError
        As `dsa_decode_metadata`, and on no steps or more than 4, before anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    sizes = (max_len, dsa_index_topk, physical_page_size)
    batch = _draft_batch(seq_lens, req_pool_indices, req_to_token, steps, sizes)
    launches = [list(steps)] if one_launch_serves(steps) else [[step] for step in steps]
    for group in launches:
        _launch_decode(batch, seq_lens, req_pool_indices, group, bounded=True)


def dsa_draft_decode_metadata_baseline(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    steps: Sequence[StepTables],
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh decode metadata once, unbounded, and copy it to every step, a launch for each.

    The copies are unbounded too, a program per 128 columns of each row, and copy what is live.
    Parameters, errors and effect are those of `dsa_draft_decode_metadata`.
    """
    sizes = (max_len, dsa_index_topk, physical_page_size)
    batch = _draft_batch(seq_lens, req_pool_indices, req_to_token, steps, sizes)
    first = _scratch_step(batch, steps)
    _launch_decode(batch, seq_lens, req_pool_indices, [first], bounded=False)
    for step in steps:
        slots, pages = first.page_table_1, first.real_page_table
        slots_to, pages_to = step.page_table_1, step.real_page_table
        grid = (max(1, batch.bs), batch.programs(batch.bs, 1, bounded=False))
        with torch.cuda.device_of(req_to_token):
            _copy_step_kernel[grid](
                _strided(seq_lens),
                _outputs_of(first)[:4],
                _outputs_of(step)[:4],
                _copied(slots, slots_to),
                _copied(slots_to, slots),
                _copied(pages, pages_to),
                _copied(pages_to, pages),
                batch.bs,
                batch.max_len,
                **batch.tiling(slots, batch.bs + 1, bounded=False),
                **LAUNCH,
            )


def _draft_batch(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    steps: Sequence[StepTables],
    sizes: tuple[int, int, int],
) -> _Batch:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise ValueError(f"steps has {len(steps)} entries, must have 1 to {MAX_STEPS}")
    indices = {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}
    batch = _Batch(req_to_token, indices, *sizes)
    for number, step in enumerate(steps):
        batch.check_step(step, f"steps[{number}].")
    return batch


def _scratch_step(batch: _Batch, steps: Sequence[StepTables]) -> StepTables:
    """Allocate what a step needs that any of `steps` is copied from."""
    new = batch.req_to_token.new_empty
    width = {
        "page_table_1": batch.max_len,
        "real_page_table": _ceil_div(batch.max_len, batch.page_size),
    }
    tables = {
        name: new(batch.bs, columns)
        for name, columns in width.items()
        if any(getattr(step, name) is not None for step in steps)
    }
    bs = batch.bs
    return StepTables(new(bs), new(bs + 1), new(bs), new(bs + 1), **tables)
