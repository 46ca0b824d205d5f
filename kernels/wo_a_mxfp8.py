"""Grouped WO-A projection for few rows: split-K partial sums, then one kernel to MXFP8."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.numerics import (
    bits_float,
    encode_e4m3,
    magnitude_bits,
    mxfp8_code,
    mxfp8_multiplier,
    round_bf16,
    scale_by_multiplier,
    widen_bf16,
)
from draftproof.kernels.runtime import INTERPRETED, runs_triton

SPLITS = 8
"""Partial sums of an output, over consecutive ranges of D."""
MAX_ROWS = 8
"""Rows that the split-K kernel takes: one instruction of a matrix unit."""
BLOCK = tl.constexpr(32)
"""Columns that share a scale."""
TILE_ROWS = tl.constexpr(128)
"""Rows of a tile of the scales' 128x4 swizzle."""
TILE_GROUPS = tl.constexpr(4)
"""Groups of a tile of the scales' 128x4 swizzle, one 32-bit word of each row."""

_INTERPRETED = tl.constexpr(INTERPRETED)

BLOCK_R = 128 if INTERPRETED else 64
"""Weight rows of a program. 64 are the fewest that Hopper's matrix instruction takes; at the
production geometry all programs are then resident at once. The interpreter's programs cost the
same whatever their size."""
BLOCK_K = 128
"""Columns of D that a program multiplies at a time."""
MASKED_BLOCK_K = 128 if INTERPRETED else 32
"""The same where every element has a mask, which costs registers."""
STAGES = 4
"""Blocks of weights in flight: at the production geometry, all that a program reads."""
WARPS = 4

QUANTIZE_GROUPS = 64 if INTERPRETED else 4
"""Groups of 32 columns that a program quantises, a multiple of `TILE_GROUPS`."""
SUM_BLOCK = 4096 if INTERPRETED else 256
"""Elements that a program adds up where the rows stay bf16."""


class Mxfp8SwizzledInput(NamedTuple):
    """MXFP8 rows whose scales lie in the 128x4 swizzle, as the linear behind WO-A reads them.

    The type is what tells this layout from a plain (data, block scales) tuple: `linear_path`.

    Attributes
    ----------
    data : Tensor
        float8_e4m3fn ``[rows, K]``, contiguous.
    scales : Tensor
        uint8 ``[512 * ceil(rows / 128) * ceil(K / 128)]``, UE8M0 codes; 0 where no block stands.
    """

    data: Tensor
    scales: Tensor


# ---------------------------------------------------------------------------------------------
# Kernels


