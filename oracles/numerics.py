"""Every rounding and number format of the suite, written once in integer and float64 arithmetic.

The functions take tensors of any shape on any device and return new ones of that shape. They use
only operations whose bits are the same everywhere: integer arithmetic, comparisons, and single
IEEE operations in float64 (or one in float32). No cast to a narrow float type is trusted, because
those differ between versions and devices. Codes are uint8; a caller views them as a float8 type
where a signature asks for one.

Source of the rules: IEEE 754 (binary32, bfloat16 as its upper half, fused multiply-add) and the
OCP formats E4M3, E2M1 and UE8M0, with the scale rules of MXFP8, of the KV store and of FP4.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""
KV_AMAX_FLOOR = 1e-4
"""Smallest maximum that the KV store scales by, as float32."""

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_E4M3_MAX_BITS = 0x43E00000
_MAX_SCALE_CODE = 254
# The float32 nearest to the reciprocals, held as Python floats.
_ONE_448TH = torch.tensor(1.0 / 448.0, dtype=torch.float32).item()
_ONE_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, to nearest with ties to even, in one rounding.

    Parameters
    ----------
    x : torch.Tensor
        float32 or float64, any shape.

    Returns
    -------
    torch.Tensor
        bfloat16. What rounds beyond the largest finite value becomes inf; subnormals and the sign
        of zero are kept; a NaN becomes the quiet NaN 0x7FC0 with its sign.

    Raises
    ------
    ValueError
        If `x` has another dtype.
    """
    _require_dtype("x", x, torch.float32, torch.float64)
    if x.dtype == torch.float64:
        x = odd_float32(x)
    bits = _bits(x)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = ((bits >> 16) & 0x8000) | 0x7FC0
    upper = torch.where((bits & _MAGNITUDE) > _INF_BITS, quiet, upper)
    return _signed16(upper).view(torch.bfloat16)


def round_fp16(x: torch.Tensor) -> torch.Tensor:
    """Round float64 or float32 once to float16, to nearest even.

    Parameters
    ----------
    x : torch.Tensor
        float64 or float32, any shape.

    Returns
    -------
    torch.Tensor
        float16; subnormals kept, beyond the largest an infinity, NaN stays NaN.

    Raises
    ------
    ValueError
        If `x` is of another dtype.
    """
    _require_dtype("x", x, torch.float64, torch.float32)
    # A cast from float64 goes by way of float32 and would round twice.
    return (odd_float32(x) if x.dtype is torch.float64 else x).to(torch.float16)


