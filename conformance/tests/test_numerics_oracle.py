"""The oracles' numerics agree with exact fractions wherever a rounding can go wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from draftproof.conformance.authoring import float_sets
from draftproof.conformance.crosscheck import numerics as exact
from draftproof.oracles import numerics

CODES = torch.arange(256).to(torch.uint8)
E4M3_GRID = torch.tensor([exact.decode_e4m3(code) for code in range(127)])
E2M1_GRID = torch.tensor([exact.decode_e2m1(code) for code in range(8)])
AMAXES = float_sets.amaxes(E4M3_GRID)


def by_fractions(
    rule: Callable[..., float | int], dtype: torch.dtype, *inputs: torch.Tensor
) -> torch.Tensor:
    values = map(rule, *(x.tolist() for x in inputs))
    return torch.tensor(list(values), dtype=dtype)


def disagreements(name: str, *inputs: torch.Tensor) -> list[str]:
    got = getattr(numerics, name)(*inputs)
    return float_sets.mismatches(
        by_fractions(getattr(exact, name), got.dtype, *inputs), got, *inputs
    )


def test_bf16_rounding_is_exact_on_every_value_tie_and_edge() -> None:
    x = torch.cat(
        [
            float_sets.bf16_values(),
            float_sets.bf16_ties(),
            float_sets.edges(),
            float_sets.random_bits(10_000, seed=2),
        ]
    )
    assert not disagreements("round_bf16", x)


def test_bf16_rounding_of_float64_rounds_once() -> None:
    ties = float_sets.bf16_ties()[:: 1 << 6].double()
    ties = ties[torch.isfinite(ties)]
    # Nearer to the tie than float32 can hold: rounding to it first would hide on which side.
    x = torch.cat([ties * (1 - 2.0**-50), ties, ties * (1 + 2.0**-50)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-320, -1e-320, 1e300, -torch.inf, torch.nan])])
    assert not disagreements("round_bf16", x)
    assert float_sets.mismatches(numerics.round_bf16(x), numerics.round_bf16(x.float()), x)


def test_bf16_nan_becomes_quiet_and_keeps_its_sign() -> None:
    nan = float_sets.from_bits([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    got = numerics.round_bf16(nan).view(torch.int16).long() & 0xFFFF
    assert got.tolist() == [0x7FC0, 0x7FC0, 0xFFC0, 0xFFC0]


def test_bf16_widening_moves_the_bits_up() -> None:
    patterns = torch.arange(1 << 16)
    wide = numerics.widen_bf16(patterns.to(torch.uint16).view(torch.bfloat16))
    assert ((wide.view(torch.int32).long() & 0xFFFFFFFF) == patterns << 16).all()


def test_fma_is_exact_where_a_second_rounding_would_not_be() -> None:
    a, b, c = float_sets.fma_traps()
    assert not disagreements("fma32", a, b, c)
    rounded = numerics.fma32(a, b, c)
    assert float_sets.mismatches(rounded, a * b + c), "no trap for two float32 roundings"
    twice = (a.double() * b.double() + c.double()).float()
    assert float_sets.mismatches(rounded, twice), "no trap for a float64 rounding"


def test_fma_is_exact_on_random_bits_and_on_random_cancelling_pairs() -> None:
    a, b, c = (float_sets.random_bits(10_000, seed) for seed in (3, 4, 5))
    assert not disagreements("fma32", a, b, c)
    generator = torch.Generator().manual_seed(6)
    x, cosine = torch.randn(2, 10_000, generator=generator)
    assert not disagreements("fma32", x, cosine, -(x * cosine))


def test_fma_broadcasts() -> None:
    a, b, c = torch.randn(3, 1), torch.randn(4), torch.tensor(2.0)
    got = numerics.fma32(a, b, c)
    assert got.shape == (3, 4)
    want = numerics.fma32(a.expand(3, 4), b.expand(3, 4), c.expand(3, 4))
    assert torch.equal(got, want)


def test_division_is_correctly_rounded() -> None:
    edges = float_sets.edges()[::7]
    pairs = torch.cartesian_prod(edges, edges)
    bits = float_sets.random_bits(20_000, seed=7).view(2, -1)
    assert not disagreements("div32", pairs[:, 0], pairs[:, 1])
    assert not disagreements("div32", bits[0], bits[1])


def test_square_root_is_correctly_rounded() -> None:
    roots = float_sets.bf16_values()[:0x7F80:5]
    squares = float_sets.with_neighbours(roots * roots)
    x = torch.cat([float_sets.edges(), squares, float_sets.random_bits(10_000, seed=8)])
    assert not disagreements("sqrt32", x)


@pytest.mark.parametrize("error", [-(2.0**-25), -(2.0**-30), 2.0**-30, 2.0**-25])
def test_square_root_does_not_depend_on_the_hosts(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = torch.sqrt
    monkeypatch.setattr(torch, "sqrt", lambda x: root(x) * (1 + error))
    assert not disagreements("sqrt32", torch.cat([float_sets.edges(), -float_sets.edges()]))


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1022, 1024)
    want = [math.ldexp(1.0, exponent) for exponent in exponents.tolist()]
    assert numerics.power_of_two(exponents).tolist() == want
    assert numerics.power_of_two(torch.tensor([-2000, 2000])).tolist() == [want[0], want[-1]]


def test_e4m3_encoding_is_exact_on_every_tie_bf16_and_edge() -> None:
    x = torch.cat(
        [
            float_sets.bf16_values(),
            float_sets.edges(),
            float_sets.grid_edges(E4M3_GRID),
            float_sets.random_bits(4000, seed=9),
        ]
    )
    assert not disagreements("encode_e4m3", x)


@pytest.mark.parametrize(
    "value, code",
    [
        (448.0, 0x7E),
        (449.0, 0x7E),
        (464.0, 0x7E),
        (480.0, 0x7E),
        (500.0, 0x7E),
        (-500.0, 0xFE),
        (2.0**127, 0x7E),
        (torch.inf, 0x7E),
        (-torch.inf, 0xFE),
        (torch.nan, 0x7F),
        (-torch.nan, 0x7F),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (3 * 2.0**-10, 0x02),
        (-(2.0**-11), 0x80),
    ],
)
def test_e4m3_saturates_keeps_the_sign_of_zero_and_has_one_nan(value: float, code: int) -> None:
    assert numerics.encode_e4m3(torch.tensor([value])).tolist() == [code]


def test_e4m3_decoding_is_exact_on_every_code() -> None:
    assert not disagreements("decode_e4m3", CODES)


def test_e4m3_encoding_undoes_decoding() -> None:
    codes = CODES[CODES != 0xFF]
    assert torch.equal(numerics.encode_e4m3(numerics.decode_e4m3(codes)), codes)


def test_e2m1_encoding_is_exact_on_every_tie_bf16_and_edge() -> None:
    x = torch.cat([float_sets.bf16_values(), float_sets.edges(), float_sets.grid_edges(E2M1_GRID)])
    assert not disagreements("encode_e2m1", x[~torch.isnan(x)])


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(numerics.decode_e2m1(numerics.encode_e2m1(ties)), want)
    assert torch.equal(numerics.decode_e2m1(numerics.encode_e2m1(-ties)), -want)


def test_e2m1_decoding_is_exact_on_every_code() -> None:
    assert not disagreements("decode_e2m1", CODES[:16])


def test_mxfp8_codes_are_exact_on_every_turning_point() -> None:
    assert not disagreements("mxfp8_code", AMAXES)


@pytest.mark.parametrize(
    "amax, code",
    [
        (0.0, 0),
        (2.0**-149, 0),
        (2.8e-36, 1),
        (448.0, 127),
        (449.0, 128),
        (2.0**127, 246),
        (3.4028234663852886e38, 247),
        (torch.inf, 254),
    ],
)
def test_mxfp8_code_of_named_edges(amax: float, code: int) -> None:
    assert numerics.mxfp8_code(torch.tensor([amax])).tolist() == [code]


def test_mxfp8_multipliers_are_exact_on_every_code() -> None:
    assert not disagreements("mxfp8_multiplier", CODES[:255])
    assert numerics.mxfp8_multiplier(CODES[[0, 254]]).tolist() == [0.0, 0.0]


def test_kv_codes_are_exact_on_every_turning_point() -> None:
    assert not disagreements("kv_code", AMAXES[torch.isfinite(AMAXES)])


@pytest.mark.parametrize("amax, code", [(0.0, 105), (1e-4, 105), (448.0, 127), (449.0, 128)])
def test_kv_code_of_named_edges(amax: float, code: int) -> None:
    assert numerics.kv_code(torch.tensor([amax])).tolist() == [code]


def test_kv_multipliers_are_exact_on_every_code() -> None:
    assert not disagreements("kv_multiplier", CODES[:255])


def test_fp4_scales_are_exact_on_every_turning_point() -> None:
    assert not disagreements("fp4_scale", AMAXES)


def test_fake_fp4_is_exact_under_every_scale() -> None:
    scales = E4M3_GRID[1:]
    points = torch.cat([float_sets.grid_edges(E2M1_GRID), float_sets.edges()[::11]])
    x, scale = points.repeat(len(scales)), scales.repeat_interleave(len(points))
    assert not disagreements("fake_fp4", x * scale, scale)


def test_fake_fp4_clears_an_exact_negative_zero_only() -> None:
    x = torch.tensor([-0.0, -1e-9, 0.0, 1e-9, torch.inf, -torch.inf, torch.nan])
    want = torch.tensor([0.0, -0.0, 0.0, 0.0, 12.0, -12.0, torch.nan])
    assert not float_sets.mismatches(want, numerics.fake_fp4(x, torch.tensor(2.0)), x)


def test_fake_fp4_is_exact_in_bf16() -> None:
    value = numerics.fake_fp4(E2M1_GRID[:, None] * E4M3_GRID[1:], E4M3_GRID[1:])
    assert torch.equal(numerics.widen_bf16(numerics.round_bf16(value)), value)


def test_amax_takes_the_largest_magnitude_and_no_nan() -> None:
    x = torch.tensor([[1.0, -3.0, torch.nan], [torch.nan] * 3, [0.0, -torch.inf, -0.0]])
    want = torch.tensor([3.0, 0.0, torch.inf])
    assert not float_sets.mismatches(want, numerics.amax_without_nan(x))


def test_scaling_keeps_infinities_and_nan_under_a_multiplier_of_zero() -> None:
    x = torch.tensor([1.0, -1.0, torch.inf, -torch.inf, torch.nan])
    codes = numerics.encode_e4m3(numerics.scale_by_multiplier(x, torch.tensor(0.0)))
    assert codes.tolist() == [0x00, 0x80, 0x7E, 0xFE, 0x7F]


def test_score_keys_are_exact() -> None:
    x = torch.cat([float_sets.edges(), float_sets.random_bits(10_000, seed=10)])
    assert not disagreements("score_key", x)


def test_score_keys_order_as_scores_do() -> None:
    x = torch.cat([float_sets.edges()[::5], torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    key = numerics.score_key(x)
    for i, j in itertools.combinations(range(len(x)), 2):
        a, b = x[i].item(), x[j].item()
        # NaN is above everything and equal to itself.
        less = a < b or (a == a and b != b)
        equal = a == b or (a != a and b != b)
        assert (key[i] < key[j], key[i] == key[j]) == (less, equal), (a, b)
    assert 0 <= int(key.min()) < int(key.max()) < 1 << 32


F64 = torch.zeros(2, dtype=torch.float64)
F32 = torch.zeros(2)
NAN = torch.tensor([0.0, torch.nan])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: numerics.round_bf16(torch.zeros(2, dtype=torch.float16)), "x must be"),
        (lambda: numerics.widen_bf16(F32), "x must be torch.bfloat16, got torch.float32"),
        (lambda: numerics.fma32(F32, F64, F32), "b must be torch.float32, got torch.float64"),
        (lambda: numerics.div32(F32, F64), "b must be"),
        (lambda: numerics.sqrt32(F64), "x must be"),
        (lambda: numerics.power_of_two(F64), "exponent must be"),
        (lambda: numerics.encode_e4m3(F64), "x must be"),
        (lambda: numerics.decode_e4m3(F32), "code must be"),
        (lambda: numerics.encode_e2m1(NAN), "x holds a NaN"),
        (lambda: numerics.decode_e2m1(CODES[:17]), "code holds 16"),
        (lambda: numerics.amax_without_nan(torch.tensor(1.0)), r"x of shape \(\)"),
        (lambda: numerics.mxfp8_code(NAN), "amax holds a NaN"),
        (lambda: numerics.mxfp8_multiplier(CODES), "code holds 255"),
        (lambda: numerics.kv_code(torch.tensor([torch.inf])), "amax holds an infinity"),
        (lambda: numerics.kv_multiplier(CODES), "code holds 255"),
        (lambda: numerics.scale_by_multiplier(F32, F64), "multiplier must be"),
        (lambda: numerics.fp4_scale(NAN), "amax holds a NaN"),
        (lambda: numerics.fake_fp4(F64, F32), "a must be"),
        (lambda: numerics.score_key(F64), "score must be"),
    ],
)
def test_bad_input_is_one_clear_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with the CPU")
@pytest.mark.parametrize(
    "name",
    ["round_bf16", "sqrt32", "encode_e4m3", "score_key"],
)
def test_gpu_gives_the_bits_of_the_cpu(name: str) -> None:
    rule = getattr(numerics, name)
    x = torch.cat([float_sets.edges(), float_sets.random_bits(100_000, seed=11)])
    assert not float_sets.mismatches(rule(x), rule(x.cuda()).cpu(), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with the CPU")
@pytest.mark.parametrize("name", ["mxfp8_code", "fp4_scale"])
def test_gpu_gives_the_scales_of_the_cpu(name: str) -> None:
    rule = getattr(numerics, name)
    x = AMAXES
    assert not float_sets.mismatches(rule(x), rule(x.cuda()).cpu(), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with the CPU")
def test_gpu_gives_the_fma_and_quotient_of_the_cpu() -> None:
    a, b, c = float_sets.fma_traps()
    fused = numerics.fma32(a.cuda(), b.cuda(), c.cuda()).cpu()
    assert not float_sets.mismatches(numerics.fma32(a, b, c), fused, a, b, c)
    quotient = numerics.div32(a.cuda(), b.cuda()).cpu()
    assert not float_sets.mismatches(numerics.div32(a, b), quotient, a, b)
