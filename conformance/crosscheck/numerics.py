"""The rounding rules once more, in scalar Python over exact fractions, to check the oracles' own.

Numbers are Python floats that hold float32 values exactly, zeros with their sign; codes are ints.
One function rounds for every format: it counts the format's steps in an exact fraction, by integer
division. Nothing here looks at the bits of a float.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple


class Format(NamedTuple):
    """A binary floating-point format: digits, exponent of the smallest normal, largest value."""

    digits: int
    smallest_exponent: int
    largest: float


FLOAT32 = Format(24, -126, (2 - 2.0**-23) * 2.0**127)
BFLOAT16 = Format(8, -126, (2 - 2.0**-7) * 2.0**127)
E4M3 = Format(4, -6, 448.0)
E2M1 = Format(2, 0, 6.0)


def _step_exponent(value: Fraction, to: Format) -> int:
    """Give the power of two that separates neighbours of a format at this magnitude."""
    exponent = to.smallest_exponent
    if value:
        # floor(log2 |value|): the bit lengths give it, or one more.
        numerator, denominator = abs(value.numerator), value.denominator
        exponent = numerator.bit_length() - denominator.bit_length()
        exponent -= numerator << max(-exponent, 0) < denominator << max(exponent, 0)
    return max(exponent, to.smallest_exponent) - to.digits + 1


def nearest(value: Fraction, to: Format) -> float:
    """Round to the nearest value of a format with no upper limit, ties to even."""
    places = -_step_exponent(value, to)
    numerator, denominator = value.as_integer_ratio()
    # value / step, as a fraction of integers.
    numerator, denominator = numerator << max(places, 0), denominator << max(-places, 0)
    steps, rest = divmod(numerator, denominator)
    steps += 2 * rest > denominator or (2 * rest == denominator and steps % 2 == 1)
    return math.ldexp(steps, -places)


def round_to(value: Fraction, to: Format, sign: float) -> float:
    """Round an exact value as IEEE 754 does; `sign` is that of a result of zero."""
    rounded = nearest(value, to)
    if abs(rounded) > to.largest:
        return math.copysign(math.inf, rounded)
    return math.copysign(rounded, rounded or sign)


def round_bf16(x: float) -> float:
    """Round to bfloat16."""
    return round_to(Fraction(x), BFLOAT16, x) if math.isfinite(x) else x


def round32(x: float) -> float:
    """Round a float64 to float32."""
    return round_to(Fraction(x), FLOAT32, x) if math.isfinite(x) else x


def fma32(a: float, b: float, c: float) -> float:
    """Compute a * b + c exactly, then round to float32."""
    # The product of two float32 is exact here, so this has the right sign of an exact zero, and
    # the right infinity or NaN where an operand is not finite.
    rough = a * b + c
    if not math.isfinite(rough):
        return rough
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return round_to(exact, FLOAT32, rough)


def multiply32(a: float, b: float) -> float:
    """Multiply in float32."""
    return fma32(a, b, math.copysign(0.0, a * b))


def div32(a: float, b: float) -> float:
    """Divide exactly, then round to float32."""
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if math.isinf(a) or b == 0:
        return math.nan if math.isinf(b) or a == 0 else math.copysign(math.inf, sign)
    if math.isinf(b):
        return math.copysign(0.0, sign)
    return round_to(Fraction(a) / Fraction(b), FLOAT32, sign)


def sqrt32(x: float) -> float:
    """Take the root in integers, then round to float32."""
    if not x > 0 or math.isinf(x):
        return math.nan if x < 0 else x
    # x is a multiple of 2^-298: an integer root of x * 2^(298 + 2k) has k + 149 binary places.
    places = 149 + 128
    square = int(Fraction(x) * 4**places)
    root = math.isqrt(square)
    # What the integer root cut off only matters as "a little more", far below any midpoint.
    exact = Fraction(2 * root + (root * root != square), 2)
    return round_to(exact / 2**places, FLOAT32, 1.0)


def decode_e4m3(code: int) -> float:
    """Give the value of an E4M3 code."""
    sign = -1.0 if code >= 128 else 1.0
    exponent, mantissa = divmod(code % 128, 8)
    if code % 128 == 127:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 512
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def decode_e2m1(code: int) -> float:
    """Give the value of an E2M1 code."""
    sign = -1.0 if code >= 8 else 1.0
    exponent, mantissa = divmod(code % 8, 2)
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


_ONE_448TH = div32(1.0, 448.0)
_ONE_SIXTH = div32(1.0, 6.0)
_E4M3_CODES = {decode_e4m3(code): code for code in range(127)}
_E2M1_CODES = {decode_e2m1(code): code for code in range(8)}


def encode_e4m3(x: float) -> int:
    """Round to E4M3, saturating, and give the code."""
    if math.isnan(x):
        return 0x7F
    return _E4M3_CODES[_saturate(x, E4M3)] + (128 if _negative(x) else 0)


def encode_e2m1(x: float) -> int:
    """Round to E2M1, saturating, and give the code."""
    return _E2M1_CODES[_saturate(x, E2M1)] + (8 if _negative(x) else 0)


def mxfp8_code(amax: float) -> int:
    """Give the code of the smallest power of two, 2^-127 at least, not below amax * (1/448)."""
    if math.isinf(amax):
        return 254
    return _power_code(multiply32(amax, _ONE_448TH))


def mxfp8_multiplier(code: int) -> float:
    """Give 1 / 2^(code - 127) where float32 has it as a normal number, else 0; 0 for code 0."""
    return 0.0 if code == 0 else kv_multiplier(code)


def kv_code(amax: float) -> int:
    """Give the code of the smallest power of two not below max(amax, 1e-4) / 448."""
    return _power_code(div32(max(amax, round32(1e-4)), 448.0))


def kv_multiplier(code: int) -> float:
    """Give 1 / 2^(code - 127) where float32 has it as a normal number, else 0."""
    return 2.0 ** (127 - code) if code <= 253 else 0.0


def fp4_scale(amax: float) -> float:
    """Give amax * (1/6) between 2^-9 and 448, in E4M3."""
    if math.isinf(amax):
        return 448.0
    sixth = multiply32(amax, _ONE_SIXTH)
    return decode_e4m3(encode_e4m3(min(max(sixth, 2.0**-9), 448.0)))


def fake_fp4(x: float, scale: float) -> float:
    """Give the nearest multiple of scale by an E2M1 value."""
    if math.isnan(x):
        return x
    quotient = div32(x, scale)
    if quotient == 0:
        return 0.0
    return decode_e2m1(encode_e2m1(quotient)) * scale


def score_key(score: float) -> int:
    """Give the key: 2^31 for zero, one more for each float32 above it, one less for each below."""
    if math.isnan(score):
        return 0xFFC00000
    if math.isinf(score):
        above = 255 * 2**23
    else:
        # Counting float32 values: 2^23 for each binade below, then steps within this one.
        exponent = _step_exponent(Fraction(score), FLOAT32)
        above = (exponent + 149) * 2**23 + int(math.ldexp(abs(score), -exponent))
    # The negative numbers start one lower, because -0 has no key of its own.
    return 2**31 - 1 - above if score < 0 else 2**31 + above


def _saturate(x: float, to: Format) -> float:
    if math.isinf(x):
        return to.largest
    return min(nearest(Fraction(abs(x)), to), to.largest)


def _power_code(n: float) -> int:
    """Give 127 + ceil(log2(n)), between 0 and 254."""
    if n <= 0:
        return 0
    mantissa, exponent = math.frexp(n)
    return max(0, min(254, 127 + exponent - (mantissa == 0.5)))


def _negative(x: float) -> bool:
    return math.copysign(1.0, x) < 0
