"""Golden oracle of `c128_cleanup`: reset the ring slots that rejected draft tokens wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STATE_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)

KV_CLEARED = 0.0
"""What the `kv` half of a cleared row holds: +0.0, adding nothing to a compressed token."""

SCORE_CLEARED = float("-inf")
"""What the `score` half of a cleared row holds: -inf, a softmax weight of zero."""


def c128_cleanup(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Reset, in every layer, the ring rows that hold drafts which verification rejected.

    A ratio-128 layer keeps a ring of `ring_size` uncompressed token states per request.
    Verification writes `num_draft_tokens` drafts behind the committed tokens; those from the
    accepted count on are taken back. For each request b and draft offset d with
    `max(accept_lens[b], 0) <= d < num_draft_tokens`, the row (in 64-bit integers)

        req_pool_indices[b] * ring_size + (seq_lens[b] + d) % ring_size

    of every state becomes +0.0 in its `kv` half and -inf in its `score` half. No other byte
    changes. With `num_draft_tokens <= 1` or no request there is no effect at all.

    Parameters
    ----------
    states : sequence of Tensor, each [num_slots * ring_size, 2 * half], float32 or bfloat16
        One per layer, contiguous, of one shape, dtype and device; mutated in place. A row is the
        `kv` half, then the `score` half.
    req_pool_indices : Tensor, [bs], int32 or int64
        Slot of each request. Padded requests may share one slot. Slots outside the pool are
        undefined.
    seq_lens : Tensor, [bs], int32 or int64
        Committed tokens before this step's drafts. Negative lengths are undefined.
    accept_lens : Tensor, [bs], int32 or int64
        Accepted drafts: none below 1, all from `num_draft_tokens` on.
    ring_size : int
        Rows per slot, in tokens. Need not be a power of two.
    num_draft_tokens : int
        Drafts that the step verified. May exceed `ring_size`.

    Raises
    ------
    ValueError
        On arguments outside this description, before anything is written.

    Notes
    -----
    Source: the published rule of the op (cleanup of DeepSeek-V4's uncompressed states after
    speculative verification).
    """
    validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
    if num_draft_tokens <= 1 or req_pool_indices.numel() == 0:
        return

    slots = req_pool_indices.long()[:, None]
    lengths = seq_lens.long()[:, None]
    accepted = accept_lens.long()[:, None]
    offsets = torch.arange(num_draft_tokens, device=slots.device)

    rows = slots * ring_size + (lengths + offsets) % ring_size
    rejected_rows = rows[offsets >= accepted]

    half = states[0].shape[1] // 2
    for state in states:
        state[rejected_rows, :half] = KV_CLEARED
        state[rejected_rows, half:] = SCORE_CLEARED


def validate(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    ring_size: int,
) -> None:
    """Raise ValueError unless the arguments are as `c128_cleanup` describes them.

    Parameters
    ----------
    states, req_pool_indices, seq_lens, accept_lens, ring_size
        As `c128_cleanup`.

    Raises
    ------
    ValueError
        Naming the argument (a layer as `states[3]`) and what was found and wanted.
    """
    if len(states) == 0:
        raise ValueError("states is empty: at least one layer is needed")
    if ring_size <= 0:
        raise ValueError(f"ring_size must be positive, got {ring_size}")

    first = states[0]
    for layer, state in enumerate(states):
        name = f"states[{layer}]"
        for what in ("dtype", "shape", "device"):
            theirs, ours = getattr(first, what), getattr(state, what)
            if ours != theirs:
                raise ValueError(
                    f"{name} differs from states[0]: {what} {_plain(ours)}, not {_plain(theirs)}"
                )
        if state.dtype not in STATE_DTYPES:
            raise ValueError(f"{name} must be float32 or bfloat16, got {state.dtype}")
        if state.dim() != 2:
            raise ValueError(f"{name} must be 2-D, got shape {tuple(state.shape)}")
        rows, width = state.shape
        if width == 0 or width % 2 != 0:
            raise ValueError(f"{name} needs an even width above 0 (kv, then score), got {width}")
        if rows % ring_size != 0:
            raise ValueError(f"{name} must hold whole rings: {rows} rows, ring_size {ring_size}")
        if not state.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {state.stride()}")

    for name, index in (
        ("req_pool_indices", req_pool_indices),
        ("seq_lens", seq_lens),
        ("accept_lens", accept_lens),
    ):
        if index.dtype not in INDEX_DTYPES:
            raise ValueError(f"{name} must be int32 or int64, got {index.dtype}")
        if index.dim() != 1:
            raise ValueError(f"{name} must be 1-D, got shape {tuple(index.shape)}")
        if not index.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {index.stride()}")
        if index.device != first.device:
            raise ValueError(
                f"{name} must be on the states' device {first.device}, got {index.device}"
            )
        if len(index) != len(req_pool_indices):
            raise ValueError(
                f"{name} must have one entry per request: {len(index)}, "
                f"but req_pool_indices has {len(req_pool_indices)}"
            )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
