"""Second oracle of `filter_topk_pages`: one entry at a time, scores judged by their bits."""

from __future__ import annotations

import struct

from torch import Tensor


def filter_topk_pages(
    scores: Tensor,
    indices: Tensor,
    page_table: Tensor,
    page_indices: Tensor,
    page_size: int,
    raw_indices: Tensor | None = None,
) -> None:
    """Do the op in Python integers.

    Where the oracle compares floats and divides, this looks at sign, exponent and mantissa, and
    walks the pages of a row.

    Parameters
    ----------
    scores, indices, page_table, page_indices, page_size, raw_indices
        As the op. CPU only, valid arguments only.
    """
    rows, width = scores.shape
    for row in range(rows):
        slot_of: dict[int, int] = {}
        for page in range(page_table.shape[1]):
            first = page * page_size
            for position in range(first, min(first + page_size, width)):
                slot_of[position] = int(page_table[row, page]) * page_size + position - first
        for column in range(indices.shape[1]):
            # A dictionary has no entry for what is out of range, negative or huge.
            index = int(indices[row, column])
            chosen = index in slot_of and _may_be_read(float(scores[row, index]))
            page_indices[row, column] = slot_of[index] if chosen else -1
            if raw_indices is not None:
                raw_indices[row, column] = index if chosen else -1


def _may_be_read(score: float) -> bool:
    """Say whether a score is a number above -inf, by its bits as float64."""
    (pattern,) = struct.unpack("<Q", struct.pack("<d", score))
    negative, magnitude = pattern >> 63, pattern & (2**63 - 1)
    infinity = 0x7FF << 52
    return magnitude < infinity or (magnitude == infinity and not negative)
