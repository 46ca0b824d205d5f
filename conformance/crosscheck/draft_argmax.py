"""Second oracle of `draft_argmax`: one scalar scan a row over sort keys of exact integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

import torch


def draft_argmax(
    logits_shards: Sequence[torch.Tensor],
    *,
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_token_column: int = 0,
    nan_policy: str = "sink",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the oracle of the same name does, element by element, for small valid inputs.

    Parameters and returns are the oracle's. Arguments are not validated.
    """
    tokens = []
    for row, old in enumerate(positions.tolist()):
        best = None
        scores = chain.from_iterable(shard[row].tolist() for shard in logits_shards)
        for token, score in enumerate(scores):
            if token >= vocab_size:
                break
            rank = _rank(score, nan_policy)
            if best is None or rank > best[0]:
                best = (rank, token)
        assert best is not None
        tokens.append([best[1]])
        positions[row] = old + 1
        if draft_tokens is not None:
            draft_tokens[row, draft_token_column] = best[1]
    index = torch.tensor(tokens, dtype=torch.int64, device=positions.device).reshape(-1, 1)
    return torch.full_like(index, 1, dtype=torch.float32), index


def _rank(score: float, nan_policy: str) -> int:
    """Map a score to an integer of the same order: the signed magnitude of its fp32 bits."""
    if score != score:
        if nan_policy == "first":
            return 1 << 32
        score = -1e30
    (bits,) = struct.unpack("<I", struct.pack("<f", score))
    magnitude = bits & 0x7FFFFFFF
    return -magnitude if bits >> 31 else magnitude
