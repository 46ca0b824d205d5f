"""Triton kernels of `q_rope_store`: rotate and copy in one launch, and what that replaces."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels import runtime
from draftproof.kernels.numerics import bits_float, fma32, round_bf16, widen_bf16
from draftproof.oracles import q_rope_store as oracle

HEAD_DIM = tl.constexpr(512)
"""Elements of a query head."""
ROPE_DIM = tl.constexpr(64)
"""Elements at its end that are rotated."""
COPIED = tl.constexpr(HEAD_DIM.value - ROPE_DIM.value)
"""Elements at its start that are copied."""

FEW_HEADS = 8 if runtime.INTERPRETED else 2048
"""Heads of a call up to which each gets a program of its own, so that a small call is as short as
one head. Beyond, the GPU is full, and larger programs have more loads under way at once."""

MANY_HEADS_PER_PROGRAM = 512 if runtime.INTERPRETED else 8
"""Heads of a program in a large call. The interpreter runs one program at a time, whose cost hardly
depends on its size."""

FEW_WARPS, MANY_WARPS = 1, 4
"""Warps of a program in a small and in a large call: one warp rotates the 32 pairs of one head."""

WIDE_BYTES = 16
"""Bytes of the widest load: whole ones need bases and row strides that are multiples of it."""

MAX_HEADS = 2**30
"""Heads of a call, over all its rows, that the kernels count in 32 bits (1 TiB of queries)."""

Path = Literal["fused", "oracle"]

_POSITION_DTYPES = (torch.int32, torch.int64)
_NO_ALIGNMENT = ["q", "output", "freqs", "positions"]
_NO_VALUE = ["q_stride", "output_stride", "heads", "total"]


@triton.jit
def _rotate(x, y, c, s):
    """Rotate pairs of bfloat16 values, widened to float32; what is even and odd, as bfloat16.

    The product with y is rounded on its own; that with x is not. The order is the contract.
    """
    even = round_bf16(fma32(x, c, -(y * s)))
    odd = round_bf16(fma32(x, s, y * c))
    return even, odd


@triton.jit
def _rotate_packed(pairs, rotations):
    """Rotate pairs held as int32 (x in the low half) by complex64 held as int64 (real below)."""
    x = bits_float(pairs << 16)
    y = bits_float(pairs & -65536)
    c = bits_float(rotations.to(tl.int32))
    s = bits_float((rotations >> 32).to(tl.int32))
    even, odd = _rotate(x, y, c, s)
    low = even.to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return low | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)


# Neither a stride nor a size nor an address may make a kernel of its own: a server that meets a new
# one must not compile in the middle of decoding. Strides pass 2^31.
@triton.jit(do_not_specialize=_NO_VALUE, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _rotate_and_store_kernel(
    q,
    output,
    freqs,
    positions,
    q_stride: tl.int64,
    output_stride: tl.int64,
    heads: tl.int32,
    total: tl.int32,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    there = number < total
    row = number // heads
    head = number - row * heads
    # First of all, because what to rotate by is only known when it has come.
    position = tl.load(positions + row, mask=there, other=0).to(tl.int64)

    source = row.to(tl.int64) * q_stride + head * HEAD_DIM
    target = row.to(tl.int64) * output_stride + head * HEAD_DIM
    pair = tl.arange(0, ROPE_DIM // 2)[None, :]
    in_tail = there[:, None] & (pair >= 0)
    if WIDE:
        # Two elements at a time, as integers: a pair is in one register, and a copy is bits.
        words = q.to(tl.pointer_type(tl.int32), bitcast=True) + source // 2
        placed = output.to(tl.pointer_type(tl.int32), bitcast=True) + target // 2
        words = tl.multiple_of(words, 16)[:, None]
        placed = tl.multiple_of(placed, 16)[:, None]
        word = tl.arange(0, HEAD_DIM // 2)[None, :]
        copied = there[:, None] & (word < COPIED // 2)
        content = tl.load(words + word, mask=copied, other=0)
        pairs = tl.load(words + COPIED // 2 + pair, mask=in_tail, other=0)
        turns = freqs.to(tl.pointer_type(tl.int64), bitcast=True)
        turns += position[:, None] * (ROPE_DIM // 2) + pair
        rotations = tl.load(turns, mask=in_tail, other=0)
        tl.store(placed + word, content, mask=copied)
        rotated = _rotate_packed(pairs, rotations)
        tl.store(placed + COPIED // 2 + pair, rotated, mask=in_tail)
    else:
        elements = (q + source)[:, None]
        places = (output + target)[:, None]
        element = tl.arange(0, HEAD_DIM)[None, :]
        copied = there[:, None] & (element < COPIED)
        content = tl.load(elements + element, mask=copied, other=0)
        x = tl.load(elements + COPIED + 2 * pair, mask=in_tail, other=0)
        y = tl.load(elements + COPIED + 2 * pair + 1, mask=in_tail, other=0)
        turns = freqs + position[:, None] * ROPE_DIM + 2 * pair
        c = tl.load(turns, mask=in_tail, other=0)
        s = tl.load(turns + 1, mask=in_tail, other=0)
        tl.store(places + element, content, mask=copied)
        even, odd = _rotate(widen_bf16(x), widen_bf16(y), c, s)
        tl.store(places + COPIED + 2 * pair, even, mask=in_tail)
        tl.store(places + COPIED + 2 * pair + 1, odd, mask=in_tail)


@triton.jit(do_not_specialize=["heads", "total"], do_not_specialize_on_alignment=_NO_ALIGNMENT[2:])
def _rotate_in_place_kernel(
    rotated,
    freqs,
    positions,
    heads: tl.int32,
    total: tl.int32,
    HEADS: tl.constexpr,
):
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    there = (number < total)[:, None]
    position = tl.load(positions + number // heads, mask=number < total, other=0).to(tl.int64)
    pair = tl.arange(0, ROPE_DIM // 2)[None, :]
    tail = number.to(tl.int64)[:, None] * HEAD_DIM + COPIED + 2 * pair
    turns = freqs + position[:, None] * ROPE_DIM + 2 * pair
    x = tl.load(rotated + tail, mask=there, other=0)
    y = tl.load(rotated + tail + 1, mask=there, other=0)
    c = tl.load(turns, mask=there, other=0)
    s = tl.load(turns + 1, mask=there, other=0)
    even, odd = _rotate(widen_bf16(x), widen_bf16(y), c, s)
    tl.store(rotated + tail, even, mask=there)
    tl.store(rotated + tail + 1, odd, mask=there)


def choose_path(device_type: str, *, interpreted: bool) -> Path:
    """Choose what serves tensors of a device: the kernel, or the oracle where Triton has none.

    Parameters
    ----------
    device_type : str
        "cuda" (also on ROCm), "cpu" or another of torch's.
    interpreted : bool
        Whether Triton's interpreter runs the kernels of this process.
    """
    if device_type == "cuda" or (device_type == "cpu" and interpreted):
        return "fused"
    return "oracle"


def heads_per_program(total: int) -> int:
    """Choose how many heads a program takes, of `total` heads over all rows of a call."""
    return 1 if total <= FEW_HEADS else MANY_HEADS_PER_PROGRAM


def moves_wide(q: Tensor, output: Tensor, freqs_cis: Tensor) -> bool:
    """Say whether bases and row strides allow 16-byte loads and stores of heads.

    Parameters
    ----------
    q, output, freqs_cis : Tensor
        As `q_rope_store`. A rotation, 8 bytes, is then loaded as one.
    """
    mask = q.data_ptr() | output.data_ptr()
    if q.shape[0] > 1:
        mask |= q.stride(0) * q.element_size() | output.stride(0) * output.element_size()
    return mask % WIDE_BYTES == 0 and freqs_cis.data_ptr() % freqs_cis.element_size() == 0


def q_rope_store(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """Copy query heads into their buffer, tails rotated on the way, in one launch.

    The launch can be captured in a CUDA graph; call once with tensors of the same alignment and
    about as many rows before, so that the kernel is compiled. On a device without Triton the
    oracle does it. A call without heads launches nothing.

    Parameters
    ----------
    q : Tensor, [T, H, 512], bfloat16
        Strides (any from H * 512 on, 512, 1).
    output : Tensor, [T, H, 512], bfloat16
        Written; strides as `q`, no byte shared with it.
    freqs_cis : Tensor, [max_pos, 32], complex64
        Contiguous.
    positions : Tensor, [T], int32 or int64
        Contiguous. Not read on the host.

    Raises
    ------
    ValueError
        With the words of `refusal`, before anything is written.

    Notes
    -----
    Source: the published rule of the op, see `draftproof.oracles.q_rope_store`.
    """
    if reason := refusal(q, output, freqs_cis, positions):
        raise ValueError(reason)
    if not q.numel():
        return
    if choose_path(q.device.type, interpreted=runtime.INTERPRETED) == "oracle":
        oracle.q_rope_store(q, output, freqs_cis, positions)
        return
    # Triton launches on the current device, which need not be the tensors'.
    if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            q_rope_store(q, output, freqs_cis, positions)
        return
    rows, heads, _ = q.shape
    programs_heads = heads_per_program(rows * heads)
    _rotate_and_store_kernel[triton.cdiv(rows * heads, programs_heads),](
        q,
        output,
        torch.view_as_real(freqs_cis),
        positions,
        q.stride(0),
        output.stride(0),
        heads,
        rows * heads,
        HEADS=programs_heads,
        WIDE=moves_wide(q, output, freqs_cis),
        num_warps=FEW_WARPS if programs_heads == 1 else MANY_WARPS,
        enable_fp_fusion=False,
    )


def q_rope_store_baseline(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """Copy the queries, rotate the copy in place, copy it into the buffer: the unfused path.

    Parameters, effect and errors are those of `q_rope_store`.
    """
    if reason := refusal(q, output, freqs_cis, positions):
        raise ValueError(reason)
    if not q.numel():
        return
    if choose_path(q.device.type, interpreted=runtime.INTERPRETED) == "oracle":
        oracle.q_rope_store(q, output, freqs_cis, positions)
        return
    if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            q_rope_store_baseline(q, output, freqs_cis, positions)
        return
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotated.view(torch.int16).copy_(q.view(torch.int16))
    rows, heads, _ = q.shape
    _rotate_in_place_kernel[triton.cdiv(rows * heads, MANY_HEADS_PER_PROGRAM),](
        rotated,
        torch.view_as_real(freqs_cis),
        positions,
        heads,
        rows * heads,
        HEADS=MANY_HEADS_PER_PROGRAM,
        num_warps=MANY_WARPS,
        enable_fp_fusion=False,
    )
    output.view(torch.int16).copy_(rotated.view(torch.int16))


def refusal(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> str | None:
    """Say why a call cannot be served, or None: the guard that a serving engine may ask first.

    Parameters
    ----------
    q, output, freqs_cis, positions
        As `q_rope_store`. No value of a tensor is read, so that asking never waits for the device.

    Returns
    -------
    str or None
        One sentence that names the argument, what was found and what is wanted.
    """
    for name, tensor in (("q", q), ("output", output)):
        if tensor.dtype != torch.bfloat16:
            return f"{name}: dtype must be torch.bfloat16, got {tensor.dtype}"
        if tensor.dim() != 3 or tensor.shape[2] != HEAD_DIM.value:
            return f"{name}: shape must be [T, H, {HEAD_DIM.value}], got {list(tensor.shape)}"
    if output.shape != q.shape:
        return f"output: shape must be that of q, {list(q.shape)}, got {list(output.shape)}"
    rows, heads, _ = q.shape
    for name, tensor in (("q", q), ("output", output)):
        row_stride, head_stride, stride = tensor.stride()
        if stride != 1 or (head_stride != HEAD_DIM.value and heads > 1):
            return (
                f"{name}: strides must be (any, {HEAD_DIM.value}, 1), got {tensor.stride()}: "
                "the heads of a row lie in one piece"
            )
        if row_stride < heads * HEAD_DIM.value and rows > 1:
            return f"{name}: row stride must be at least {heads * HEAD_DIM.value}, got {row_stride}"
    if rows * heads > MAX_HEADS:
        return f"q: {rows} x {heads} heads are beyond the limit of {MAX_HEADS}"

    if freqs_cis.dtype != torch.complex64:
        return f"freqs_cis: dtype must be torch.complex64, got {freqs_cis.dtype}"
    if freqs_cis.dim() != 2 or freqs_cis.shape[1] != ROPE_DIM.value // 2:
        return (
            f"freqs_cis: shape must be [max_pos, {ROPE_DIM.value // 2}], "
            f"got {list(freqs_cis.shape)}"
        )
    if not freqs_cis.is_contiguous():
        return f"freqs_cis: must be contiguous, got strides {freqs_cis.stride()}"
    # A lazy conjugate has the strides of its base, and that base's values in memory.
    if freqs_cis.is_conj():
        return "freqs_cis: is a lazy conjugate, whose values are not in memory"
    if rows and not freqs_cis.shape[0]:
        return f"freqs_cis: has 0 rows, but q has {rows}, each with a position"

    if positions.dtype not in _POSITION_DTYPES:
        return f"positions: dtype must be torch.int32 or torch.int64, got {positions.dtype}"
    if positions.dim() != 1 or positions.shape[0] != rows:
        return f"positions: shape must be [{rows}], got {list(positions.shape)}"
    if not positions.is_contiguous():
        return f"positions: must be contiguous, got strides {positions.stride()}"

    for name, tensor in (("output", output), ("freqs_cis", freqs_cis), ("positions", positions)):
        if tensor.device != q.device:
            return f"{name}: is on {tensor.device}, but q is on {q.device}"
    if q.numel() and q.device.type != "meta" and _share_a_byte(q, output):
        return "output: shares memory with q, which the op must not modify"
    return None


def _share_a_byte(q: Tensor, output: Tensor) -> bool:
    """Whether a row of one reaches into a row of the other; gaps between rows may interlock."""
    rows, length = q.shape[0], q.shape[1] * q.shape[2] * q.element_size()
    step, other_step = (
        tensor.stride(0) * tensor.element_size() if rows > 1 else length for tensor in (q, output)
    )
    # How far into memory `output` begins behind `q`.
    distance = output.data_ptr() - q.data_ptr()
    if distance >= (rows - 1) * step + length or -distance >= (rows - 1) * other_step + length:
        return False
    if step == other_step:
        # Rows that are k apart begin `distance + k * step` apart: only two k make that small.
        later, rest = divmod(distance, step)
        return (rest < length and abs(later) < rows) or (
            step - rest < length and abs(later + 1) < rows
        )
    for row in range(rows):
        begin = row * step - distance
        # The first row of `output` that ends behind this row's begin.
        other = max(0, (begin - length) // other_step + 1)
        if other < rows and other * other_step < begin + length:
            return True
    return False
