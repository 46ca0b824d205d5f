"""Triton kernel of `filter_topk_pages`: scores and pages in one launch, and what it replaces."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels import runtime
from draftproof.kernels.numerics import is_nan
from draftproof.oracles import filter_topk_pages as oracle

BLOCK = 128
"""Entries of a program. Small, so that the entries of few rows spread over the multiprocessors."""

WARPS = 4
"""Warps of a program: one entry a thread, for the loads of an entry wait for one another."""

MAX_ROWS = 2**31 - 1
"""Limit of a grid's first axis, in programs."""

MAX_BLOCKS = 2**16 - 1
"""Limit of a grid's second axis, in programs."""

_NO_SLOT = tl.constexpr(-1)

Path = Literal["fused", "oracle"]


# Numbers are passed as 64 bits and pointers without their alignment: a new batch, stride or width
# must not compile anything. One entry a thread makes no load wider for knowing more.
@triton.jit(
    do_not_specialize=[
        "score_stride",
        "index_stride",
        "table_stride",
        "slot_stride",
        "raw_stride",
        "width",
        "entries",
        "page_size",
    ],
    do_not_specialize_on_alignment=[
        "scores",
        "indices",
        "page_table",
        "page_indices",
        "raw_indices",
    ],
)
def _filter_kernel(
    scores,
    indices,
    page_table,
    page_indices,
    raw_indices,
    score_stride: tl.int64,
    index_stride: tl.int64,
    table_stride: tl.int64,
    slot_stride: tl.int64,
    raw_stride: tl.int64,
    width: tl.int64,
    entries: tl.int64,
    page_size: tl.int64,
    HAS_RAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < entries
    given = tl.load(indices + row * index_stride + entry, mask=exists, other=-1)

    # In 64 bits: a position of the lower 32 alone could be in range where the index is not.
    position = given.to(tl.int64)
    in_range = (position >= 0) & (position < width)
    position = tl.where(in_range, position, 0)
    score = tl.load(scores + row * score_stride + position, mask=in_range, other=float("-inf"))
    # The division is done while the score is on its way.
    page = position // page_size
    offset = position - page * page_size

    valid = (score > float("-inf")) & ~is_nan(score)
    page = tl.load(page_table + row * table_stride + page, mask=valid, other=0)
    slot = page * page_size + offset
    tl.store(
        page_indices + row * slot_stride + entry,
        tl.where(valid, slot, _NO_SLOT).to(tl.int32),
        mask=exists,
    )
    if HAS_RAW:
        # The entry that this thread loaded, so that the memory may be that of the indices.
        raw = tl.where(valid, given, _NO_SLOT)
        tl.store(raw_indices + row * raw_stride + entry, raw, mask=exists)


def choose_path(device_type: str, *, interpreted: bool) -> Path:
    """Say what serves a call of the fused op.

    Parameters
    ----------
    device_type : str
        `torch.device.type` of the tensors.
    interpreted : bool
        Whether Triton's interpreter is active.

    Returns
    -------
    "fused" or "oracle"
        `fused`, one launch, where Triton can run; else `oracle`.
    """
    return "fused" if device_type == "cuda" or (device_type == "cpu" and interpreted) else "oracle"


def filter_topk_pages(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    """Check every chosen position and map it through the page table, in one launch.

    Safe to capture in a CUDA graph. No number of a call is compiled into the kernel: it is compiled
    once for each type of the indices, with and without `raw_indices`.

    Parameters
    ----------
    scores, indices, page_table, page_indices, page_size, raw_indices
        As `draftproof.oracles.filter_topk_pages.filter_topk_pages`; the outputs in place.

    Raises
    ------
    ValueError
        As the oracle, and for more entries than a grid can have; before anything is written.
    """
    _check(scores, indices, page_table, page_indices, page_size, raw_indices)
    rows, entries = indices.shape
    blocks = triton.cdiv(entries, BLOCK)
    if rows > MAX_ROWS:
        raise ValueError(f"indices: {rows} rows are beyond the grid's limit of {MAX_ROWS}")
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"indices: {entries} entries a row are beyond the grid's limit of {MAX_BLOCKS * BLOCK}"
        )
    if rows == 0 or entries == 0:
        return
    device = scores.device
    if choose_path(device.type, interpreted=runtime.INTERPRETED) == "oracle":
        oracle.filter_topk_pages(scores, indices, page_table, page_indices, page_size, raw_indices)
        return
    # Triton launches on the current device, which need not be the tensors'.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            filter_topk_pages(scores, indices, page_table, page_indices, page_size, raw_indices)
        return
    raw = indices if raw_indices is None else raw_indices
    _filter_kernel[rows, blocks](
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
        page_size,
        HAS_RAW=raw_indices is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def filter_topk_pages_baseline(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    """Do the same with a chain of PyTorch operations: what the fused kernel replaces.

    Parameters
    ----------
    scores, indices, page_table, page_indices, page_size, raw_indices
        As `filter_topk_pages`.

    Raises
    ------
    ValueError
        As `filter_topk_pages`, but any number of entries will do.
    """
    _check(scores, indices, page_table, page_indices, page_size, raw_indices)
    in_range = (indices >= 0) & (indices < scores.shape[1])
    position = indices.masked_fill(~in_range, 0).long()
    score = scores.gather(1, position)
    valid = in_range & (score > float("-inf"))
    page = page_table.gather(1, torch.where(valid, position // page_size, 0))
    slot = page.long() * page_size + position % page_size
    page_indices.copy_(slot.masked_fill_(~valid, -1))
    if raw_indices is not None:
        raw_indices.copy_(indices.masked_fill(~valid, -1))


def _check(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None,
) -> None:
    """Raise the ValueError of a bad call; a good one is seen at the first look."""
    shape, width = indices.shape, scores.shape[-1] if scores.dim() else 0
    outputs = (page_indices,) if raw_indices is None else (page_indices, raw_indices)
    for tensor in (scores, indices, page_table, *outputs):
        if (
            tensor.dim() != 2
            or tensor.shape[0] != shape[0]
            or (tensor.stride(1) != 1 and tensor.shape[1] > 1)
            or tensor.device != scores.device
        ):
            break
    else:
        if (
            scores.dtype is torch.float32
            and indices.dtype in (torch.int32, torch.int64)
            and page_table.dtype is torch.int32
            and page_indices.dtype is torch.int32
            and (raw_indices is None or raw_indices.dtype is indices.dtype)
            and all(output.shape == shape for output in outputs)
            and page_size > 0
            and 0 < width <= page_table.shape[1] * page_size
        ):
            return
    raise ValueError(_fault(scores, indices, page_table, page_indices, page_size, raw_indices))


def _fault(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None,
) -> str:
    """Say what is wrong with a bad call."""
    index_type = indices.dtype
    named = [
        ("scores", scores, scores.dtype is torch.float32, "float32"),
        ("indices", indices, index_type in (torch.int32, torch.int64), "int32 or int64"),
        ("page_table", page_table, page_table.dtype is torch.int32, "int32"),
        ("page_indices", page_indices, page_indices.dtype is torch.int32, "int32"),
    ]
    if raw_indices is not None:
        fits = raw_indices.dtype is index_type
        named.append(("raw_indices", raw_indices, fits, f"{index_type} like indices"))
    for name, tensor, right_type, wanted in named:
        if not right_type:
            return f"{name}: dtype must be {wanted}, got {tensor.dtype}"
        if tensor.dim() != 2:
            return f"{name}: must have 2 dimensions, got shape {list(tensor.shape)}"
        if tensor.device != scores.device:
            return f"{name}: is on {tensor.device}, but scores is on {scores.device}"
        if tensor.shape[0] != scores.shape[0]:
            return f"{name}: {tensor.shape[0]} rows, but scores has {scores.shape[0]}"
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"{name}: columns must have stride 1, got strides {tensor.stride()}"
    for name, tensor, _, _ in named[3:]:
        if tensor.shape != indices.shape:
            return (
                f"{name}: shape {list(tensor.shape)} is not that of indices, {list(indices.shape)}"
            )
    if page_size <= 0:
        return f"page_size: must be at least 1, got {page_size}"
    width = scores.shape[1]
    if width == 0:
        return "scores: must be at least 1 wide, got width 0"
    pages = page_table.shape[1]
    return f"page_table: {pages} pages of {page_size} are too few for {width} scores a row"
