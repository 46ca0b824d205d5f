"""Second oracle of `candidate_blocks`: scans each block, and picks blocks one after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MINUS_INFINITY = -math.inf


def candidate_blocks(
    logits: Tensor,
    seq_lens: Tensor,
    *,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do the op one element at a time, in Python floats.

    Where the oracle sorts keys, this takes the best block that is left, as often as there are
    places; of tied ones the first.

    Parameters
    ----------
    logits, seq_lens, topk_blocks, block_size, published
        As the op. CPU only, valid arguments only.
    """
    rows, width = logits.shape
    masked = torch.full((rows, width), MINUS_INFINITY)
    keep = None if published is not None else torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        length = min(max(int(seq_lens[row]), 0), width)
        for column in range(length):
            if published is None or bool(published[row, column]):
                masked[row, column] = float(logits[row, column])
        if keep is None:
            continue
        starts = range(0, width, block_size)
        left = {
            start: _score(masked[row, start : start + block_size].tolist(), start, length)
            for start in starts
        }
        for _ in range(min(topk_blocks, len(starts))):
            best = next(iter(left))
            for start, score in left.items():
                if _above(score, left[best]):
                    best = start
            score = left.pop(best)
            if score > MINUS_INFINITY:
                for column in range(best, min(best + block_size, width)):
                    keep[row, column] = True
    return masked, keep


def _score(members: list[float], start: int, length: int) -> float:
    """Give the score of the block that begins at `start`, in a row of `length` positions."""
    if start < length <= start + len(members):
        return math.inf
    best = MINUS_INFINITY
    for number in members:
        if math.isnan(number):
            return math.nan
        best = number if number > best else best
    return best


def _above(one: float, other: float) -> bool:
    """Say whether a score stands strictly before another: NaN first, then from +inf down."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and not math.isnan(other)
    return one > other
