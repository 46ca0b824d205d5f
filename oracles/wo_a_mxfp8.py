"""Golden truth of the grouped WO-A projection: partial sums, bf16 rows, MXFP8 in 128x4 swizzle."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.oracles import mxfp8
from draftproof.oracles.numerics import mxfp8_multiplier, power_of_two, round_bf16, widen_bf16

SPLITS = 8
"""Partial sums of every output, over consecutive ranges of D."""
MAX_ROWS = 8
"""Rows of a verify step that the projection takes."""
SUM_ERROR = 1024 * 2.0**-24
"""Error of an fp32 sum, relative to the sum of its terms' magnitudes: matrix units that truncate
reach 970 units of 2^-24 over a split."""
TERM_ERROR = 2.0**-149
"""Error of each term below the normal range: fp32's smallest step."""
EXACT_BITS = 22
"""A sum whose terms are multiples of 2^q and whose magnitudes add up to less than 2^(q + 22) is
exact in fp32 in any order, with room for the bits that a matrix unit drops when it aligns."""


class Mxfp8SwizzledInput(NamedTuple):
    """MXFP8 rows whose scales lie in the 128x4 swizzle.

    The type is what tells a linear this layout from a plain (data, block scales) tuple.

    Attributes
    ----------
    data : Tensor
        float8_e4m3fn ``[rows, K]``.
    scales : Tensor
        uint8, UE8M0 codes, 512 bytes for each started tile of 128 rows by 4 groups of 32 columns.
    """

    data: Tensor
    scales: Tensor