def odd_float32(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 to odd, so that a second rounding to fewer digits is the only one.

    Parameters
    ----------
    x : torch.Tensor
        float64, any shape.

    Returns
    -------
    torch.Tensor
        float32: `x` where float32 holds it, else the neighbour whose last bit is 1.

    Raises
    ------
    ValueError
        If `x` is not float64.
    """
    _require_dtype("x", x, torch.float64)
    near = x.float()
    bits = _bits(near)
    towards = torch.where(near.double().abs() > x.abs(), bits - 1, bits + 1)
    inexact = torch.isfinite(near) & (near.double() != x) & ((bits & 1) == 0)
    # A zero that lost a sliver becomes the smallest subnormal, whose sign the bits already carry.
    bits = torch.where(inexact, towards, bits)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def widen_bf16(x: torch.Tensor) -> torch.Tensor:
    """Widen bfloat16 to float32 exactly, NaN payloads included.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16, any shape.

    Returns
    -------
    torch.Tensor
        float32 with the bits of `x` as its upper half.

    Raises
    ------
    ValueError
        If `x` is not bfloat16.
    """
    _require_dtype("x", x, torch.bfloat16)
    return (x.contiguous().view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute `a * b + c` with one rounding, as IEEE 754's fused multiply-add.

    The product of two float32 values is exact in float64. The sum is made exact by TwoSum and
    rounded to odd, which keeps enough of it that the last rounding, to float32, is the only one.

    Parameters
    ----------
    a, b, c : torch.Tensor
        float32, of shapes that broadcast.

    Returns
    -------
    torch.Tensor
        float32 of the broadcast shape.

    Raises
    ------
    ValueError
        If one of them is not float32.
    """
    for name, operand in (("a", a), ("b", b), ("c", c)):
        _require_dtype(name, operand, torch.float32)
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # Knuth's TwoSum: `error` is exactly what the float64 addition lost.
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    to_odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    inexact = torch.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    return torch.where(inexact, to_odd, bits).view(torch.float64).float()


def div32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Divide float32 by float32, correctly rounded.

    Float64 carries more than twice float32's digits, so that rounding the float64 quotient once
    more gives the float32 quotient; a float32 division by a scalar would not on every device.

    Parameters
    ----------
    a, b : torch.Tensor
        float32, of shapes that broadcast.

    Returns
    -------
    torch.Tensor
        float32 of the broadcast shape.

    Raises
    ------
    ValueError
        If one of them is not float32.
    """
    _require_dtype("a", a, torch.float32)
    _require_dtype("b", b, torch.float32)
    return (a.double() / b.double()).float()


def sqrt32(x: torch.Tensor) -> torch.Tensor:
    """Take the float32 square root, correctly rounded.

    Parameters
    ----------
    x : torch.Tensor
        float32, any shape.

    Returns
    -------
    torch.Tensor
        float32; the root of -0 is -0, of a negative value NaN.

    Raises
    ------
    ValueError
        If `x` is not float32.
    """
    _require_dtype("x", x, torch.float32)
    # A vectorised float64 root need not be correctly rounded on every host, so that its float32
    # neighbour may be taken: the squares of the two midpoints, exact in float64, decide.
    root = torch.sqrt(x.double()).float()
    normal = torch.isfinite(x) & (x > 0)
    bits = _bits(torch.where(normal, root, 1.0))
    below = (_float(bits - 1).double() + _float(bits).double()) / 2
    above = (_float(bits).double() + _float(bits + 1).double()) / 2
    bits = bits + (above * above < x.double()).long() - (below * below > x.double()).long()
    return torch.where(normal, _float(bits), root)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Give 2^exponent exactly: a vectorised `exp2` need not be exact on every host.

    Parameters
    ----------
    exponent : torch.Tensor
        int64, any shape.

    Returns
    -------
    torch.Tensor
        float64 of its shape; exponents are held within -1022..1023, the normal numbers.

    Raises
    ------
    ValueError
        If `exponent` is not int64.
    """
    _require_dtype("exponent", exponent, torch.int64)
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 (the finite variant), saturating at +-448.

    Parameters
    ----------
    x : torch.Tensor
        float32, any shape.

    Returns
    -------
    torch.Tensor
        uint8 codes: to nearest with ties to even, subnormals in steps of 2^-9, the sign of zero
        kept, +-inf as +-448, any NaN as 0x7F.

    Raises
    ------
    ValueError
        If `x` is not float32.
    """
    _require_dtype("x", x, torch.float32)
    bits = _bits(x)
    sign = (bits >> 24) & 0x80
    magnitude = bits & _MAGNITUDE
    clamped = magnitude.clamp(max=_E4M3_MAX_BITS)
    # Normal numbers: the upper 3 mantissa bits stay, the exponent bias goes from 127 to 7.
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the codes count steps of 2^-9 (torch.round takes ties to even).
    subnormal = torch.round(x.double().abs() * 2.0**9).clamp(max=8).nan_to_num().to(torch.int64)
    code = torch.where(clamped < (121 << 23), subnormal, normal) | sign
    return torch.where(magnitude > _INF_BITS, 0x7F, code).to(torch.uint8)


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """Give the value of E4M3 codes.

    Parameters
    ----------
    code : torch.Tensor
        uint8, any shape.

    Returns
    -------
    torch.Tensor
        float32, exact; NaN for 0x7F and 0xFF.

    Raises
    ------
    ValueError
        If `code` is not uint8.
    """
    _require_dtype("code", code, torch.uint8)
    wide = code.to(torch.int64)
    exponent, mantissa = (wide >> 3) & 15, wide & 7
    normal = _float(((exponent + 120) << 23) | (mantissa << 20))
    value = torch.where(exponent == 0, mantissa.float() * 2.0**-9, normal)
    value = torch.where((wide & 0x7F) == 0x7F, torch.nan, value)
    return torch.where(wide >= 0x80, -value, value)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1, whose magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, saturating at +-6.

    Parameters
    ----------
    x : torch.Tensor
        float32, any shape, no NaN (E2M1 has none).

    Returns
    -------
    torch.Tensor
        uint8 codes 0-15: bit 3 is the sign, also of a zero. Ties go to the even code.

    Raises
    ------
    ValueError
        If `x` is not float32 or holds a NaN.
    """
    _require_dtype("x", x, torch.float32)
    if torch.isnan(x).any():
        raise ValueError("x holds a NaN, which has no E2M1 code")
    a = x.abs()
    # One step up for each midpoint passed; the midpoint itself counts where the upper code is even.
    steps = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    code = torch.stack(steps).sum(dim=0)
    return (code | ((_bits(x) >> 28) & 8)).to(torch.uint8)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Give the value of E2M1 codes.

    Parameters
    ----------
    code : torch.Tensor
        uint8, any shape, 0-15.

    Returns
    -------
    torch.Tensor
        float32, exact; code 8 is -0.

    Raises
    ------
    ValueError
        If `code` is not uint8 or holds a value above 15.
    """
    _require_dtype("code", code, torch.uint8)
    if (code > 15).any():
        raise ValueError(f"code holds {int(code.max())}, E2M1 codes are 0-15")
    values = torch.tensor(_E2M1_VALUES, device=code.device)
    magnitude = values[(code & 7).to(torch.int64)]
    return torch.where(code >= 8, -magnitude, magnitude)


def amax_without_nan(x: torch.Tensor) -> torch.Tensor:
    """Give the largest magnitude along the last axis; a NaN takes no part.

    Parameters
    ----------
    x : torch.Tensor
        float32 `[..., n]`, n > 0.

    Returns
    -------
    torch.Tensor
        float32 `[...]`, +0 where all n are NaN, +inf where one is infinite.

    Raises
    ------
    ValueError
        If `x` is not float32 or has no last axis to reduce.
    """
    _require_dtype("x", x, torch.float32)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} has no last axis to reduce")
    return torch.where(torch.isnan(x), 0.0, x.abs()).amax(dim=-1)


def mxfp8_code(amax: torch.Tensor) -> torch.Tensor:
    """Choose the UE8M0 scale code of an MXFP8 block.

    With n = amax * (1/448) in float32, the code is n's exponent rounded up to a power of two:
    0 where n is not positive or at most 2^-127, never above 254.

    Parameters
    ----------
    amax : torch.Tensor
        float32, any shape, the block's largest magnitude; +inf is allowed.

    Returns
    -------
    torch.Tensor
        uint8 codes 0-254.

    Raises
    ------
    ValueError
        If `amax` is not float32 or holds a NaN (a block's NaN takes no part in its amax).
    """
    _require_amax(amax)
    n = amax * _ONE_448TH
    bits = _bits(n)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounds_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = (exponent + rounds_up).clamp(max=_MAX_SCALE_CODE)
    return torch.where(n > 0, code, 0).to(torch.uint8)


def mxfp8_multiplier(code: torch.Tensor) -> torch.Tensor:
    """Give what an MXFP8 block's elements are multiplied by before they are rounded to E4M3.

    Parameters
    ----------
    code : torch.Tensor
        uint8, any shape, 0-254.

    Returns
    -------
    torch.Tensor
        float32: 0 for code 0, else the value with exponent field 254 - code, thus 0 for 254.

    Raises
    ------
    ValueError
        If `code` is not uint8 or holds 255, which is the NaN of UE8M0.
    """
    return torch.where(code == 0, 0.0, kv_multiplier(code))


def kv_code(amax: torch.Tensor) -> torch.Tensor:
    """Choose the UE8M0 scale code of a block in the KV store.

    With x = max(amax, 1e-4) / 448 in float32, correctly rounded, the code is x's exponent rounded
    up to a power of two.

    Parameters
    ----------
    amax : torch.Tensor
        float32, any shape, the block's largest magnitude, finite.

    Returns
    -------
    torch.Tensor
        uint8 codes, 105 at least.

    Raises
    ------
    ValueError
        If `amax` is not float32 or holds a NaN or an infinity.
    """
    _require_amax(amax)
    if torch.isinf(amax).any():
        raise ValueError("amax holds an infinity, for which the KV store has no scale")
    floor = torch.tensor(KV_AMAX_FLOOR, device=amax.device)
    x = div32(torch.maximum(amax, floor), torch.tensor(448.0, device=amax.device))
    bits = _bits(x)
    return ((bits >> 23) + ((bits & 0x7FFFFF) > 0)).to(torch.uint8)


def kv_multiplier(code: torch.Tensor) -> torch.Tensor:
    """Give what a KV-store block's elements are multiplied by before they are rounded to E4M3.

    Parameters
    ----------
    code : torch.Tensor
        uint8, any shape, 0-254.

    Returns
    -------
    torch.Tensor
        float32: the value with exponent field 254 - code.

    Raises
    ------
    ValueError
        If `code` is not uint8 or holds 255, which is the NaN of UE8M0.
    """
    _require_dtype("code", code, torch.uint8)
    if (code == 255).any():
        raise ValueError("code holds 255, the NaN of UE8M0, which has no multiplier")
    return _float((254 - code.to(torch.int64)) << 23)


def scale_by_multiplier(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Scale a block's elements for E4M3, so that an infinity stays one and a NaN stays one.

    The infinities are selected before the multiply, because the multiplier of a block that holds
    one is 0 and inf * 0 would be a NaN.

    Parameters
    ----------
    x : torch.Tensor
        float32, the block's elements.
    multiplier : torch.Tensor
        float32, from `mxfp8_multiplier` or `kv_multiplier`, of a shape that broadcasts to `x`.

    Returns
    -------
    torch.Tensor
        float32, what `encode_e4m3` then rounds: +-inf gives the codes of +-448, NaN gives 0x7F.

    Raises
    ------
    ValueError
        If one of them is not float32.
    """
    _require_dtype("x", x, torch.float32)
    _require_dtype("multiplier", multiplier, torch.float32)
    return torch.where(torch.isinf(x), x, x * multiplier)


def fp4_scale(amax: torch.Tensor) -> torch.Tensor:
    """Choose the E4M3 scale of an FP4 group.

    Parameters
    ----------
    amax : torch.Tensor
        float32, any shape, the group's largest magnitude; +inf is allowed.

    Returns
    -------
    torch.Tensor
        float32: amax * (1/6) in float32, clamped to [2^-9, 448], rounded to E4M3.

    Raises
    ------
    ValueError
        If `amax` is not float32 or holds a NaN (a group's NaN takes no part in its amax).
    """
    _require_amax(amax)
    return decode_e4m3(encode_e4m3((amax * _ONE_SIXTH).clamp(2.0**-9, E4M3_MAX)))


def fake_fp4(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise to E2M1 under a scale and give the value back: "fake" FP4.

    The quotient x / scale is correctly rounded; adding +0 clears an exact -0 but not the sign of a
    small negative quotient, which therefore gives -0.

    Parameters
    ----------
    x : torch.Tensor
        float32, any shape.
    scale : torch.Tensor
        float32, positive, of a shape that broadcasts to `x`.

    Returns
    -------
    torch.Tensor
        float32: scale times an E2M1 value, exact also in bfloat16; +-inf saturates, NaN stays NaN.

    Raises
    ------
    ValueError
        If one of them is not float32.
    """
    quotient = div32(x, scale) + 0.0
    nan = torch.isnan(quotient)
    value = decode_e2m1(encode_e2m1(torch.where(nan, 0.0, quotient))) * scale
    return torch.where(nan, torch.nan, value)


def score_key(score: torch.Tensor) -> torch.Tensor:
    """Map scores to integers that compare as the scores do: -inf < finite < +inf < NaN.

    Both zeros get one key, and so does every NaN. An op that ranks NaN otherwise replaces it first.

    Parameters
    ----------
    score : torch.Tensor
        float32, any shape.

    Returns
    -------
    torch.Tensor
        int64 that holds a uint32: 0x007FFFFF for -inf, 0x80000000 for zero, 0xFF800000 for +inf,
        0xFFC00000 for NaN.

    Raises
    ------
    ValueError
        If `score` is not float32.
    """
    _require_dtype("score", score, torch.float32)
    bits = _bits(score)
    magnitude = bits & _MAGNITUDE
    bits = torch.where(magnitude == 0, 0, bits)
    bits = torch.where(magnitude > _INF_BITS, _NAN_BITS, bits)
    # Negative numbers: larger magnitude is smaller, so all bits flip. Others move above them.
    return torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))


def _require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")


def _require_amax(amax: torch.Tensor) -> None:
    _require_dtype("amax", amax, torch.float32)
    if torch.isnan(amax).any():
        raise ValueError("amax holds a NaN; leave a block's NaN out of its maximum")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Give float32 bits as int64 in 0..2^32-1, so that no integer step can overflow."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _float(bits: torch.Tensor) -> torch.Tensor:
    """Give the float32 of bits without a sign, from int64."""
    return bits.to(torch.int32).view(torch.float32)


def _signed16(bits: torch.Tensor) -> torch.Tensor:
    """Give 0..65535 the int16 of the same bits without relying on how a cast overflows."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
