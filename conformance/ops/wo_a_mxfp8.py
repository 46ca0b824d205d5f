"""What `wo_a_mxfp8` and its parts must do, as data: exact sums, random ones, formats' edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.judges import Look, differing, show
from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    BenchPoint,
    Case,
    Effect,
    OpSpec,
    Params,
)
from draftproof.oracles import mxfp8
from draftproof.oracles import wo_a_mxfp8 as oracle
from draftproof.oracles.numerics import encode_e4m3, mxfp8_code, power_of_two, round_bf16

OPS = ("wo_a_mxfp8", "wo_a", "wo_a_partials", "quantize_partials")

SPLITS = oracle.SPLITS
BLOCK = mxfp8.BLOCK

SPECIALS = {
    "0": 0x0000,
    "-0": 0x8000,
    "tiny": 0x0001,
    "-tiny": 0x8001,
    "subnormal_max": 0x007F,
    "normal_min": 0x0080,
    "2.8e-36": 0x046E,
    "1": 0x3F80,
    "448": 0x43E0,
    "2^60": 0x5D80,
    "inf": 0x7F80,
    "-inf": 0xFF80,
    "nan": 0x7FC0,
    "-nan": 0xFFC0,
    "signalling_nan": 0x7F81,
}
"""bf16 bit patterns by name."""

SCALE_STEPS = range(-130, 120, 7)
"""Exponents k at which an amax of 448 * 2^k and its neighbours are tried."""

CANCELLING = (1e8, 1.0, -1e8, 1.0, 3.0, 2.0**-30, -4.0, 0.25)
"""Partial sums whose order shows: from the left, the first four give 1 and all eight give 0.25."""

NONFINITE = ("nonfinite",)


# ---------------------------------------------------------------- building a call


def _params(
    rows: int,
    groups: int,
    width: int,
    depth: int,
    content: str,
    *,
    gap: int = 0,
    row_stride: int | None = None,
    pokes: Sequence[Sequence[Any]] = (),
) -> dict[str, Any]:
    """Params of a projection.

    Parameters
    ----------
    content : str
        A key of `CONTENTS`, or of `VALUES`: then each row of x selects one column of D, and the
        weights there are those values, so that they are the rows y.
    gap : int
        Elements between the rows of x.
    row_stride : int, optional
        The stride itself, where memory between rows is to stay untouched.
    pokes : sequence of (argument, index, index, index, special)
    """
    return {
        "rows": rows,
        "groups": groups,
        "width": width,
        "depth": depth,
        "content": content,
        "gap": gap,
        "row_stride": row_stride,
        "pokes": [list(poke) for poke in pokes],
    }


def build(params: Params, seed: int) -> Args:
    """Make one call of the projection on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups, depth = params["rows"], params["groups"], params["depth"]
    x, weight = _content(params, generator)
    row_stride = params["row_stride"] or groups * depth + params["gap"]
    room = torch.empty((rows - 1) * row_stride + groups * depth, dtype=torch.bfloat16)
    laid = room.as_strided((rows, groups, depth), (row_stride, depth, 1))
    laid.copy_(x)
    args = {"x": laid, "weight": weight}
    for name, i, j, k, special in params["pokes"]:
        tensor = args[name]
        at = (i % tensor.shape[0], j % tensor.shape[1], k % tensor.shape[2])
        tensor.view(torch.int16)[at] = _signed16(SPECIALS[special])
    return args


def _content(params: Params, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, groups, width, depth = (params[name] for name in ("rows", "groups", "width", "depth"))
    content = params["content"]
    if content in CONTENTS:
        make_x, make_weight = CONTENTS[content]
        return make_x((rows, groups, depth), generator), make_weight(
            (groups, width, depth), generator
        )
    x = torch.zeros(rows, groups, depth)
    weight = _integers((groups, width, depth), generator)
    # No two rows, and no two groups, select the same column where there are enough.
    first = int(torch.randint(depth, (), generator=generator))
    for t in range(rows):
        for g in range(groups):
            d = (first + (t * groups + g) * 5) % depth
            x[t, g, d] = 1.0
            values = VALUES[content](groups * width, generator)
            weight[g, :, d] = values[g * width : (g + 1) * width]
    return x.bfloat16(), weight


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-8, 9, shape, generator=generator).bfloat16()


def _powers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    exponent = torch.randint(-3, 4, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * power_of_two(exponent)).bfloat16()


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def _small_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) / 64).bfloat16()


def _positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # All terms of one sign: what a truncating unit loses adds up.
    return torch.rand(shape, generator=generator).bfloat16()


