"""Golden oracle of `filter_topk_pages`: turn the indexer's top-k into KV slots that may be read."""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)

INVALID = -1
"""What stands in both outputs for an entry that attention must not read."""


def filter_topk_pages(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    """Check every chosen position, and map the valid ones through the page table.

    The entry i = `indices[row, j]` is valid if `0 <= i < width` and `scores[row, i] > -inf`: NaN
    and -inf are rejected, +inf is valid. For a valid entry

        page_indices[row, j] = page_table[row, i // page_size] * page_size + i % page_size

    and `raw_indices[row, j] = i`; both are -1 for any other. Entries keep their order and their
    duplicates. No score is loaded for an index out of range, and no page for an invalid entry.

    Parameters
    ----------
    scores : Tensor, [rows, width], float32
        The indexer's logits.
    indices : Tensor, [rows, k], int32 or int64
        The chosen positions; any number may stand there.
    page_table : Tensor, [rows, at least ceil(width / page_size)], int32
        Physical page of each logical page. Pages that valid entries use are not negative, and
        their slots fit int32; others may hold anything.
    page_indices : Tensor, [rows, k], int32
        Written: the slot of each entry.
    page_size : int
        Positions of a page.
    raw_indices : Tensor, [rows, k], of `indices`' dtype, optional
        Written: the position of each entry. May be `indices` itself.

    Raises
    ------
    ValueError
        On arguments outside this description, before anything is written. Rows may lie at any
        stride, columns have unit stride.

    Notes
    -----
    Source: the published rule of the op (what stands between the top-k of a sparse indexer and
    paged attention).
    """
    validate(scores, indices, page_table, page_indices, page_size, raw_indices)
    positions = indices.long()
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None].expand_as(positions)

    valid = (positions >= 0) & (positions < scores.shape[1])
    # A comparison with NaN is False.
    valid[valid.clone()] = scores[rows[valid], positions[valid]] > float("-inf")

    slots = torch.full_like(positions, INVALID)
    page, offset = positions[valid] // page_size, positions[valid] % page_size
    slots[valid] = page_table[rows[valid], page].long() * page_size + offset
    kept = torch.where(valid, positions, INVALID)

    page_indices.copy_(slots)
    if raw_indices is not None:
        raw_indices.copy_(kept)


def validate(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments are as `filter_topk_pages` describes them.

    Parameters
    ----------
    scores, indices, page_table, page_indices, page_size, raw_indices
        As `filter_topk_pages`.

    Raises
    ------
    ValueError
        Naming the argument, and what was found and wanted.
    """
    if page_size <= 0:
        raise ValueError(f"page_size must be positive, got {page_size}")

    tensors = {
        "scores": (scores, (torch.float32,)),
        "indices": (indices, INDEX_DTYPES),
        "page_table": (page_table, (torch.int32,)),
        "page_indices": (page_indices, (torch.int32,)),
    }
    if raw_indices is not None:
        tensors["raw_indices"] = (raw_indices, (indices.dtype,))
    for name, (tensor, dtypes) in tensors.items():
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must be 2-D, got shape {tuple(tensor.shape)}")
        if len(tensor) != len(scores):
            raise ValueError(f"{name} has {len(tensor)} rows, but scores has {len(scores)}")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name} needs a unit column stride, got strides {tensor.stride()}")
        if tensor.device != scores.device:
            raise ValueError(
                f"{name} must be on the device of scores {scores.device}, got {tensor.device}"
            )

    width = scores.shape[1]
    if width == 0:
        raise ValueError("scores must have at least one column, got width 0")
    pages = -(-width // page_size)
    if page_table.shape[1] < pages:
        raise ValueError(
            f"page_table must have {pages} pages for {width} scores in pages of {page_size}, "
            f"got {page_table.shape[1]}"
        )
    for name in ("page_indices", "raw_indices"):
        if name in tensors and tensors[name][0].shape != indices.shape:
            raise ValueError(
                f"{name} must have the shape of indices {tuple(indices.shape)}, "
                f"got {tuple(tensors[name][0].shape)}"
            )
