"""Golden oracle of `candidate_blocks`: the blocks of positions that later layers will look at."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.oracles.numerics import score_key

LOGIT_DTYPES = (torch.float32, torch.bfloat16)

INVISIBLE = float("-inf")
"""What stands in `masked` where a position may not be chosen."""

NEWEST = float("inf")
"""Score of a row's newest block, whatever it holds."""


def candidate_blocks(
    logits: Tensor,
    seq_lens: Tensor,
    *,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mask the logits, and in a source layer choose the blocks of positions to publish.

    A position c of a row is visible if `c < seq_lens[row]`, the length clamped to [0, width].

    In a source layer (`published` is None) `masked` holds the visible logits and -inf elsewhere.
    The min(topk_blocks, blocks) blocks of best score (`block_scores`) are chosen, NaN above +inf;
    `keep` is true on all columns of a chosen block whose score is above -inf. So a NaN block uses
    up a place and is not kept. Among tied blocks this oracle takes the lower ones; any choice is
    right, as long as an implementation always makes the same.

    In a consumer layer `masked` holds the logits that are visible and published.

    Parameters
    ----------
    logits : Tensor, [rows, width], float32 or bfloat16
        Unit column stride, any row stride. bf16 is widened.
    seq_lens : Tensor, [rows], int32
        Positions of each row, contiguous; may be negative or beyond the width.
    topk_blocks : int
        Blocks to choose.
    block_size : int
        Positions of a block. The last block of a row is cut at the width.
    published : Tensor, [rows, width], bool, optional
        What a source layer kept; any strides.

    Returns
    -------
    masked : Tensor, [rows, width], float32
    keep : Tensor, [rows, width], bool, or None in a consumer layer

    Raises
    ------
    ValueError
        On arguments outside this description.

    Notes
    -----
    Source: the published rule of the op (candidate blocks of a two-level sparse indexer).
    """
    validate(logits, seq_lens, topk_blocks, block_size, published)
    visible = _visible(logits, seq_lens)
    if published is not None:
        visible = visible & published
    masked = torch.where(visible, logits.float(), INVISIBLE)
    if published is not None:
        return masked, None

    scores = block_scores(logits, seq_lens, block_size)
    best = score_key(scores).sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, best[:, :topk_blocks], True)

    kept = chosen & (scores > INVISIBLE)
    block_of = torch.arange(logits.shape[1], device=logits.device) // block_size
    return masked, kept[:, block_of]


def block_scores(logits: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """Score every block of a source layer's rows.

    The score is the maximum of the block's visible logits: NaN if any of them is NaN, -inf if
    there is none. The newest block, (length - 1) // block_size in a row of any length, scores +inf
    whatever it holds.

    Parameters
    ----------
    logits, seq_lens, block_size
        As `candidate_blocks`.

    Returns
    -------
    Tensor, [rows, ceil(width / block_size)], float32
    """
    rows, width = logits.shape
    # A block cut at the width is as good as one of that size.
    size = min(block_size, width)
    blocks = -(-width // size)
    padded = torch.full((rows, blocks * size), INVISIBLE, device=logits.device)
    padded[:, :width] = torch.where(_visible(logits, seq_lens), logits.float(), INVISIBLE)

    members = padded.view(rows, blocks, size)
    nan = members.isnan()
    scores = members.masked_fill(nan, INVISIBLE).amax(dim=2)
    scores = scores.masked_fill(nan.any(dim=2), float("nan"))

    length = seq_lens.long().clamp(0, width)[:, None]
    newest = (length > 0) & (torch.arange(blocks, device=scores.device) == (length - 1) // size)
    return scores.masked_fill(newest, NEWEST)


def _visible(logits: Tensor, seq_lens: Tensor) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    return columns < seq_lens.long()[:, None]


def validate(
    logits: Tensor,
    seq_lens: Tensor,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments are as `candidate_blocks` describes them.

    Parameters
    ----------
    logits, seq_lens, topk_blocks, block_size, published
        As `candidate_blocks`.

    Raises
    ------
    ValueError
        Naming the argument, and what was found and wanted.
    """
    for name, number in (("topk_blocks", topk_blocks), ("block_size", block_size)):
        if number <= 0:
            raise ValueError(f"{name} must be positive, got {number}")

    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits must be float32 or bfloat16, got {logits.dtype}")
    if logits.dim() != 2:
        raise ValueError(f"logits must be 2-D, got shape {tuple(logits.shape)}")
    rows, width = logits.shape
    if width == 0:
        raise ValueError("logits must have at least one column, got width 0")
    if width > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits needs a unit column stride, got strides {logits.stride()}")

    if seq_lens.dtype is not torch.int32:
        raise ValueError(f"seq_lens must be int32, got {seq_lens.dtype}")
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens must be 1-D, got shape {tuple(seq_lens.shape)}")
    if len(seq_lens) != rows:
        raise ValueError(f"seq_lens must have one entry per row: {len(seq_lens)}, not {rows}")
    if not seq_lens.is_contiguous():
        raise ValueError(f"seq_lens must be contiguous, got strides {seq_lens.stride()}")
    if seq_lens.device != logits.device:
        raise ValueError(
            f"seq_lens must be on the device of logits {logits.device}, got {seq_lens.device}"
        )

    if published is None:
        return
    if published.dtype is not torch.bool:
        raise ValueError(f"published must be bool, got {published.dtype}")
    if published.shape != logits.shape:
        raise ValueError(
            f"published must have the shape of logits {tuple(logits.shape)}, "
            f"got {tuple(published.shape)}"
        )
    if published.device != logits.device:
        raise ValueError(
            f"published must be on the device of logits {logits.device}, got {published.device}"
        )