def wo_a_mxfp8(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Project each group of attention outputs and quantise the rows to MXFP8.

    Parameters
    ----------
    x : Tensor
        bfloat16 ``[M, G, D]``, M 1 to 8, D a multiple of 8. A row is contiguous; rows may stand
        further apart than G * D, so that a slice of a wider tensor is legal.
    weight : Tensor
        bfloat16 ``[G, R, D]``, contiguous, G * R a multiple of 32.

    Returns
    -------
    Mxfp8SwizzledInput
        data ``[M, G * R]`` float8_e4m3fn, and its scales.

    Raises
    ------
    ValueError
        For every argument that the above does not allow.

    Notes
    -----
    Source: the published rule of the op. Sums whose terms together pass fp32's range are undefined.
    """
    return quantize_partials(wo_a_partials(x, weight))


def wo_a(x: Tensor, weight: Tensor) -> Tensor:
    """Project each group: bfloat16 ``[M, G, R]``, the rows that `wo_a_mxfp8` quantises.

    Parameters and errors are those of `wo_a_mxfp8`.
    """
    return _sum_in_order(wo_a_partials(x, weight))


def wo_a_partials(x: Tensor, weight: Tensor) -> Tensor:
    """Sum ``x[t, g, d] * weight[g, r, d]`` over each eighth of D, in float64, rounded once.

    Parameters and errors are those of `wo_a_mxfp8`.

    Returns
    -------
    Tensor
        float32 ``[8, M, G, R]``. An implementation may be off by what `partial_bounds` allows.
    """
    _check(x, weight)
    sums = _per_split(widen_bf16(x).double(), widen_bf16(weight).double())
    # A zero sum, whose sign is free, is +0 here, and a NaN the positive quiet one.
    return torch.where(torch.isnan(sums), torch.nan, sums.float() + 0.0).contiguous()


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
    _check_partials(partials)
    y = _sum_in_order(partials)
    data, codes = mxfp8.encode(y.reshape(y.shape[0], y.shape[1] * y.shape[2]))
    return Mxfp8SwizzledInput(data, mxfp8.swizzle(codes))


def mxfp8_linear(input: Mxfp8SwizzledInput, weight_q: Tensor, weight_scales: Tensor) -> Tensor:
    """Dequantise both sides exactly and multiply, as the linear behind WO-A does.

    Parameters
    ----------
    input : Mxfp8SwizzledInput
        data ``[M, K]``, scales in the 128x4 swizzle.
    weight_q : Tensor
        float8_e4m3fn ``[N, K]``.
    weight_scales : Tensor
        uint8 ``[N, K / 32]``, plain UE8M0 codes.

    Returns
    -------
    Tensor
        float64 ``[M, N]``.

    Raises
    ------
    ValueError
        If one of them is of another type or shape.
    """
    data, scales = input
    rows, columns = data.shape
    if weight_q.dim() != 2 or weight_q.shape[1] != columns:
        raise ValueError(f"weight_q must be [N, {columns}], got {list(weight_q.shape)}")
    codes = mxfp8.unswizzle(scales, rows, columns // mxfp8.BLOCK)
    return mxfp8.decode(data, codes) @ mxfp8.decode(weight_q, weight_scales).T


# ---------------------------------------------------------------------------------------------
# What an implementation may give: intervals, each from the ones before it


def partial_bounds(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest partial sums that a correct fp32 summation can give.

    Parameters
    ----------
    x, weight : Tensor
        As `wo_a_mxfp8`.

    Returns
    -------
    lower, upper : Tensor
        float64 ``[8, M, G, R]``, equal where the sum is exact in any order; both NaN, or both the
        infinity, where every order gives that.
    """
    x64, w64 = widen_bf16(x).double(), widen_bf16(weight).double()
    value = _per_split(x64, w64)
    magnitude = _per_split(x64.abs(), w64.abs())
    error = SUM_ERROR * magnitude + (x.shape[2] // SPLITS) * TERM_ERROR
    exact = _is_exact(x, weight, magnitude) | ~torch.isfinite(value)
    return torch.where(exact, value, value - error), torch.where(exact, value, value + error)


def y_bounds(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest bf16 rows that some partial sums within bounds give.

    Parameters
    ----------
    x, weight : Tensor
        As `wo_a_mxfp8`.

    Returns
    -------
    lower, upper : Tensor
        float64 ``[M, G, R]``, bf16 values.
    """
    # Every fp32 addition and the rounding to bf16 are monotone: the ends give the ends.
    lower, upper = partial_bounds(x, weight)
    return (
        widen_bf16(_sum_in_order(lower.float())).double(),
        widen_bf16(_sum_in_order(upper.float())).double(),
    )


def amax_of(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest block maxima; a scale code is that of one between them.

    Parameters
    ----------
    lower, upper : Tensor
        float64 ``[M, blocks, 32]``, the rows' bounds from `y_bounds`.

    Returns
    -------
    least, greatest : Tensor
        float64 ``[M, blocks]``, bf16 values.
    """
    zero_between = (lower <= 0) & (upper >= 0)
    least = torch.where(zero_between, 0.0, torch.minimum(lower.abs(), upper.abs()))
    greatest = torch.maximum(lower.abs(), upper.abs())
    # A NaN takes no part in a maximum.
    return least.nan_to_num(0.0, torch.inf).amax(-1), greatest.nan_to_num(0.0, torch.inf).amax(-1)


def scaled_by(lower: Tensor, upper: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest elements before the rounding to E4M3, given emitted scales.

    Parameters
    ----------
    lower, upper : Tensor
        float64 ``[M, G, R]``, the rows' bounds from `y_bounds`.
    scales : Tensor
        uint8, swizzled, as an implementation emitted them.

    Returns
    -------
    lower, upper : Tensor
        float64 ``[M, G * R]``, what rounds to the least and the greatest data.
    """
    rows, groups = lower.shape[0], lower[0].numel() // mxfp8.BLOCK
    # The NaN code, which is wrong of itself, scales as 254 does.
    codes = mxfp8.unswizzle(scales, rows, groups).clamp(max=254)
    multiplier = mxfp8_multiplier(codes).double()[..., None]
    least, greatest = (
        torch.where(torch.isinf(end), end, end * multiplier).reshape(rows, groups * mxfp8.BLOCK)
        for end in (lower.reshape(rows, groups, -1), upper.reshape(rows, groups, -1))
    )
    return least, greatest


# ---------------------------------------------------------------------------------------------


def _per_split(x: Tensor, weight: Tensor) -> Tensor:
    """Sum products over each eighth of D: ``[8, M, G, R]`` in the type of the inputs."""
    rows, groups, depth = x.shape
    split_x = x.reshape(rows, groups, SPLITS, depth // SPLITS)
    split_weight = weight.reshape(groups, weight.shape[1], SPLITS, depth // SPLITS)
    return torch.einsum("tgsd,grsd->stgr", split_x, split_weight)


def _sum_in_order(partials: Tensor) -> Tensor:
    """Add fp32 partial sums from the first split to the last, and round to bf16."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return round_bf16(torch.where(torch.isnan(total), torch.nan, total))


def _is_exact(x: Tensor, weight: Tensor, magnitude: Tensor) -> Tensor:
    """Say which partial sums ``[8, M, G, R]`` fp32 gives exactly, in whatever order it adds."""
    terms = _per_split((x != 0).float(), (weight != 0).float())
    # Every term is a multiple of 2^step, where the steps of both factors add up.
    step = _finest_step(x)[:, :, :, None] + _finest_step(weight).transpose(1, 2)[None]
    step = step.permute(2, 0, 1, 3)
    fits = (step >= -149) & (magnitude < power_of_two(step + EXACT_BITS))
    # One product of two bf16 has 16 bits.
    alone = (terms == 1) & (magnitude >= 2.0**-126)
    return (magnitude < 2.0**128) & (fits | alone)


def _finest_step(values: Tensor) -> Tensor:
    """Give, for each split, the exponent of the lowest bit that is set in any bf16 value.

    int64 ``[.., .., 8]``; far above every exponent where all values are 0.
    """
    magnitude = values.view(torch.int16).to(torch.int32) & 0x7FFF
    step = _finest_steps().to(values.device)[magnitude]
    return step.reshape(*values.shape[:2], SPLITS, -1).amin(-1)


@functools.cache
def _finest_steps() -> Tensor:
    """Give the exponent of the lowest set bit of all bf16 magnitudes, int64 ``[2**15]``."""
    bits = torch.arange(2**15)
    exponent, mantissa = bits >> 7, bits & 0x7F
    mantissa = torch.where(exponent > 0, mantissa | 0x80, mantissa)
    # Zeros below the lowest bit that is set: the 8 bits have at most 7.
    lowest = torch.stack([(mantissa & ((2 << k) - 1)) == 0 for k in range(7)]).sum(0)
    return torch.where(mantissa == 0, 1000, exponent.clamp(min=1) - 134 + lowest)


def _check(x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bfloat16 or tensor.dim() != 3:
            raise ValueError(f"{name}: need a 3-D bfloat16 tensor, got {_describe(tensor)}")
    rows, groups, depth = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x: need 1 to {MAX_ROWS} rows, got {rows}")
    if groups == 0 or depth == 0 or depth % SPLITS:
        raise ValueError(
            f"x: need groups, and a depth that is a multiple of {SPLITS}, got {_describe(x)}"
        )
    if weight.shape[0] != groups or weight.shape[2] != depth:
        raise ValueError(f"weight: need [{groups}, R, {depth}] to match x, got {_describe(weight)}")
    columns = groups * weight.shape[1]
    if columns == 0 or columns % mxfp8.BLOCK:
        raise ValueError(
            f"weight: G * R must be a multiple of {mxfp8.BLOCK}, got {columns} of "
            f"{_describe(weight)}"
        )
    if x.stride(2) != 1 or (groups > 1 and x.stride(1) != depth):
        raise ValueError(f"x: the {groups} x {depth} of a row must be adjacent, got {_describe(x)}")
    if rows > 1 and x.stride(0) < groups * depth:
        raise ValueError(f"x: rows must be {groups * depth} apart or more, got {_describe(x)}")
    if not weight.is_contiguous():
        raise ValueError(f"weight: must be contiguous, got {_describe(weight)}")
    if weight.device != x.device:
        raise ValueError(f"weight: on {weight.device}, but x is on {x.device}")


def _check_partials(partials: Tensor) -> None:
    if not isinstance(partials, Tensor) or partials.dtype != torch.float32 or partials.dim() != 4:
        raise ValueError(f"partials: need a 4-D float32 tensor, got {_describe(partials)}")
    splits, _, groups, width = partials.shape
    if splits == 0:
        raise ValueError(f"partials: need at least one split, got {_describe(partials)}")
    if groups * width == 0 or groups * width % mxfp8.BLOCK:
        raise ValueError(
            f"partials: G * R must be a multiple of {mxfp8.BLOCK}, got {_describe(partials)}"
        )
    if not partials.is_contiguous():
        raise ValueError(f"partials: must be contiguous, got {_describe(partials)}")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} of strides {value.stride()}"
    return repr(value)
