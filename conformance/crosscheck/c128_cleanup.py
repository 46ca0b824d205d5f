"""Second oracle of `c128_cleanup`: asks of each ring row whether a rejected draft lives there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEGATIVE_INFINITY_BITS = {
    torch.float32: (torch.int32, -(1 << 23)),
    torch.bfloat16: (torch.int16, -(1 << 7)),
}
"""Sign and exponent all ones, mantissa zero, as the signed integer of the same size."""


def c128_cleanup(
    states: Sequence[Tensor],
    req_pool_indices: Sequence[int] | Tensor,
    seq_lens: Sequence[int] | Tensor,
    accept_lens: Sequence[int] | Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Do the op one element at a time, in Python integers.

    Where the oracle runs over drafts and computes the row of each, this runs over rows and solves
    for the drafts: the draft at place p of a ring has an offset congruent to p - seq_len.

    Parameters
    ----------
    states, req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
        As the op; the index arguments may be lists. CPU only, valid arguments only.
    """
    if num_draft_tokens <= 1:
        return
    requests = [
        (int(slot), int(length), int(accepted))
        for slot, length, accepted in zip(req_pool_indices, seq_lens, accept_lens, strict=True)
    ]
    for state in states:
        integer, minus_infinity = NEGATIVE_INFINITY_BITS[state.dtype]
        patterns = state.view(integer)
        rows, width = state.shape
        for row in range(rows):
            slot, place = divmod(row, ring_size)
            if any(
                slot == request_slot
                and _holds_rejected(place - length, accepted, ring_size, num_draft_tokens)
                for request_slot, length, accepted in requests
            ):
                for column in range(width):
                    patterns[row, column] = 0 if 2 * column < width else minus_infinity


def _holds_rejected(distance: int, accepted: int, ring_size: int, num_draft_tokens: int) -> bool:
    """Say whether some d = distance (mod ring_size) is a rejected draft's offset."""
    offset = distance % ring_size
    while offset < num_draft_tokens:
        if offset >= accepted:
            return True
        offset += ring_size
    return False
