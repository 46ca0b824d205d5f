"""Second oracle of `q_rope_store`: rotates one pair at a time, in exact fractions."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from draftproof.conformance.crosscheck.numerics import fma32, multiply32, round_bf16

FIRST_ROTATED = 448
"""First element of a head that is rotated; 32 pairs follow."""


def rotate(x: float, y: float, c: float, s: float) -> tuple[float, float]:
    """Rotate one pair by the rule, as bfloat16 values in Python floats.

    Parameters
    ----------
    x, y : float
        The pair, bfloat16 values.
    c, s : float
        Real and imaginary part of the rotation, float32 values.

    Returns
    -------
    even, odd : float
    """
    even = fma32(x, c, -multiply32(y, s))
    odd = fma32(x, s, multiply32(y, c))
    return round_bf16(even), round_bf16(odd)


def value_of(pattern: int) -> float:
    """Give the value of a bfloat16 bit pattern."""
    (value,) = struct.unpack("<f", struct.pack("<HH", 0, pattern & 0xFFFF))
    return value


def pattern_of(value: float) -> int:
    """Give the bit pattern of a bfloat16 value; 0x7FC0 for any NaN."""
    if math.isnan(value):
        return 0x7FC0
    return struct.unpack("<HH", struct.pack("<f", value))[1]


def q_rope_store(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """Do the op one element at a time.

    Parameters
    ----------
    q, output, freqs_cis, positions
        As the op. CPU only, valid arguments only.
    """
    source, target = q.view(torch.int16), output.view(torch.int16)
    for token, position in enumerate(positions.tolist()):
        rotations = [(value.real, value.imag) for value in freqs_cis[position].tolist()]
        for head in range(q.shape[1]):
            elements = source[token, head].tolist()
            for pair, (c, s) in enumerate(rotations):
                place = FIRST_ROTATED + 2 * pair
                x, y = map(value_of, elements[place : place + 2])
                elements[place : place + 2] = map(pattern_of, rotate(x, y, c, s))
            signed = [(pattern & 0xFFFF ^ 0x8000) - 0x8000 for pattern in elements]
            target[token, head] = torch.tensor(signed, dtype=torch.int16)