# No length, stride or address makes a kernel of its own: a server that meets a new batch size must
# not compile. What the fast form may take for granted is told by FAST alone.
@triton.jit(
    do_not_specialize=["rows", "width", "tiles", "groups", "length", "steps", "row_units"],
    do_not_specialize_on_alignment=["x", "weight", "partials"],
)
def _partials_kernel(
    x,
    weight,
    partials,
    rows,
    width,
    tiles,
    groups,
    length,
    steps,
    row_units: tl.int64,
    FAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum over one split of D for BLOCK_R weight rows and all rows of x.

    With FAST all blocks are whole, `row_units` counts eights of elements, and both inputs stand at
    multiples of 16 bytes: then every load is wide, and only missing rows of x are masked.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    r = (tl.program_id(0) % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    t = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)

    # Products with a constant tell the compiler what divides the strides.
    span = steps.to(tl.int64) * BLOCK_K if FAST else length.to(tl.int64)
    row_stride = row_units * (8 if FAST else 1)
    depth = span * 8
    first_weight = weight + (group * width * depth + split * span)
    first_x = x + (group * depth + split * span)
    if FAST:
        first_weight = tl.multiple_of(first_weight, 16)
        first_x = tl.multiple_of(first_x, 16)
    weights = first_weight + r[:, None].to(tl.int64) * depth + k[None, :]
    inputs = first_x + t[None, :].to(tl.int64) * row_stride + k[:, None]
    real_row = (t < rows)[None, :]

    total = tl.zeros([BLOCK_R, ROWS], dtype=tl.float32)
    for step in range(steps):
        if FAST:
            w = tl.load(weights)
            v = tl.load(inputs, mask=real_row, other=0.0)
        else:
            real = step * BLOCK_K + k < length
            w = tl.load(weights, mask=(r < width)[:, None] & real[None, :], other=0.0)
            v = tl.load(inputs, mask=real_row & real[:, None], other=0.0)
        if _INTERPRETED:  # noqa: SIM108 - a compile-time choice between blocks of other types
            # There `tl.dot` multiplies the bit patterns of bf16.
            total = tl.dot(widen_bf16(w), widen_bf16(v), total)
        else:
            total = tl.dot(w, v, total)
        weights += BLOCK_K
        inputs += BLOCK_K

    place = ((split * rows + t[None, :]) * groups + group) * width + r[:, None]
    if FAST:
        tl.store(partials + place, total, mask=real_row)
    else:
        tl.store(partials + place, total, mask=real_row & (r < width)[:, None])


@triton.jit
def _sum_in_order(partials, plane, splits, mask, SPLITS: tl.constexpr):
    """Add a block of every split's partial sums, from the first to the last.

    SPLITS, where it is not 0, stands for `splits`: then all loads are under way at once.
    """
    total = tl.load(partials, mask=mask, other=0.0)
    if SPLITS:
        for split in tl.static_range(1, SPLITS):
            total += tl.load(partials + split * plane, mask=mask, other=0.0)
    else:
        for _ in range(1, splits):
            partials += plane
            total += tl.load(partials, mask=mask, other=0.0)
    return total


@triton.jit(
    do_not_specialize=["rows", "groups", "splits"],
    do_not_specialize_on_alignment=["partials", "data", "scales"],
)
def _quantize_kernel(
    partials,
    data,
    scales,
    rows,
    groups,
    splits,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Reduce GROUPS blocks of 32 columns of one row, round to bf16, and quantise.

    `partials` may be one split of bf16, which needs no rounding. `scales` is seen as 32-bit words,
    the four codes of one row in one tile.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS
    columns = groups.to(tl.int64) * BLOCK
    group = first_group + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (group < groups)[:, None]

    first = partials + row * columns
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    total = _sum_in_order(first + column, rows * columns, splits, real, SPLITS)
    y = widen_bf16(total if total.dtype == tl.bfloat16 else round_bf16(total))
    code = mxfp8_code(bits_float(tl.max(magnitude_bits(y), axis=1)))
    scaled = scale_by_multiplier(y, mxfp8_multiplier(code)[:, None])
    tl.store(tl.multiple_of(data + row * columns, 16) + column, encode_e4m3(scaled), mask=real)

    # A word for each row of a tile. The rows share the padding out among them, so that nothing has
    # to clear it first.
    bytes_of_word = tl.reshape(code.to(tl.int32), [GROUPS // TILE_GROUPS, TILE_GROUPS])
    word = tl.sum(bytes_of_word << (8 * tl.arange(0, TILE_GROUPS))[None, :], axis=1)
    tiles = (groups + TILE_GROUPS - 1) // TILE_GROUPS
    tile = first_group // TILE_GROUPS + tl.arange(0, GROUPS // TILE_GROUPS)
    row_tile = row // TILE_ROWS
    place = tl.arange(0, TILE_ROWS)
    row_of_place = (place % 4) * 32 + place // 4
    own = row % TILE_ROWS
    rows_here = tl.minimum(rows - row_tile * TILE_ROWS, TILE_ROWS)
    value = tl.where(row_of_place[None, :] == own, word[:, None], 0)
    words = scales + (row_tile * tiles + tile[:, None]) * TILE_ROWS + place[None, :]
    cared_for = (row_of_place % rows_here == own)[None, :] & (tile < tiles)[:, None]
    tl.store(words, value, mask=cared_for)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["partials", "y"],
)
def _sum_kernel(partials, y, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce partial sums to bf16."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    total = _sum_in_order(partials + place, count.to(tl.int64), SPLITS, real, SPLITS)
    tl.store(y + place, round_bf16(total), mask=real)


# ---------------------------------------------------------------------------------------------
# Launchers


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Say whether a kernel may be put in place while the one before it ends (Hopper and later).

    The kernels wait for that end before they touch memory; what is hidden is launch latency.
    """
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def wo_a_mxfp8(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Project each group of attention outputs and quantise the rows to MXFP8, in two launches.

    The result is the same on every run: no atomics, and sums in a fixed order.

    Parameters
    ----------
    x : Tensor
        bfloat16 ``[M, G, D]``, M 1 to 8, D a multiple of 8. A row is contiguous; rows may stand
        further apart than G * D. The fast form needs D / 8 a multiple of 128, and rows and base at
        multiples of 16 bytes.
    weight : Tensor
        bfloat16 ``[G, R, D]``, contiguous, G * R a multiple of 32. The fast form needs R a
        multiple of 64 and a base at a multiple of 16 bytes.

    Returns
    -------
    Mxfp8SwizzledInput
        data ``[M, G * R]`` float8_e4m3fn, and its scales.

    Raises
    ------
    ValueError
        For every argument that the above does not allow, before anything is launched.

    Notes
    -----
    Source: the published rule of the op, see `draftproof.oracles.wo_a_mxfp8`.
    """
    return _quantize(wo_a_partials(x, weight))


def wo_a(x: Tensor, weight: Tensor) -> Tensor:
    """Project each group: bfloat16 ``[M, G, R]``, the rows that `wo_a_mxfp8` quantises.

    Parameters and errors are those of `wo_a_mxfp8`.
    """
    partials = wo_a_partials(x, weight)
    y = torch.empty(partials.shape[1:], dtype=torch.bfloat16, device=x.device)
    _sum_kernel[(triton.cdiv(y.numel(), SUM_BLOCK),)](
        partials,
        y,
        y.numel(),
        SPLITS=SPLITS,
        BLOCK=SUM_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return y


def wo_a_partials(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over each eighth of D: float32 ``[8, M, G, R]``.

    Parameters and errors are those of `wo_a_mxfp8`.
    """
    check_arguments(x, weight)
    rows, groups, depth = x.shape
    width = weight.shape[1]
    partials = torch.empty((SPLITS, rows, groups, width), dtype=torch.float32, device=x.device)
    row_stride = x.stride(0) if rows > 1 else 0
    length = depth // SPLITS
    fast = (
        length % BLOCK_K == 0
        and width % BLOCK_R == 0
        and row_stride % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
    block_k = BLOCK_K if fast else MASKED_BLOCK_K
    overlaps = launches_overlap(x.device)
    tiles = triton.cdiv(width, BLOCK_R)
    _partials_kernel[tiles * groups, SPLITS](
        x,
        weight,
        partials,
        rows,
        width,
        tiles,
        groups,
        length,
        triton.cdiv(length, block_k),
        row_stride // 8 if fast else row_stride,
        FAST=fast,
        # AMD's matrix instructions take 16 rows at least.
        ROWS=16 if torch.version.hip else MAX_ROWS,
        BLOCK_R=BLOCK_R,
        BLOCK_K=block_k,
        OVERLAPS=overlaps,
        num_warps=WARPS,
        num_stages=STAGES if fast else 1,
        enable_fp_fusion=False,
        # Only NVIDIA's backend knows the option.
        **({"launch_pdl": True} if overlaps else {}),
    )
    return partials


def quantize_partials(partials: Tensor) -> Mxfp8SwizzledInput:
    """Add partial sums in the order of the splits, round to bf16, and quantise to MXFP8.

    Parameters
    ----------
    partials : Tensor
        float32 ``[splits, M, G, R]``, contiguous, any M, at least one split, G * R a multiple of
        32.

    Returns
    -------
    Mxfp8SwizzledInput
        data ``[M, G * R]`` float8_e4m3fn, and its scales.

    Raises
    ------
    ValueError
        If `partials` is of another type, shape or layout.
    """
    check_partials(partials)
    return _quantize(partials)


def _quantize(partials: Tensor) -> Mxfp8SwizzledInput:
    """Quantise checked partial sums; one split may be bf16."""
    splits, rows = partials.shape[:2]
    columns = partials.shape[2] * partials.shape[3]
    groups = columns // 32
    device = partials.device
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    words = triton.cdiv(rows, 128) * triton.cdiv(groups, 4) * 128
    scales = torch.empty(words, dtype=torch.int32, device=device)
    if rows:
        overlaps = launches_overlap(device)
        _quantize_kernel[rows, triton.cdiv(groups, QUANTIZE_GROUPS)](
            partials,
            data.view(torch.uint8),
            scales,
            rows,
            groups,
            splits,
            # One kernel for the splits in use, one for any other number.
            SPLITS=splits if splits in (1, SPLITS) else 0,
            ALIGNED=partials.data_ptr() % 16 == 0,
            GROUPS=QUANTIZE_GROUPS,
            OVERLAPS=overlaps,
            num_warps=1,
            enable_fp_fusion=False,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return Mxfp8SwizzledInput(data, scales.view(torch.uint8))


# ---------------------------------------------------------------------------------------------
# The baseline: a library's products, one launch a step; and what servers run without the fused op


def wo_a_mxfp8_baseline(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Multiply split by split with a library's batched product, add, and quantise.

    Parameters, returns and errors are those of `wo_a_mxfp8`.
    """
    return quantize_partials_baseline(wo_a_partials_baseline(x, weight))


def wo_a_baseline(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply split by split with a library's batched product, and add.

    Parameters, returns and errors are those of `wo_a`.
    """
    return _add_splits(wo_a_partials_baseline(x, weight))[0].bfloat16()


def wo_a_partials_baseline(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply split by split with a library's batched product.

    Parameters, returns and errors are those of `wo_a_partials`.
    """
    check_arguments(x, weight)
    rows, groups, depth = x.shape
    width, length = weight.shape[1], depth // SPLITS
    partials = torch.empty((SPLITS, rows, groups, width), dtype=torch.float32, device=x.device)
    for group in range(groups):
        split_x = x[:, group].reshape(rows, SPLITS, length).transpose(0, 1)
        split_weight = weight[group].view(width, SPLITS, length).permute(1, 2, 0)
        if x.device.type == "cuda":
            product = torch.bmm(split_x, split_weight, out_dtype=torch.float32)
        else:
            # Only CUDA has a product of bf16 that keeps fp32.
            product = torch.bmm(split_x.float(), split_weight.float())
        partials[:, :, group] = product
    return partials


def quantize_partials_baseline(partials: Tensor) -> Mxfp8SwizzledInput:
    """Add the splits one launch after another, then quantise.

    Parameters, returns and errors are those of `quantize_partials`.
    """
    check_partials(partials)
    return _quantize(_add_splits(partials))


def _add_splits(partials: Tensor) -> Tensor:
    total = partials[:1].clone()
    for partial in partials[1:]:
        total += partial
    return total


def wo_a_mxfp8_from_einsum(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Multiply over all of D at once, to bf16, then quantise: what the fused op replaces.

    Not an implementation of `wo_a_mxfp8`: a sum over all of D is another than the sum of the
    splits in their order, and a library may reduce it in bf16.

    Parameters, returns and errors are those of `wo_a_mxfp8`.
    """
    check_arguments(x, weight)
    return _quantize(torch.einsum("tgd,grd->tgr", x, weight).contiguous()[None])


# ---------------------------------------------------------------------------------------------
# Dispatch: when WO-A is fused with the quantisation, and how a linear reads what it is given


class Route(NamedTuple):
    """Whether WO-A emits swizzled MXFP8, and the rule that decided it."""

    fused: bool
    reason: str


@dataclass(frozen=True)
class Linear:
    """What decides about the linear behind WO-A.

    Attributes
    ----------
    backend : str
        The matrix product of its MXFP8 method: "cutlass" and "cutedsl" read activations' scales in
        the 128x4 swizzle; others, and "" for a linear of another method, do not.
    weight_is_mxfp8 : bool
        E4M3 weights with a UE8M0 scale for 32 columns, by origin or converted from larger blocks
        and ready.
    repacked : bool
        The weights were repacked for a weight-only product, which takes bf16 activations.
    """

    backend: str
    weight_is_mxfp8: bool
    repacked: bool = False


SWIZZLED_BACKENDS = ("cutlass", "cutedsl")
"""Matrix products that read the 128x4 swizzle."""


def takes_swizzled(linear: Linear) -> bool:
    """Say whether a linear can take an `Mxfp8SwizzledInput`."""
    return linear.backend in SWIZZLED_BACKENDS and linear.weight_is_mxfp8 and not linear.repacked


def wo_a_route(x: Tensor, weight: Tensor, linear: Linear) -> Route:
    """Choose between the fused op and the plain projection, of which the linear quantises bf16.

    Parameters
    ----------
    x, weight : Tensor
        The projection's operands, of any shape and type.
    linear : Linear
        Who reads the result.

    Returns
    -------
    Route
        The fused op only if no rule forbids it; else the first rule that does.
    """
    forbids = (
        (not takes_swizzled(linear), "the linear does not read swizzled scales"),
        (x.dtype != torch.bfloat16, "the input is not bf16"),
        (weight.dtype != torch.bfloat16, "the weight is not bf16"),
        (not 1 <= x.shape[0] <= MAX_ROWS, f"not 1 to {MAX_ROWS} rows"),
        (x.shape[-1] % SPLITS != 0, f"the depth is no multiple of {SPLITS}"),
        (weight.shape[0] * weight.shape[1] % 32 != 0, "the columns are no multiple of 32"),
    )
    for applies, reason in forbids:
        if applies:
            return Route(fused=False, reason=reason)
    return Route(fused=True, reason="few bf16 rows, and a linear that reads them swizzled")


def linear_path(
    input: Tensor | tuple[Tensor, Tensor], linear: Linear
) -> Literal["swizzled", "plain", "quantise"]:
    """Say how a linear reads its input.

    Parameters
    ----------
    input : Tensor, or a tuple of data and scales
        Only the type `Mxfp8SwizzledInput` marks the swizzle. Any other tuple holds block scales of
        the linear's own layout, whatever the linear could read besides.
    linear : Linear

    Returns
    -------
    "swizzled", "plain" or "quantise"
        `quantise` for a tensor, which the linear quantises itself.

    Raises
    ------
    ValueError
        If a swizzled input comes to a linear that cannot take it: read as plain, its scales would
        be those of other blocks.
    """
    # The marker is a tuple too, so it must be asked for first.
    if isinstance(input, Mxfp8SwizzledInput):
        if not takes_swizzled(linear):
            raise ValueError(f"input: swizzled scales, which {linear} does not read")
        return "swizzled"
    return "plain" if isinstance(input, tuple) else "quantise"


# ---------------------------------------------------------------------------------------------
# Arguments


def check_arguments(x: Any, weight: Any) -> None:
    """Raise the ValueError of `wo_a_mxfp8` if a call is not allowed."""
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bfloat16 or tensor.dim() != 3:
            raise ValueError(f"{name} must be a 3-D bfloat16 tensor, not {_shown(tensor)}")
    rows, groups, depth = x.shape
    width = weight.shape[1]
    if not 1 <= rows <= MAX_ROWS or groups == 0 or depth == 0 or depth % SPLITS:
        raise ValueError(
            f"x must be [1 to {MAX_ROWS}, groups, a multiple of {SPLITS}], not {_shown(x)}"
        )
    if (
        x.stride(2) != 1
        or (groups > 1 and x.stride(1) != depth)
        or (rows > 1 and x.stride(0) < groups * depth)
    ):
        raise ValueError(f"x must have contiguous rows that do not overlap, not {_shown(x)}")
    if weight.shape[0] != groups or weight.shape[2] != depth:
        raise ValueError(f"weight must be [{groups}, R, {depth}], as x, not {_shown(weight)}")
    if groups * width == 0 or groups * width % 32:
        raise ValueError(f"weight must give a multiple of 32 columns, not {_shown(weight)}")
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, not {_shown(weight)}")
    if weight.device != x.device:
        raise ValueError(f"weight must be on {x.device}, as x, not {_shown(weight)}")
    _check_device("x", x)


def check_partials(partials: Any) -> None:
    """Raise the ValueError of `quantize_partials` if a call is not allowed."""
    if (
        not isinstance(partials, Tensor)
        or partials.dtype != torch.float32
        or partials.dim() != 4
        or partials.shape[0] == 0
        or partials.shape[2] * partials.shape[3] == 0
        or partials.shape[2] * partials.shape[3] % 32
        or not partials.is_contiguous()
    ):
        raise ValueError(
            "partials must be contiguous float32 [splits, M, G, R], with a split and a multiple "
            f"of 32 columns, not {_shown(partials)}"
        )
    _check_device("partials", partials)


def _check_device(name: str, tensor: Tensor) -> None:
    if not runs_triton(tensor.device):
        raise ValueError(
            f"{name} is on {tensor.device}, where Triton runs only under its interpreter "
            "(TRITON_INTERPRET=1 before triton is imported)"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} with strides {value.stride()} on {value.device}"
    return repr(value)
