"""Triton's interpreter put right where it converts between float32 and bfloat16."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

MANTISSA_LOST = 16
"""Bits of a float32 that a bfloat16 does not have."""


def repair() -> None:
    """Make casts between float32 and bfloat16 what they are on every GPU.

    The interpreter misreads bfloat16 subnormals and truncates where hardware rounds to nearest,
    ties to even. This project's kernels go round both; a reader's kernel, right on a GPU, must
    not fail here for a plain cast. Does nothing where Triton is not loaded or not interpreting,
    or where it was done before.
    """
    module = sys.modules.get("triton.runtime.interpreter")
    convert = getattr(module, "_convert_float", None)
    if module is None or convert is None or hasattr(convert, "faulty"):
        return
    tl = sys.modules["triton.language"]

    def exact(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(values.view(np.uint16))
        if (source, target) == (tl.float32, tl.bfloat16) and rounding_mode is None:
            return narrow(values.view(np.uint32))
        return convert(values, source, target, rounding_mode)

    exact.faulty = convert  # type: ignore[attr-defined]
    module._convert_float = exact  # type: ignore[attr-defined]


def widen(patterns: np.ndarray) -> np.ndarray:
    """Float32 patterns of bfloat16 patterns: exact."""
    return patterns.astype(np.uint32) << np.uint32(MANTISSA_LOST)


def narrow(patterns: np.ndarray) -> np.ndarray:
    """Bfloat16 patterns of float32 patterns: to nearest, ties to even; a NaN stays one, quiet."""
    upper = patterns >> np.uint32(MANTISSA_LOST)
    half = np.uint32((1 << (MANTISSA_LOST - 1)) - 1)
    # The largest carry makes infinity; only NaN patterns, replaced below, could wrap around.
    rounded = (patterns + (half + (upper & np.uint32(1)))) >> np.uint32(MANTISSA_LOST)
    nan = (patterns & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, upper | np.uint32(0x40), rounded).astype(np.uint16)
