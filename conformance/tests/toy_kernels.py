"""Triton kernels: one reads beyond its tensor and forgets what it read, one converts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(x, count, PEEK: tl.constexpr):
    lanes = tl.arange(0, 64)
    tl.load(x + lanes, mask=lanes < count + PEEK, other=0.0)


def copies_and_peeks(x: Tensor, *, peek: bool) -> None:
    """Read up to 63 elements, and with `peek` the one behind them too."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    _copy[(1,)](flat, x.numel(), PEEK=int(peek), num_warps=1, enable_fp_fusion=False)


@triton.jit
def _cast(source, target, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    tl.store(target + lanes, tl.load(source + lanes).to(target.dtype.element_ty))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a vector, whose length is a power of two, as a kernel's plain cast does."""
    target = torch.empty(values.shape, dtype=dtype, device=values.device)
    _cast[(1,)](values, target, COUNT=values.numel(), num_warps=1, enable_fp_fusion=False)
    return target


@triton.jit
def _double(source, target, COUNT: tl.constexpr, PAIRS: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    value = tl.load(source + lanes)
    both = value[:, None] + tl.zeros([COUNT, PAIRS], dtype=tl.int32) + value[:, None]
    tl.static_assert(both.shape[0] == COUNT and both.numel == COUNT * PAIRS)
    pairs = tl.arange(0, PAIRS)
    tl.store(target + lanes[:, None] * PAIRS + pairs[None, :], both)


def double(values: Tensor, pairs: int) -> Tensor:
    """Give `pairs` columns of twice an int32 vector, modulo 2**32; lengths are powers of two."""
    target = torch.empty(len(values), pairs, dtype=torch.int32, device=values.device)
    _double[(1,)](values, target, COUNT=len(values), PAIRS=pairs, num_warps=1)
    return target
