"""Second oracle of `c2_decode` and `c2_verify`: a row after another, an element after another.

Products, sums and quotients are exact fractions; exp and the square root have 60 digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.crosscheck.numerics import (
    BFLOAT16,
    encode_e4m3,
    fake_fp4,
    fp4_scale,
    kv_code,
    kv_multiplier,
    multiply32,
    round_to,
)
from draftproof.conformance.crosscheck.q_rope_store import pattern_of, rotate, value_of

DIGITS = Context(prec=60, Emin=-(10**9), Emax=10**9)


def pooled(kv0: float, s0: float, kv1: float, s1: float) -> float:
    """Pool two elements, and round to bf16."""
    if math.isnan(s0) or math.isnan(s1) or (math.isinf(s0) and s0 == s1):
        return math.nan
    infinite = math.isinf(s0) or math.isinf(s1)
    distance = Fraction(0) if infinite else abs(Fraction(s0) - Fraction(s1))
    # What lies farther apart than this weighs nothing, whatever fp32 its kv is.
    far = infinite or distance > 1000
    e = Fraction(0) if far else Fraction(DIGITS.exp(DIGITS.divide(
        Decimal(-distance.numerator), Decimal(distance.denominator))))  # fmt: skip
    larger, smaller = (kv0, kv1) if s0 >= s1 else (kv1, kv0)
    if not (math.isfinite(larger) and math.isfinite(smaller)):
        # Adding and multiplying as IEEE 754 does: the weight only counts by its being 0.
        return larger + smaller * (0.0 if far else 1.0)
    exact = (Fraction(larger) + Fraction(smaller) * e) / (1 + e)
    # Of zeros of one sign the sum has it; what rounds to zero keeps its own.
    zero = larger + math.copysign(0.0, smaller)
    return round_to(exact, BFLOAT16, math.copysign(1.0, exact if exact else zero))


def latent(x: Sequence[float], weight: Sequence[float], eps: float) -> list[float]:
    """Normalise a row of bf16 values, as bf16 values."""
    if any(map(math.isnan, x)):
        return [math.nan] * len(x)
    if any(map(math.isinf, x)):
        # The root mean square is infinite.
        return [(math.nan if math.isinf(v) else math.copysign(0.0, v)) * w
                for v, w in zip(x, weight, strict=True)]  # fmt: skip
    mean = sum((Fraction(v) ** 2 for v in x), Fraction(0)) / len(x) + Fraction(eps)
    root = DIGITS.sqrt(DIGITS.divide(Decimal(mean.numerator), Decimal(mean.denominator)))
    row = []
    for v, w in zip(x, weight, strict=True):
        if not math.isfinite(w):
            row.append(v * w)
            continue
        exact = Fraction(v) * Fraction(w) / Fraction(root)
        row.append(round_to(exact, BFLOAT16, math.copysign(1.0, v) * math.copysign(1.0, w)))
    return row


def token(row: Sequence[float], rotation: Sequence[float]) -> tuple[bytes, bytes]:
    """Make the 576 data bytes and the 7 codes of a latent."""
    turned = list(row[:448])
    for pair in range(32):
        x, y = row[448 + 2 * pair : 450 + 2 * pair]
        turned += rotate(x, y, *rotation[2 * pair : 2 * pair + 2])
    values: list[float] = []
    for at in range(0, 512, 16):
        group = turned[at : at + 16]
        scale = fp4_scale(_amax(group))
        values += [fake_fp4(v, scale) for v in group]
    data, codes = bytearray(), bytearray()
    for at in range(0, 448, 64):
        tile = values[at : at + 64]
        code = kv_code(_amax(tile))
        data += bytes(encode_e4m3(multiply32(v, kv_multiplier(code))) for v in tile)
        codes.append(code)
    for v in values[448:]:
        data += pattern_of(v).to_bytes(2, "little")
    return bytes(data), bytes(codes)


def c2_decode(*args: Any, **kwargs: Any) -> None:
    """Do the op a row at a time.

    Parameters
    ----------
    *args, **kwargs
        As the op. CPU only, valid arguments only.
    """
    c2_verify(*args, **kwargs, draft_len=1)


def c2_verify(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    raw_out_loc: Tensor,
    freqs_cis: Tensor,
    k_cache: Tensor,
    *,
    eps: float,
    page_size: int,
    ring_size: int,
    draft_len: int,
    out: Tensor,
) -> None:
    """Do the op a row at a time; parameters as the op, CPU only, valid arguments only."""
    weight = [value_of(pattern) for pattern in norm_weight.view(torch.int16).tolist()]
    for row, raw in enumerate(raw_out_loc.tolist()):
        position, ring = int(positions[row]), int(req[row]) * ring_size
        if raw == 0:
            continue
        if position % 2 == 0:
            kv_state[ring + position % ring_size] = kv_input[row]
            continue
        before = (
            kv_input[row - 1] if row % draft_len else kv_state[ring + (position - 1) % ring_size]
        )
        kv0, s0 = before[:512].tolist(), before[512:].tolist()
        kv1, s1 = kv_input[row, :512].tolist(), kv_input[row, 512:].tolist()
        x = [pooled(*element) for element in zip(kv0, s0, kv1, s1, strict=True)]
        made = latent(x, weight, eps)
        patterns = [(pattern_of(v) ^ 0x8000) - 0x8000 for v in made]
        out.view(torch.int16)[row] = torch.tensor(patterns, dtype=torch.int16)
        data, codes = token(made, freqs_cis[position - 1].tolist())
        page, index = divmod(raw // 2, page_size)
        line = k_cache[page]
        line[index * 576 : index * 576 + 576] = torch.tensor(list(data), dtype=torch.uint8)
        first = page_size * 576 + index * 8
        line[first : first + 7] = torch.tensor(list(codes), dtype=torch.uint8)


def _amax(values: Sequence[float]) -> float:
    return max((abs(v) for v in values if not math.isnan(v)), default=0.0)
