"""The MXFP8 codec once more, element by element over Python numbers, to check the oracle's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from draftproof.conformance.crosscheck.numerics import (
    decode_e4m3,
    encode_e4m3,
    multiply32,
    mxfp8_code,
    mxfp8_multiplier,
)


def encode_block(values: Sequence[float]) -> tuple[list[int], int]:
    """Give the E4M3 codes of up to 32 bf16 values, and the block's UE8M0 code."""
    code = mxfp8_code(max((abs(v) for v in values if not math.isnan(v)), default=0.0))
    multiplier = mxfp8_multiplier(code)
    scaled = (v if math.isinf(v) else multiply32(v, multiplier) for v in values)
    return [encode_e4m3(v) for v in scaled], code


def decode_element(data: int, code: int) -> Fraction | None:
    """Give the exact value of an E4M3 code under a UE8M0 code; None for NaN."""
    value = decode_e4m3(data)
    if math.isnan(value) or code == 255:
        return None
    return Fraction(value) * Fraction(2) ** (code - 127)


def swizzle(rows: Sequence[Sequence[int]]) -> bytearray:
    """Lay codes out as the hardware reads them: tile after tile, quarter row after quarter row.

    A tile takes 128 rows of 4 codes. It holds 32 lines of 16 bytes; line n is the four codes of
    row n, then those of rows n + 32, n + 64 and n + 96.
    """
    count = len(rows)
    groups = len(rows[0]) if rows else 0
    laid = bytearray()
    for top in range(0, count, 128):
        for left in range(0, groups, 4):
            for line in range(32):
                for row in range(top + line, top + 128, 32):
                    for group in range(left, left + 4):
                        there = row < count and group < groups
                        laid.append(rows[row][group] if there else 0)
    return laid


def dot(one: Iterable[Fraction | None], other: Iterable[Fraction | None]) -> float:
    """Multiply and add exactly, then round to float64; NaN where an element is one."""
    total = Fraction(0)
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            return math.nan
        total += a * b
    return float(total)
