"""Golden truth for the greedy draft token over a vocabulary that is split over ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

NAN_SINK_SCORE = struct.unpack("f", struct.pack("f", -1e30))[0]
"""The fp32 score, exact as a Python float, that a NaN counts as under the policy "sink"."""

NAN_POLICIES = ("sink", "first")
SCORE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCAB_LIMIT = 2**31
"""Tokens; a vocabulary must be smaller."""


def draft_argmax(
    logits_shards: Sequence[torch.Tensor],
    *,
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_token_column: int = 0,
    nan_policy: str = "sink",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each row's best token from the shards of its logits and advance its position.

    Scores are compared as fp32 (exact from every input type): -inf < finite < +inf, -0 and +0
    are equal, and among equal scores the lowest global token id wins.

    Parameters
    ----------
    logits_shards : sequence of torch.Tensor
        One ``[rows, width_t]`` tensor a rank, bf16, fp16 or fp32, all of one type; unit column
        stride, any row stride. Rank t holds the tokens from ``sum(width_0 .. width_{t-1})`` on.
        A width may be 0.
    vocab_size : int
        Number of real tokens. Columns of a higher global id are padding and never win.
    positions : torch.Tensor
        ``[rows]``, int32 or int64, contiguous. Written: every row is advanced by one.
    draft_tokens : torch.Tensor, optional
        ``[rows, n]`` int64 with unit column stride. Written: one column takes the tokens.
    draft_token_column : int
        The column of `draft_tokens` that is written.
    nan_policy : {"sink", "first"}
        "sink": a NaN counts as fl32(-1e30), and ties with that score by id. "first": a NaN beats
        every number, and the first NaN of a row wins.

    Returns
    -------
    topk_p : torch.Tensor
        ``[rows, 1]`` fp32, all 1.0.
    topk_index : torch.Tensor
        ``[rows, 1]`` int64, the token ids.

    Raises
    ------
    ValueError
        For every argument that the above does not allow, before anything is written.

    Notes
    -----
    Source: the published rule of the op. A row without any score above -inf gives token 0, and so
    does a row of NaN alone.
    """
    _check(logits_shards, vocab_size, positions, draft_tokens, draft_token_column, nan_policy)

    scores = torch.cat([shard.float() for shard in logits_shards], dim=1)[:, :vocab_size]
    is_nan = torch.isnan(scores)
    # The "first" policy needs no score for a NaN: a row that holds one is decided below.
    scores = scores.masked_fill(is_nan, NAN_SINK_SCORE)

    # The lowest id among the equals, spelled out: a library's argmax promises less about ties.
    ids = torch.arange(vocab_size, device=scores.device)
    wins = scores == scores.amax(dim=1, keepdim=True)
    if nan_policy == "first":
        wins = torch.where(is_nan.any(dim=1, keepdim=True), is_nan, wins)
    tokens = torch.where(wins, ids, vocab_size).amin(dim=1, keepdim=True)

    positions += 1
    if draft_tokens is not None:
        draft_tokens[:, draft_token_column] = tokens[:, 0]
    return torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device), tokens


def _check(
    logits_shards: Sequence[torch.Tensor],
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_token_column: int,
    nan_policy: str,
) -> None:
    if not isinstance(logits_shards, list | tuple) or not logits_shards:
        raise ValueError(
            f"logits_shards: need a list of at least one tensor, got {logits_shards!r}"
        )
    first = logits_shards[0]
    for t, shard in enumerate(logits_shards):
        name = f"logits_shards[{t}]"
        if not isinstance(shard, torch.Tensor) or shard.ndim != 2:
            raise ValueError(f"{name}: need a [rows, width] tensor, got {_describe(shard)}")
        if shard.dtype not in SCORE_TYPES:
            raise ValueError(f"{name}: dtype must be bf16, fp16 or fp32, got {shard.dtype}")
        if shard.dtype != first.dtype:
            raise ValueError(f"{name}: dtype {shard.dtype} differs from shard 0's {first.dtype}")
        if shard.shape[0] != first.shape[0]:
            raise ValueError(f"{name}: {shard.shape[0]} rows, but shard 0 has {first.shape[0]}")
        if shard.shape[1] > 1 and shard.stride(1) != 1:
            raise ValueError(f"{name}: column stride must be 1, got {shard.stride(1)}")
        if shard.device != first.device:
            raise ValueError(f"{name}: on {shard.device}, but shard 0 is on {first.device}")
    rows = first.shape[0]

    total = sum(shard.shape[1] for shard in logits_shards)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise ValueError(f"vocab_size: need an int, got {vocab_size!r}")
    if not 0 < vocab_size <= total or vocab_size >= VOCAB_LIMIT:
        raise ValueError(
            f"vocab_size: need 1 .. {total} (the shards' total width) and below 2^31, "
            f"got {vocab_size}"
        )

    if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions: need int32 or int64, got {_describe(positions)}")
    if positions.shape != (rows,) or not positions.is_contiguous():
        raise ValueError(
            f"positions: need a contiguous [{rows}] tensor, got {_describe(positions)}"
        )
    if positions.device != first.device:
        raise ValueError(f"positions: on {positions.device}, but the logits are on {first.device}")

    if draft_tokens is not None:
        if not isinstance(draft_tokens, torch.Tensor) or draft_tokens.dtype != torch.int64:
            raise ValueError(f"draft_tokens: need int64, got {_describe(draft_tokens)}")
        if draft_tokens.ndim != 2 or draft_tokens.shape[0] != rows:
            raise ValueError(f"draft_tokens: need [{rows}, n], got {_describe(draft_tokens)}")
        columns = draft_tokens.shape[1]
        if columns > 1 and draft_tokens.stride(1) != 1:
            raise ValueError(f"draft_tokens: column stride must be 1, got {draft_tokens.stride(1)}")
        if draft_tokens.device != first.device:
            raise ValueError(
                f"draft_tokens: on {draft_tokens.device}, but the logits are on {first.device}"
            )
        if isinstance(draft_token_column, bool) or not isinstance(draft_token_column, int):
            raise ValueError(f"draft_token_column: need an int, got {draft_token_column!r}")
        if not 0 <= draft_token_column < columns:
            raise ValueError(
                f"draft_token_column: need 0 .. {columns - 1}, got {draft_token_column}"
            )

    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy: need one of {NAN_POLICIES}, got {nan_policy!r}")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} of strides {value.stride()}"
    return repr(value)