def _first_of_each_split(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.zeros(shape)
    x[:, :, :: shape[2] // SPLITS] = 1.0
    return x.bfloat16()


def _cancelling_splits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    weight = _integers(shape, generator)
    # Every column starts elsewhere in the list, so that every split holds every value.
    turn = torch.arange(shape[1])[:, None] + torch.arange(SPLITS)
    weight[:, :, :: shape[2] // SPLITS] = torch.tensor(CANCELLING)[turn % SPLITS].bfloat16()
    return weight


def _without_first_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # Every second row of zeros, between rows that are not.
    x = _integers(shape, generator)
    x[::2] = 0
    return x


CONTENTS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "integers": (_integers, _integers),
    "powers": (_powers, _powers),
    "zeros": (_zeros, _integers),
    "zero_rows": (_without_first_rows, _integers),
    "cancelling": (_first_of_each_split, _cancelling_splits),
    "normal": (_normal, _small_normal),
    "positive": (_positive, _positive),
}
"""Makers of x and of the weight. All but the last two give sums that are exact in any order."""

RANDOM = ("normal", "positive")


def _signed16(bits: int) -> int:
    return bits - (1 << 16) if bits >> 15 else bits


def _from_bits(bits: Tensor) -> Tensor:
    """bf16 of integers 0 to 65535."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def _finite_bits(count: int, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 0x7F80, (count,), generator=generator)
    return bits | torch.randint(0, 2, (count,), generator=generator) << 15


def _spread(count: int, generator: torch.Generator) -> Tensor:
    """Values within one block's reach of each other, so that few round to 0."""
    exponent = 124 + torch.randint(0, 8, (count,), generator=generator)
    bits = exponent << 7 | torch.randint(0, 128, (count,), generator=generator)
    return _from_bits(bits | torch.randint(0, 2, (count,), generator=generator) << 15)


def _anything_finite(count: int, generator: torch.Generator) -> Tensor:
    return _from_bits(_finite_bits(count, generator))


def _subnormals(count: int, generator: torch.Generator) -> Tensor:
    """Blocks whose amax is at most 2.8e-36: subnormals, and where the code becomes 1 or 2."""
    bits = torch.randint(0, 0x80, (count,), generator=generator)
    tops = torch.tensor([0x0001, 0x007F, 0x0080, 0x045F, 0x0460, 0x0461, 0x046E, 0x04E0, 0x04E1])
    bits[::BLOCK] = tops[torch.arange(len(bits[::BLOCK])) % len(tops)]
    bits[1::BLOCK] = bits[::BLOCK]
    return _from_bits(bits | torch.randint(0, 2, (count,), generator=generator) << 15)


def _amax_at_448(count: int, generator: torch.Generator) -> Tensor:
    """Blocks whose amax is 448 * 2^k, the bf16 below it, or the one above it."""
    tops = [0x43E0 + (k << 7) + by for k in SCALE_STEPS for by in (-1, 0, 1)]
    top = torch.tensor(tops)[
        (torch.arange(-(-count // BLOCK)) + int(torch.randint(len(tops), (), generator=generator)))
        % len(tops)
    ].repeat_interleave(BLOCK)[:count]
    # The others lie within 16 binades below the top.
    bits = top - torch.randint(1, 2048, (count,), generator=generator)
    place = torch.randint(BLOCK, (-(-count // BLOCK),), generator=generator)
    at = torch.arange(0, count, BLOCK) + place
    bits[at] = top[at]
    return _from_bits(bits.clamp(min=0) | torch.randint(0, 2, (count,), generator=generator) << 15)


def _one_huge(count: int, generator: torch.Generator) -> Tensor:
    values = _spread(count, generator)
    values[5::BLOCK] = _from_bits(torch.tensor(0x7F7F))
    values[6::BLOCK] = _from_bits(torch.tensor(0xFE80))
    return values


def _with_nonfinite(count: int, generator: torch.Generator) -> Tensor:
    """Blocks with NaN alone, infinities alone, both, one finite value beside NaN, and numbers."""
    values = _spread(count, generator)
    blocks = torch.arange(count) // BLOCK % 6
    place = torch.arange(count) % BLOCK
    specials = {name: _from_bits(torch.tensor(bits)) for name, bits in SPECIALS.items()}
    values[blocks == 0] = specials["nan"]
    values[(blocks == 1) & (place == 3)] = specials["-inf"]
    values[(blocks == 1) & (place == 30)] = specials["inf"]
    values[(blocks == 2) & (place % 2 == 1)] = specials["-nan"]
    values[(blocks == 2) & (place == 8)] = specials["inf"]
    values[(blocks == 3) & (place != 17)] = specials["signalling_nan"]
    values[(blocks == 4) & (place == 31)] = specials["nan"]
    return values


VALUES: Mapping[str, Callable[[int, torch.Generator], Tensor]] = {
    "selected": _spread,
    "anything_finite": _anything_finite,
    "subnormals": _subnormals,
    "amax_at_448": _amax_at_448,
    "one_huge": _one_huge,
}
"""bf16 values of a row, by name."""


def build_partials(params: Params, seed: int) -> Args:
    """Make one call of `quantize_partials` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    splits, rows, groups, width = (params[name] for name in ("splits", "rows", "groups", "width"))
    shape = (splits, rows, groups, width)
    count = rows * groups * width
    content = params["content"]
    if content == "noise":
        partials = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        partials = partials.view(torch.float32)
    elif content == "normal":
        partials = torch.randn(shape, generator=generator)
    elif content == "cancelling":
        turn = torch.arange(count) + torch.arange(splits)[:, None]
        partials = torch.tensor(CANCELLING)[turn % len(CANCELLING)].reshape(shape)
    else:
        # The last splits hold all; -0 before them leaves every value its sign.
        partials = torch.full(shape, -0.0)
        partials[-1] = _fp32_rows(content, count, generator).reshape(shape[1:])
    partials = partials.contiguous()
    for *at, bits in params["pokes"]:
        index = tuple(i % n for i, n in zip(at, shape, strict=True))
        if partials.numel():
            partials.view(torch.int32)[index] = bits - (1 << 32) if bits >> 31 else bits
    return {"partials": partials}


def _fp32_rows(content: str, count: int, generator: torch.Generator) -> Tensor:
    if content == "every_bf16":
        return _from_bits(torch.arange(count) % 65536).float()
    if content == "nonfinite":
        return _with_nonfinite(count, generator).float()
    if content == "bf16_ties":
        # Half way between two bf16, and the fp32 on either side.
        bits = _spread(count, generator).float().view(torch.int32)
        bits = bits | 0x8000
        return (bits + torch.randint(-1, 2, (count,), generator=generator).int()).view(
            torch.float32
        )
    return VALUES[content](count, generator).float()


def _partials_params(
    splits: int,
    rows: int,
    groups: int,
    width: int,
    content: str,
    pokes: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """Params of `quantize_partials`; a poke is an index of four and fp32 bits."""
    return {
        "splits": splits,
        "rows": rows,
        "groups": groups,
        "width": width,
        "content": content,
        "pokes": [list(poke) for poke in pokes],
    }


# ---------------------------------------------------------------- judges


class _Bounds:
    """The intervals of the last call that was judged, since several parts ask for them."""

    def __init__(self) -> None:
        self.of: tuple[Any, ...] = ()
        self.y: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(self, before: Args) -> tuple[Tensor, Tensor]:
        x, weight = before["x"], before["weight"]
        now = (x, weight, x._version, weight._version)
        if (
            len(self.of) != len(now)
            or any(a is not b for a, b in zip(self.of[:2], now[:2], strict=True))
            or (self.of[2:] != now[2:])
        ):
            self.y = oracle.y_bounds(x, weight)
            self.of = now
        return self.y


_y_bounds = _Bounds()


def _settled(lower: Tensor, upper: Tensor) -> Tensor:
    """Where no rounding of the sums can make a difference, so that bits are due.

    Not where the sum is zero, whose sign is free.
    """
    return (torch.isnan(lower) & torch.isnan(upper)) | ((lower == upper) & (lower != 0))


def _blocks(y: Tensor) -> Tensor:
    return y.reshape(y.shape[0], -1, BLOCK)


def settled_y(before: Args) -> Tensor:
    """Rows y that are the same for every correct summation."""
    return _settled(*_y_bounds(before))


def settled_data(before: Args) -> Tensor:
    """Data that are the same for every correct summation: element and scale are settled."""
    lower, upper = (_blocks(end) for end in _y_bounds(before))
    least, greatest = (_amax_code(end) for end in oracle.amax_of(lower, upper))
    return (_settled(lower, upper) & (least == greatest)[..., None]).flatten(1)


def settled_partials(before: Args) -> Tensor:
    """Partial sums that are the same for every correct summation."""
    return _settled(*oracle.partial_bounds(before["x"], before["weight"]))


def is_padding(before: Args) -> Tensor:
    """Where in the swizzled scales no block's code stands."""
    rows, columns = len(before["x"]), before["weight"].shape[0] * before["weight"].shape[1]
    return mxfp8.swizzle(torch.ones(rows, columns // BLOCK, dtype=torch.uint8)) == 0


def _partial_ends(before: Args, got: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return oracle.partial_bounds(before["x"], before["weight"])


def _y_ends(before: Args, got: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return _y_bounds(before)


def _data_ends(before: Args, got: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    lower, upper = _y_bounds(before)
    return oracle.scaled_by(lower, upper, got["return.scales"].to(lower.device))


def _code_ends(before: Args, got: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    lower, upper = (_blocks(end) for end in _y_bounds(before))
    laid = []
    for end in oracle.amax_of(lower, upper):
        buffer = end.new_zeros(mxfp8.swizzled_length(*end.shape))
        buffer[mxfp8.swizzled_places(*end.shape).to(end.device)] = end
        laid.append(buffer)
    return laid[0], laid[1]


def _amax_code(amax: Tensor) -> Tensor:
    return mxfp8_code(amax.float())


def _e4m3(scaled: Tensor) -> Tensor:
    return encode_e4m3(scaled.float()).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class SettledOrWithin:
    """Bits where every correct summation gives the same; elsewhere between two rounded bounds.

    Parameters
    ----------
    settled : callable
        `settled(before) -> bool Tensor` of the leaf's shape.
    ends : callable
        `ends(before, got_all) -> (lower, upper)` in float64: what the budget of the sums allows,
        given what else was emitted. Where both are NaN the element must be NaN, elsewhere not; a
        zero of either sign is the same point.
    rounding : callable
        `rounding(float64 Tensor) -> Tensor` of the leaf's type, monotone.
    """

    settled: Callable[[Args], Tensor]
    ends: Callable[[Args, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
    rounding: Callable[[Tensor], Tensor]

    def bounds(self, look: Look) -> tuple[Tensor, Tensor]:
        """Both bounds, rounded."""
        lower, upper = self.ends(look.before, look.got_all)
        device = look.got.device
        return self.rounding(lower).to(device), self.rounding(upper).to(device)

    def wrong(self, look: Look) -> Tensor:
        settled = self.settled(look.before).to(look.got.device)
        lower, upper = (end.double() for end in self.bounds(look))
        got = look.got.double()
        inside = torch.where(
            torch.isnan(lower) & torch.isnan(upper),
            torch.isnan(got),
            (got >= lower) & (got <= upper),
        )
        return torch.where(settled, differing(look.wanted, look.got, any_nan=True), ~inside)

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        if bool(self.settled(look.before)[index]):
            return show(look.wanted[index])
        lower, upper = self.bounds(look)
        return f"between {show(lower[index])} and {show(upper[index])}"


DATA_RULE = "data are E4M3 of y times the multiplier of the emitted scale; NaN is 0x7F"
SCALE_RULE = (
    "a block's scale is the UE8M0 code of its amax, at its place in the 128x4 swizzle; where no "
    "block stands the byte is 0"
)
Y_RULE = "y is the bf16 of the partial sums added in fp32 from the first split to the last"
PARTIAL_RULE = "partials[s] is the fp32 sum of x * weight over the s-th eighth of D"

FUSED_EFFECTS = (
    Effect("return.data", DATA_RULE, SettledOrWithin(settled_data, _data_ends, _e4m3)),
    Effect("return.scales", SCALE_RULE, SettledOrWithin(is_padding, _code_ends, _amax_code)),
)
Y_EFFECTS = (Effect("return", Y_RULE, SettledOrWithin(settled_y, _y_ends, round_bf16)),)
PARTIAL_EFFECTS = (
    Effect("return", PARTIAL_RULE, SettledOrWithin(settled_partials, _partial_ends, Tensor.float)),
)
QUANTIZE_EFFECTS = (Effect("return.data", DATA_RULE), Effect("return.scales", SCALE_RULE))


# ---------------------------------------------------------------- cases

_EVERY = ("eager", "guards", "poison", "strided", "graph", "repeat")


def _case(name: str, params: Params, *checks: str, **more: Any) -> Case:
    return Case(name, params, checks=checks or ("eager", "graph"), **more)


def _projection_cases() -> list[Case]:
    """Cases of the fused op; its parts get those that concern them."""
    cases = [
        # The smallest depth: splits of one column. One block a row.
        _case("splits_of_one_column", _params(1, 1, 32, 8, "integers"), *_EVERY),
        *(
            _case(f"rows_{rows}", _params(rows, 2, 48, 16, "integers"), *checks)
            for rows, checks in (
                (1, ()),
                (2, _EVERY),
                (3, ()),
                (4, ()),
                (5, ()),
                (6, ()),
                (7, ()),
                (8, _EVERY),
            )
        ),
        # Depths that no block divides, and whole blocks of 128 (the form without masks).
        _case("splits_of_25_columns", _params(3, 1, 32, 200, "integers"), "eager", "guards"),
        _case("splits_of_129_columns", _params(2, 1, 32, 1032, "integers"), "eager", "guards"),
        _case("splits_of_128_columns", _params(5, 2, 128, 1024, "integers"), *_EVERY),
        _case("splits_of_256_columns", _params(8, 1, 128, 2048, "powers"), "eager", "strided"),
        # K = 96: three groups, so that a tile of four has a column of padding.
        _case("columns_96", _params(4, 3, 32, 24, "integers"), *_EVERY),
        _case("columns_160", _params(6, 5, 32, 16, "integers"), "eager", "guards"),
        # Blocks of 32 columns run over the ends of groups.
        _case("width_of_one", _params(2, 32, 1, 16, "integers")),
        _case("width_of_16", _params(3, 6, 16, 24, "integers")),
        _case("width_of_66", _params(2, 16, 66, 8, "integers"), "eager", "guards"),
        _case("width_of_192", _params(2, 1, 192, 1024, "integers"), "eager", "guards"),
        _case("powers_of_two", _params(7, 2, 32, 128, "powers")),
        _case("rows_are_slices", _params(4, 2, 32, 64, "integers", gap=64), *_EVERY),
        _case("rows_are_odd_slices", _params(3, 2, 64, 1024, "integers", gap=3), "eager"),
        # Row times stride passes 2^31 elements at the third row.
        _case(
            "x_rows_past_2_31",
            _params(3, 1, 32, 16, "integers", row_stride=2**30 + 8),
            "eager",
        ),
        _case("selected_rows", _params(8, 2, 64, 16, "selected"), *_EVERY),
        _case("anything_finite", _params(3, 2, 160, 16, "anything_finite")),
        _case("amax_at_448_times_powers", _params(1, 2, 1728, 8, "amax_at_448")),
        _case("subnormals", _params(2, 3, 96, 16, "subnormals")),
        _case("one_huge_element", _params(5, 2, 64, 40, "one_huge")),
        _case("zeros", _params(2, 2, 32, 64, "zeros"), *_EVERY),
        _case("rows_of_zeros", _params(5, 2, 32, 64, "zero_rows")),
        _case("partials_cancel", _params(4, 2, 48, 24, "cancelling"), "eager", "graph", "repeat"),
        _case("partials_cancel_unmasked", _params(8, 1, 128, 1024, "cancelling")),
        _case(
            "nan_in_x",
            _params(
                4, 2, 48, 64, "integers", pokes=[("x", 1, 0, 9, "nan"), ("x", 2, 1, 63, "-nan")]
            ),
            tags=NONFINITE,
        ),
        _case(
            "infinity_in_x",
            _params(
                4, 2, 48, 64, "integers", pokes=[("x", 1, 0, 9, "inf"), ("x", 3, 1, 63, "-inf")]
            ),
            tags=NONFINITE,
        ),
        _case(
            "infinity_in_a_weight",
            _params(
                3, 1, 64, 64, "integers",
                pokes=[("weight", 0, 40, 1, "inf"), ("weight", 0, 3, 7, "-inf")],
            ),
            tags=NONFINITE,
        ),
        _case(
            "infinities_meet_over_splits",
            _params(
                2, 1, 32, 64, "positive", pokes=[("x", 0, 0, 1, "inf"), ("x", 0, 0, 60, "-inf")]
            ),
            tags=NONFINITE,
        ),
        _case(
            "nan_in_a_weight",
            _params(
                3, 1, 64, 64, "integers",
                pokes=[("weight", 0, 40, 1, "nan"), ("weight", 0, 3, 7, "signalling_nan")],
            ),
            tags=NONFINITE,
        ),
        _case("random", _params(6, 2, 64, 256, "normal"), *_EVERY),
        _case("random_unmasked", _params(2, 2, 128, 1024, "normal"), "eager", "repeat"),
        _case("random_of_one_sign", _params(4, 1, 96, 808, "positive"), "eager"),
        _case("production_of_integers", _params(6, 2, 1024, 4096, "integers"), "eager", "graph"),
        *(
            _case(
                f"production_{rows}_rows",
                _params(rows, 2, 1024, 4096, "normal"),
                "eager",
                profile="full",
            )
            for rows in range(1, 9)
        ),
        _case(
            "production_of_one_sign",
            _params(8, 2, 1024, 4096, "positive"),
            "eager",
            profile="full",
        ),
    ]  # fmt: skip
    return cases


PARTS_RUN = {
    "wo_a": {
        "splits_of_one_column",
        "rows_1",
        "rows_8",
        "splits_of_25_columns",
        "splits_of_128_columns",
        "width_of_one",
        "rows_are_slices",
        "anything_finite",
        "subnormals",
        "partials_cancel",
        "infinities_meet_over_splits",
        "nan_in_a_weight",
        "random",
        "production_8_rows",
    },
    "wo_a_partials": {
        "splits_of_one_column",
        "rows_1",
        "rows_8",
        "splits_of_25_columns",
        "splits_of_128_columns",
        "splits_of_129_columns",
        "width_of_66",
        "rows_are_slices",
        "anything_finite",
        "zeros",
        "partials_cancel",
        "infinity_in_x",
        "random",
        "random_of_one_sign",
        "production_8_rows",
    },
}
"""The projection's cases that concern what the parts do on the way."""


def _part_cases(op: str) -> list[Case]:
    return [case for case in _projection_cases() if case.name in PARTS_RUN[op]]


def _quantize_cases() -> list[Case]:
    nan, inf, minus_inf = 0x7F800001, 0x7F800000, 0xFF800000
    return [
        _case("one_block", _partials_params(8, 1, 1, 32, "normal"), *_EVERY),
        _case("no_rows", _partials_params(8, 0, 1, 32, "normal"), "eager", noop=True),
        _case("one_split", _partials_params(1, 3, 1, 64, "normal"), *_EVERY),
        _case("two_splits", _partials_params(2, 2, 2, 48, "normal")),
        _case("seven_splits", _partials_params(7, 3, 3, 32, "normal"), "eager", "guards"),
        _case("nine_splits", _partials_params(9, 3, 5, 32, "normal"), *_EVERY),
        _case("columns_of_96", _partials_params(8, 8, 3, 32, "normal"), *_EVERY),
        _case("columns_of_2080", _partials_params(8, 2, 1, 2080, "normal"), "eager", "guards"),
        # One tile of rows, one less, one more, and two.
        *(
            _case(
                f"tile_rows_{rows}",
                _partials_params(1, rows, 1, 32 * groups, "normal"),
                "eager",
                profile=profile,
            )
            for rows, groups, profile in (
                (33, 4, "quick"),
                (97, 1, "full"),
                (127, 3, "full"),
                (128, 4, "full"),
                (129, 5, "quick"),
                (257, 1, "full"),
            )
        ),
        _case("partials_cancel_in_order", _partials_params(8, 4, 2, 48, "cancelling")),
        _case("four_partials_cancel", _partials_params(4, 1, 1, 64, "cancelling")),
        _case("every_bf16_value", _partials_params(1, 16, 4, 1024, "every_bf16"), tags=NONFINITE),
        _case("ties_of_bf16", _partials_params(8, 4, 2, 256, "bf16_ties")),
        _case("spread_values", _partials_params(8, 8, 2, 256, "selected"), "eager", "repeat"),
        _case("finite_values", _partials_params(8, 4, 2, 512, "anything_finite")),
        _case("tiny_values", _partials_params(8, 3, 3, 96, "subnormals")),
        _case("amax_around_448", _partials_params(8, 1, 2, 1728, "amax_at_448")),
        _case("one_huge_value", _partials_params(8, 4, 2, 64, "one_huge")),
        _case("nonfinite_blocks", _partials_params(8, 3, 3, 128, "nonfinite"), tags=NONFINITE),
        _case("any_bits", _partials_params(8, 6, 2, 256, "noise"), *_EVERY, tags=NONFINITE),
        # Each alone among numbers; and infinities of both signs that meet only in the sum.
        _case(
            "nan_and_infinities_in_the_splits",
            _partials_params(
                8, 2, 1, 96, "normal",
                [
                    (0, 0, 0, 5, nan), (7, 0, 0, 40, inf), (3, 1, 0, 70, minus_inf),
                    (2, 1, 0, 9, inf), (5, 1, 0, 9, minus_inf),
                ],
            ),
            tags=NONFINITE,
        ),
        # Finite partials whose running sum overflows stay infinite.
        _case(
            "running_sum_overflows",
            _partials_params(
                8, 1, 1, 32, "normal",
                [(0, 0, 0, 3, 0x7F7FFFFF), (1, 0, 0, 3, 0x7F7FFFFF), (2, 0, 0, 3, 0xFF7FFFFF)],
            ),
            tags=NONFINITE,
        ),
        _case(
            "bf16_rounding_overflows",
            _partials_params(1, 1, 1, 32, "normal", [(0, 0, 0, 3, 0x7F7F8000)]),
            tags=NONFINITE,
        ),
        _case(
            "production_partials", _partials_params(8, 8, 2, 1024, "normal"), "eager", "repeat"
        ),
        _case(
            "many_rows", _partials_params(3, 1000, 2, 2064, "noise"), "eager", profile="full",
            device="cuda", tags=NONFINITE,
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- fuzz


@st.composite
def strategy(draw: st.DrawFn) -> Params:
    """Params of small projections: geometry, content, and a few special values."""
    groups = draw(st.integers(1, 4))
    unit = {1: 32, 2: 16, 3: 32, 4: 8}[groups]
    poke = st.tuples(
        st.sampled_from(("x", "weight")),
        st.integers(0, 7),
        st.integers(0, 127),
        st.integers(0, 511),
        st.sampled_from(sorted(SPECIALS)),
    )
    return _params(
        draw(st.integers(1, oracle.MAX_ROWS)),
        groups,
        unit * draw(st.integers(1, 4)),
        SPLITS * draw(st.sampled_from((1, 2, 3, 8, 33, 128))),
        draw(st.sampled_from(sorted({*CONTENTS, *VALUES}))),
        gap=draw(st.sampled_from((0, 1, 8, 13))),
        pokes=draw(st.lists(poke, max_size=2)),
    )


@st.composite
def partials_strategy(draw: st.DrawFn) -> Params:
    """Params of small calls of `quantize_partials`."""
    groups = draw(st.integers(1, 5))
    unit = {1: 32, 2: 16, 3: 32, 4: 8, 5: 32}[groups]
    poke = st.tuples(
        st.integers(0, 8),
        st.integers(0, 7),
        st.integers(0, 4),
        st.integers(0, 127),
        st.one_of(
            st.sampled_from((0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F7FFFFF)),
            st.integers(0, 2**32 - 1),
        ),
    )
    contents = ("noise", "normal", "cancelling", "bf16_ties", "nonfinite", *sorted(VALUES))
    return _partials_params(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 6)),
        groups,
        unit * draw(st.integers(1, 4)),
        draw(st.sampled_from(contents)),
        draw(st.lists(poke, max_size=3)),
    )


def replays(params: Params) -> list[Params]:
    """Calls of the same geometry with other content: a row of zeros, NaN, an infinity."""
    content = "selected" if params["content"] == "integers" else "integers"
    changed = {**params, "content": content}
    pokes = [*params["pokes"], ["x", params["rows"] - 1, 0, 0, "inf"]]
    return [
        changed,
        {**params, "pokes": pokes},
        {**params, "content": "zero_rows"},
        {**changed, "pokes": [["weight", 0, 0, 0, "nan"]]},
    ]


def partials_replays(params: Params) -> list[Params]:
    """Calls of the same geometry with other content."""
    return [{**params, "content": content} for content in ("selected", "nonfinite", "one_huge")]


# ---------------------------------------------------------------- bad inputs


def _with(name: str, change: Callable[[Tensor], Any]) -> Callable[[Args], Args]:
    return lambda args: {**args, name: change(args[name])}


def _both(change: Callable[[Tensor], Tensor]) -> Callable[[Args], Args]:
    return lambda args: {name: change(tensor) for name, tensor in args.items()}


def _more_rows(count: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t[:1].repeat(count, 1, 1)


def _spread_last(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _spread_groups(t: Tensor) -> Tensor:
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


def _projection_bad_inputs() -> list[BadInput]:
    return [
        BadInput("x_2d", _with("x", lambda t: t[:, 0]), names="x"),
        BadInput("x_4d", _with("x", lambda t: t[None]), names="x"),
        BadInput("x_fp16", _with("x", lambda t: t.half()), names="x"),
        BadInput("x_fp32", _with("x", lambda t: t.float()), names="x"),
        BadInput("x_int16", _with("x", lambda t: t.view(torch.int16)), names="x"),
        BadInput("x_without_rows", _with("x", lambda t: t[:0]), names="x"),
        BadInput("x_of_nine_rows", _with("x", _more_rows(9)), names="x"),
        BadInput("x_of_a_hundred_rows", _with("x", _more_rows(100)), names="x"),
        BadInput("x_without_groups", _both(lambda t: t[:, :0] if t.shape[0] == 3 else t[:0]), "x"),
        BadInput("depth_of_zero", _both(lambda t: t[..., :0].contiguous()), names="x"),
        BadInput("depth_of_60", _both(lambda t: t[..., :60].contiguous()), names="x"),
        BadInput("depth_of_4", _both(lambda t: t[..., :4].contiguous()), names="x"),
        BadInput("x_columns_two_apart", _with("x", _spread_last), names="x"),
        BadInput("x_groups_apart", _with("x", _spread_groups), names="x"),
        BadInput("x_rows_overlap", _with("x", lambda t: t[:1].expand(3, -1, -1)), names="x"),
        BadInput(
            "x_transposed",
            _with("x", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
            names="x",
        ),
        BadInput("weight_2d", _with("weight", lambda t: t.flatten(1)), names="weight"),
        BadInput("weight_4d", _with("weight", lambda t: t[None]), names="weight"),
        BadInput("weight_fp32", _with("weight", lambda t: t.float()), names="weight"),
        BadInput("weight_fp16", _with("weight", lambda t: t.half()), names="weight"),
        BadInput(
            "weight_fp8", _with("weight", lambda t: t.to(torch.float8_e4m3fn)), names="weight"
        ),
        BadInput("weight_of_fewer_groups", _with("weight", lambda t: t[:1]), names="weight"),
        BadInput(
            "weight_of_another_depth",
            _with("weight", lambda t: t[..., :32].contiguous()),
            names="weight",
        ),
        BadInput(
            "columns_no_multiple_of_32",
            _with("weight", lambda t: t[:, :-1].contiguous()),
            names="weight",
        ),
        BadInput("no_columns", _with("weight", lambda t: t[:, :0].contiguous()), names="weight"),
        BadInput("weight_rows_apart", _with("weight", _spread_groups), names="weight"),
        BadInput(
            "weight_transposed",
            _with("weight", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
            names="weight",
        ),
        BadInput("weight_on_another_device", _with("weight", lambda t: t.to("meta")), "weight"),
        BadInput("x_is_none", lambda args: {**args, "x": None}, names="x"),
        BadInput("weight_is_none", lambda args: {**args, "weight": None}, names="weight"),
    ]  # fmt: skip


def _partials_bad_inputs() -> list[BadInput]:
    faults: Mapping[str, Callable[[Tensor], Any]] = {
        "3d": lambda t: t[0],
        "5d": lambda t: t[None],
        "bf16": lambda t: t.bfloat16(),
        "fp64": lambda t: t.double(),
        "int32": lambda t: t.view(torch.int32),
        "without_splits": lambda t: t[:0],
        "without_groups": lambda t: t[:, :, :0].contiguous(),
        "without_columns": lambda t: t[..., :0].contiguous(),
        "of_31_columns": lambda t: t[:, :, :1, :31].contiguous(),
        "of_94_columns": lambda t: t[..., :47].contiguous(),
        "rows_apart": lambda t: t[:, ::2],
        "splits_apart": lambda t: t[::2],
        "columns_apart": _spread_last,
        "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        "none": lambda t: None,
    }
    return [
        BadInput(f"partials_{fault}", _with("partials", change), names="partials")
        for fault, change in faults.items()
    ]


BAD_PROJECTION = _params(3, 2, 48, 64, "integers")
BAD_PARTIALS = _partials_params(8, 3, 2, 48, "normal")


# ---------------------------------------------------------------- benchmark

PUBLISHED_US = {2: 5.9, 6: 6.1, 8: 6.0}
"""Graph replay of the published kernels on an H200 at the production geometry, by rows."""

PUBLISHED_EINSUM_US = 8.0
"""The same of einsum alone."""

GOAL_US = 5.0


def _prepare_einsum(args: Args) -> Callable[[], object]:
    x, weight = args["x"], args["weight"]
    return lambda: torch.einsum("tgd,grd->tgr", x, weight)


def _prepare(function: str) -> Callable[[Args], Callable[[], object]]:
    def prepare(args: Args) -> Callable[[], object]:
        # Here, not at the top: a spec is read before it is known how Triton is to run.
        from draftproof.kernels import wo_a_mxfp8 as kernels

        launcher = getattr(kernels, function)
        return lambda: launcher(**args)

    return prepare


def _reach(rows: int) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    published = PUBLISHED_US.get(rows)

    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        if published is None:
            return us["fused"] < us["einsum_then_quantise"], "faster than einsum, then quantise"
        return us["fused"] <= published, (
            f"at most the published {published} us (goal {GOAL_US} us)"
        )

    return reach


def _bench() -> list[BenchPoint]:
    return [
        BenchPoint(
            f"production_{rows}_rows",
            _params(rows, 2, 1024, 4096, "normal"),
            arms={
                "fused": _prepare("wo_a_mxfp8"),
                "einsum_then_quantise": _prepare("wo_a_mxfp8_from_einsum"),
                "einsum": _prepare_einsum,
            },
            baseline="einsum_then_quantise",
            bytes_moved=2 * (2 * 1024 * 4096 + rows * 2 * 4096) + rows * 2048 + 8192,
            published_us={"einsum": PUBLISHED_EINSUM_US}
            | ({"fused": PUBLISHED_US[rows]} if rows in PUBLISHED_US else {}),
            reach=_reach(rows),
        )
        for rows in (1, 2, 4, 6, 8)
    ]


# ---------------------------------------------------------------- the specs

_PROJECTION: dict[str, Any] = {
    "family": "wo_a_mxfp8",
    "build": build,
    "strategy": strategy,
    "bad_inputs": _projection_bad_inputs(),
    "bad_input_params": BAD_PROJECTION,
    # Only the row stride of x is free, which the cases of slices show.
    "replays": replays,
}

SPECS = [
    OpSpec(
        name="wo_a_mxfp8",
        summary="grouped WO-A projection of few rows, quantised to MXFP8 in 128x4 swizzle",
        effects=FUSED_EFFECTS,
        cases=_projection_cases(),
        bench=_bench,
        **_PROJECTION,
    ),
    OpSpec(
        name="wo_a",
        summary="grouped WO-A projection of few rows to bf16, split over D",
        effects=Y_EFFECTS,
        cases=_part_cases("wo_a"),
        **_PROJECTION,
    ),
    OpSpec(
        name="wo_a_partials",
        summary="fp32 partial sums of the WO-A projection over eighths of D",
        effects=PARTIAL_EFFECTS,
        cases=_part_cases("wo_a_partials"),
        **_PROJECTION,
    ),
    OpSpec(
        name="quantize_partials",
        family="wo_a_mxfp8",
        summary="sum of partial sums in their order, bf16, MXFP8 in 128x4 swizzle",
        build=build_partials,
        effects=QUANTIZE_EFFECTS,
        cases=_quantize_cases(),
        strategy=partials_strategy,
        bad_inputs=_partials_bad_inputs(),
        bad_input_params=BAD_PARTIALS,
        replays=partials_replays,
    ),
]
