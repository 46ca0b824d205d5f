"""Golden oracle of `q_rope_store`: rotate the tail of each query head on its way to its buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.oracles.numerics import fma32, round_bf16, widen_bf16

HEAD_DIM = 512
"""Elements of a query head."""

ROPE_DIM = 64
"""Elements at the end of a head that are rotated, as neighbouring pairs."""

POSITION_DTYPES = (torch.int32, torch.int64)


def q_rope_store(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """Copy query heads into their buffer, with rotary embedding applied to their tails.

    Elements 0 to 447 of each head are copied bit for bit. Pair p of the tail, x = q[..., 448 + 2p]
    and y = q[..., 449 + 2p] as float32, is rotated by c + si = freqs_cis[positions[t], p]:

        output[..., 448 + 2p] = bf16(fma32(x, c, -fl32(y * s)))
        output[..., 449 + 2p] = bf16(fma32(x, s, fl32(y * c)))

    The product with y is rounded to float32, the one with x is not.

    Parameters
    ----------
    q : Tensor, [T, H, 512], bfloat16
        Queries, strides (any from H * 512 on, 512, 1).
    output : Tensor, [T, H, 512], bfloat16
        Written in every element; strides as `q`. Often some heads of a wider buffer, the others of
        which keep every bit. Shares no byte with `q`.
    freqs_cis : Tensor, [max_pos, 32], complex64
        Rotation of each pair at each position, contiguous, not lazily conjugated.
    positions : Tensor, [T], int32 or int64
        Row of `freqs_cis` for each query, contiguous. Rows outside are undefined.

    Raises
    ------
    ValueError
        On arguments outside this description, before anything is written. The strides of
        dimensions of size 1 do not matter.

    Notes
    -----
    Source: the published rule of the op (rotary embedding of DeepSeek's queries as adjacent
    pairs, in the order of operations of the in-place kernel that it replaces). A NaN in the tail
    becomes the quiet NaN 0x7FC0; any NaN is right there.
    """
    validate(q, output, freqs_cis, positions)
    if q.numel() == 0:
        return

    copied = HEAD_DIM - ROPE_DIM
    # As integers, so that no conversion can touch a NaN's payload.
    output[..., :copied].view(torch.int16).copy_(q[..., :copied].view(torch.int16))

    pairs = widen_bf16(q[..., copied:]).unflatten(-1, (ROPE_DIM // 2, 2))
    x, y = pairs[..., 0], pairs[..., 1]
    rotation = torch.view_as_real(freqs_cis)[positions.long()][:, None]
    c, s = rotation[..., 0], rotation[..., 1]

    even = fma32(x, c, -(y * s))
    odd = fma32(x, s, y * c)
    rotated = torch.stack((even, odd), dim=-1).flatten(-2)
    rotated = torch.where(torch.isnan(rotated), torch.nan, rotated)
    output[..., copied:] = round_bf16(rotated)


def validate(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """Raise ValueError unless the arguments are as `q_rope_store` describes them.

    Parameters
    ----------
    q, output, freqs_cis, positions
        As `q_rope_store`. No value of a tensor is read.

    Raises
    ------
    ValueError
        Naming the argument, what was found and what is wanted.
    """
    for name, heads in (("q", q), ("output", output)):
        if heads.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be bfloat16, got {heads.dtype}")
        if heads.dim() != 3 or heads.shape[2] != HEAD_DIM:
            raise ValueError(f"{name} must be [T, H, {HEAD_DIM}], got shape {tuple(heads.shape)}")
    if output.shape != q.shape:
        raise ValueError(f"output must have q's shape {tuple(q.shape)}, got {tuple(output.shape)}")
    tokens, width = q.shape[0], q.shape[1] * HEAD_DIM
    for name, heads in (("q", q), ("output", output)):
        strides = heads.stride()
        if strides[2] != 1 or (heads.shape[1] > 1 and strides[1] != HEAD_DIM):
            raise ValueError(f"{name} must hold each row's heads in one piece, got {strides=}")
        if tokens > 1 and strides[0] < width:
            raise ValueError(f"{name} needs a row stride of at least {width}, got {strides=}")

    if freqs_cis.dtype != torch.complex64:
        raise ValueError(f"freqs_cis must be complex64, got {freqs_cis.dtype}")
    if freqs_cis.dim() != 2 or freqs_cis.shape[1] != ROPE_DIM // 2:
        raise ValueError(
            f"freqs_cis must be [max_pos, {ROPE_DIM // 2}], got shape {tuple(freqs_cis.shape)}"
        )
    if not freqs_cis.is_contiguous():
        raise ValueError(f"freqs_cis must be contiguous, got strides {freqs_cis.stride()}")
    if freqs_cis.is_conj():
        raise ValueError("freqs_cis must hold its own values, got a lazy conjugate")
    if freqs_cis.shape[0] == 0 and tokens > 0:
        raise ValueError(f"freqs_cis must have rows for the {tokens} positions, got none")

    if positions.dtype not in POSITION_DTYPES:
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    if positions.shape != (tokens,):
        raise ValueError(f"positions must be [{tokens}], got shape {tuple(positions.shape)}")
    if not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous, got strides {positions.stride()}")

    for name, tensor in (("output", output), ("freqs_cis", freqs_cis), ("positions", positions)):
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {tensor.device}")
    if _share_a_byte(q, output):
        raise ValueError("output must share no byte with q, got memory that overlaps")


def _share_a_byte(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape, whose rows lie in one piece each, have memory in common."""
    if one.numel() == 0 or one.is_meta:
        return False
    row_bytes = one[0].numel() * one.element_size()

    def starts(tensor: Tensor) -> Tensor:
        row_stride = tensor.stride(0) if tensor.shape[0] > 1 else 0
        rows = torch.arange(tensor.shape[0])
        return tensor.data_ptr() + rows * row_stride * tensor.element_size()

    first, second = starts(one), starts(other)
    if first[-1] + row_bytes <= second[0] or second[-1] + row_bytes <= first[0]:
        return False
    # The rows of `other` are in ascending order: the first that does not end before a row of
    # `one` begins is the one that could overlap it.
    nearest = torch.searchsorted(second + row_bytes, first, right=True)
    found = nearest < len(second)
    return bool((second[nearest[found]] < first[found] + row_bytes).any())
