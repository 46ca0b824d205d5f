"""Kernels that prove the compile gate: some that it must refuse, and one that is as it should be.

They take the place of `c128_cleanup`, whose arguments offer a float tensor; nothing here is ever
launched.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WARPS = 16
"""As many as leave each thread few registers on every target."""

ELEMENTS = 1 << 17
"""Values of a program: 256 a thread of 512, or 128 a thread of 1024."""


@triton.jit
def holds_too_much(x_ptr, out_ptr, count: tl.constexpr):
    at = tl.arange(0, count)
    x = tl.load(x_ptr + at, volatile=True).to(tl.float32)
    # Every value is needed again once their sum is known, so none can be let go.
    tl.store(out_ptr + at, x * tl.sum(x))


@triton.jit
def holds_little(x_ptr, out_ptr, count: tl.constexpr):
    at = tl.program_id(0) * count + tl.arange(0, count)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float32))


@triton.jit
def does_not_compile(x_ptr, out_ptr, count: tl.constexpr):
    tl.static_assert(count == 0, "made to fail")


def _launch(kernel: Any, states: list[torch.Tensor], count: int, **options: Any) -> None:
    out = torch.empty(count, dtype=torch.float32, device=states[0].device)
    kernel[(1,)](states[0], out, count=count, **options)


def c128_cleanup(states: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Launch each once; one launch leaves an option open."""
    _launch(holds_too_much, states, ELEMENTS, num_warps=WARPS, enable_fp_fusion=False)
    _launch(holds_little, states, 256, num_warps=4, enable_fp_fusion=False)
    _launch(does_not_compile, states, 1, num_warps=1)
