"""Device helpers that round as the suite's rules say, on the GPU and under the interpreter alike.

A kernel calls these instead of casting. Triton's interpreter truncates where it casts float32 to
bfloat16, misreads bfloat16 subnormals and, in older versions, rounds `tl.fma` twice; there the
helpers compute in integers or float64. Where integer arithmetic is as fast as a conversion
instruction, which not every GPU has, one form serves everywhere.

All helpers work element by element on blocks or scalars of float32 unless they say otherwise. They
are not defined for launches with floating-point fusion on: launch with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.kernels import runtime

_INTERPRETED = tl.constexpr(runtime.INTERPRETED)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_E4M3_MAX_BITS = tl.constexpr(0x43E00000)
# 2^-6, the smallest normal E4M3 value.
_E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
# Added to a float32's exponent bits: a power of two whose last mantissa bit weighs as much as
# that of an E4M3 value with the same exponent.
_TO_E4M3_STEP = tl.constexpr(20 << 23)


@triton.jit
def float_bits(x):
    """Give the bits of float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """Give the float32 of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_nan(x):
    """Say where float32 is NaN, by an integer comparison that no compiler can simplify away."""
    return (float_bits(x) & _MAGNITUDE) > _INF_BITS


@triton.jit
def is_inf(x):
    """Say where float32 is +inf or -inf."""
    return (float_bits(x) & _MAGNITUDE) == _INF_BITS


@triton.jit
def round_bf16(x):
    """Round float32 to bfloat16, to nearest with ties to even; NaN gives a quiet NaN.

    Store the result as it is: a second cast would undo it under the interpreter.
    """
    if _INTERPRETED:
        bits = float_bits(x)
        # Arithmetic: -1 + 0x7FFF would be right too, so the sign needs no special treatment.
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(is_nan(x), 0x7FC0, upper)
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def widen_bf16(x):
    """Widen bfloat16 to float32, exactly."""
    if _INTERPRETED:
        return bits_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def fma32(a, b, c):
    """Compute a * b + c in float32 with one rounding; all three of one shape."""
    if _INTERPRETED:
        # The product is exact in float64; TwoSum and rounding to odd leave one rounding in all.
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = total.to(tl.int64, bitcast=True)
        to_odd = tl.where((error > 0) == (total > 0), bits + 1, bits - 1)
        finite = ((bits >> 52) & 0x7FF) != 0x7FF
        bits = tl.where(finite & (error != 0) & ((bits & 1) == 0), to_odd, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def div32(a, b):
    """Divide float32 by float32, correctly rounded, subnormals kept."""
    return tl.div_rn(a, b)


@triton.jit
def sqrt32(x):
    """Take the float32 square root, correctly rounded."""
    return tl.sqrt_rn(x)


@triton.jit
def magnitude_bits(x):
    """Give the bits of |x| as int32, 0 for NaN: a `tl.max` over them never meets a NaN.

    `bits_float` of that maximum is the block's amax, in which its NaNs take no part.
    """
    magnitude = float_bits(x) & _MAGNITUDE
    return tl.where(magnitude > _INF_BITS, 0, magnitude)


@triton.jit
def _e4m3_step(magnitude_bits):
    """Give, as float32 bits, the number whose last bit weighs one E4M3 step at this magnitude."""
    exponent = tl.maximum(magnitude_bits & _INF_BITS, _E4M3_NORMAL_BITS)
    return exponent + _TO_E4M3_STEP


@triton.jit
def encode_e4m3(x):
    """Round float32 to E4M3 and give the uint8 code, saturating at +-448; NaN gives 0x7F."""
    bits = float_bits(x)
    magnitude = bits & _MAGNITUDE
    clamped = tl.minimum(magnitude, _E4M3_MAX_BITS)
    step = _e4m3_step(clamped)
    # The float32 addition rounds to the E4M3 step; its low bits then count the steps.
    steps = float_bits(bits_float(clamped) + bits_float(step)) - step
    code = ((step - (_E4M3_NORMAL_BITS + _TO_E4M3_STEP)) >> 20) + steps
    code = code | ((bits >> 24) & 0x80)
    return tl.where(magnitude > _INF_BITS, 0x7F, code).to(tl.uint8)


@triton.jit
def round_e2m1(x):
    """Round float32 to the nearest E2M1 value as float32, saturating at +-6, ties to even.

    The sign stays, also that of a zero. NaN must be selected away by the caller.
    """
    bits = float_bits(x)
    magnitude = tl.minimum(bits & _MAGNITUDE, 0x40C00000)
    # 2^22, 2^23 and 2^24 have last bits of 0.5, 1 and 2: the E2M1 steps below 2, 4 and from 4 on.
    step = tl.where(magnitude < 0x40000000, 0x4A800000, 0x4B000000)
    step = bits_float(tl.where(magnitude < 0x40800000, step, 0x4B800000))
    rounded = (bits_float(magnitude) + step) - step
    return bits_float(float_bits(rounded) | (bits & ~_MAGNITUDE))


@triton.jit
def mxfp8_code(amax):
    """Choose the UE8M0 code, uint8, of an MXFP8 block with this amax (no NaN; +inf gives 254)."""
    bits = float_bits(amax * (1.0 / 448.0))
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # A subnormal up to half the smallest normal number keeps exponent 0.
    up = mantissa > tl.where(exponent == 0, 0x400000, 0)
    code = tl.minimum(exponent + up.to(tl.int32), 254)
    return tl.where(bits > 0, code, 0).to(tl.uint8)


@triton.jit
def mxfp8_multiplier(code):
    """Give the float32 that a block of this MXFP8 code is multiplied by; 0 for codes 0 and 254."""
    return tl.where(code == 0, 0.0, kv_multiplier(code))


@triton.jit
def kv_code(amax):
    """Choose the UE8M0 code, uint8, of a KV-store block with this amax (finite, no NaN)."""
    floored = tl.where(amax > 1e-4, amax, 1e-4)
    bits = float_bits(div32(floored, 448.0))
    up = (bits & 0x7FFFFF) > 0
    return ((bits >> 23) + up.to(tl.int32)).to(tl.uint8)


@triton.jit
def kv_multiplier(code):
    """Give the float32 that a block of this KV-store code is multiplied by."""
    return bits_float((254 - code.to(tl.int32)) << 23)


@triton.jit
def scale_by_multiplier(x, multiplier):
    """Scale elements for `encode_e4m3`: infinities pass (inf * 0 would be NaN), NaN stays NaN."""
    return tl.where(is_inf(x), x, x * multiplier)


@triton.jit
def fp4_scale(amax):
    """Choose the E4M3 scale, as float32, of an FP4 group with this amax (no NaN; inf gives 448)."""
    # Integer comparisons clamp to [2^-9, 448]; a positive float32 orders as its bits do.
    bits = float_bits(amax * (1.0 / 6.0))
    bits = tl.minimum(tl.maximum(bits, 0x3B000000), _E4M3_MAX_BITS)
    step = bits_float(_e4m3_step(bits))
    return (bits_float(bits) + step) - step


@triton.jit
def fake_fp4(x, scale):
    """Quantise float32 to E2M1 under its group's scale and give the value back; NaN stays NaN."""
    quotient = div32(x, scale) + 0.0
    return tl.where(is_nan(x), x, round_e2m1(quotient) * scale)


@triton.jit
def score_key(score):
    """Map float32 to uint32 that orders as scores do: both zeros alike, NaN above +inf."""
    bits = float_bits(score)
    magnitude = bits & _MAGNITUDE
    bits = tl.where(magnitude == 0, 0, bits)
    bits = tl.where(magnitude > _INF_BITS, _NAN_BITS, bits)
    # Flip all bits of a negative number, only the sign of another.
    flips = (bits >> 31) | (-_MAGNITUDE - 1)
    return (bits ^ flips).to(tl.uint32, bitcast=True)
