"""The device helpers give the oracles' bits, on the GPU or under the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from draftproof.conformance.authoring import float_sets
from draftproof.kernels import numerics as device_numerics
from draftproof.kernels import runtime
from draftproof.oracles import numerics

BLOCK = 1 << 14
"""Elements per program."""

CODES = torch.arange(255).to(torch.uint8)
E4M3_GRID = numerics.decode_e4m3(torch.arange(127).to(torch.uint8))
E2M1_GRID = numerics.decode_e2m1(torch.arange(8).to(torch.uint8))
AMAXES = float_sets.amaxes(E4M3_GRID)


@triton.jit
def apply_one(x_ptr, out_ptr, count, helper: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    live = at < count
    tl.store(out_ptr + at, helper(tl.load(x_ptr + at, mask=live)), mask=live)


@triton.jit
def apply_two(x_ptr, y_ptr, out_ptr, count, helper: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    live = at < count
    x = tl.load(x_ptr + at, mask=live)
    y = tl.load(y_ptr + at, mask=live)
    tl.store(out_ptr + at, helper(x, y), mask=live)


@triton.jit
def apply_three(x_ptr, y_ptr, z_ptr, out_ptr, count, helper: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    live = at < count
    x = tl.load(x_ptr + at, mask=live)
    y = tl.load(y_ptr + at, mask=live)
    z = tl.load(z_ptr + at, mask=live)
    tl.store(out_ptr + at, helper(x, y, z), mask=live)


@triton.jit
def amax_of_rows(x_ptr, out_ptr, columns: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * columns + tl.arange(0, columns))
    amax = device_numerics.bits_float(tl.max(device_numerics.magnitude_bits(x)))
    tl.store(out_ptr + row, amax)


@triton.jit
def codes_of_scalars(x_ptr, mxfp8_ptr, kv_ptr, scale_ptr, fma_ptr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row)
    tl.store(mxfp8_ptr + row, device_numerics.mxfp8_code(x))
    tl.store(kv_ptr + row, device_numerics.kv_code(x))
    tl.store(scale_ptr + row, device_numerics.fp4_scale(x))
    tl.store(fma_ptr + row, device_numerics.fma32(x, x, x))


# NumPy warns of overflow and NaN, which are part of the inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
KERNELS = {1: apply_one, 2: apply_two, 3: apply_three}


def on_device(name: str, dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
    count = inputs[0].numel()
    # A pattern that no helper gives everywhere: an element that was not stored would show.
    out = torch.full((count,), 77, dtype=dtype, device=DEVICE)
    KERNELS[len(inputs)][(triton.cdiv(count, BLOCK),)](
        *(x.to(DEVICE) for x in inputs),
        out,
        count,
        helper=getattr(device_numerics, name),
        block=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out.cpu()


def disagreements(name: str, *inputs: torch.Tensor) -> list[str]:
    want = getattr(numerics, name)(*inputs)
    return float_sets.mismatches(want, on_device(name, want.dtype, *inputs), *inputs)


def everything() -> torch.Tensor:
    return torch.cat(
        [
            float_sets.bf16_values(),
            float_sets.bf16_ties(),
            float_sets.edges(),
            float_sets.grid_edges(E4M3_GRID),
            float_sets.grid_edges(E2M1_GRID),
            float_sets.random_bits(500_000, seed=20),
        ]
    )


def test_bf16_rounding_is_exact_on_every_value_tie_and_edge() -> None:
    assert not disagreements("round_bf16", everything())


def test_bf16_widening_is_exact_on_every_value() -> None:
    x = numerics.round_bf16(float_sets.bf16_values())
    assert not disagreements("widen_bf16", x)


def test_fma_rounds_once() -> None:
    traps = float_sets.fma_traps()
    assert not disagreements("fma32", *traps)
    bits = float_sets.random_bits(900_000, seed=21).view(3, -1)
    assert not disagreements("fma32", *bits)


def test_fma_rounds_once_where_the_terms_cancel() -> None:
    x, cosine = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(22))
    assert not disagreements("fma32", x, cosine, -(x * cosine))


def test_division_is_correctly_rounded() -> None:
    edges = float_sets.edges()[::3]
    pairs = torch.cartesian_prod(edges, edges)
    assert not disagreements("div32", pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
    bits = float_sets.random_bits(600_000, seed=23).view(2, -1)
    assert not disagreements("div32", *bits)


def test_square_root_is_correctly_rounded() -> None:
    assert not disagreements("sqrt32", everything())


def test_e4m3_encoding_is_exact_on_every_tie_value_and_edge() -> None:
    assert not disagreements("encode_e4m3", everything())


def test_e2m1_rounding_is_exact_on_every_tie_value_and_edge() -> None:
    x = everything()
    x = x[~torch.isnan(x)]
    want = numerics.decode_e2m1(numerics.encode_e2m1(x))
    assert not float_sets.mismatches(want, on_device("round_e2m1", torch.float32, x), x)


def test_mxfp8_codes_are_exact_on_every_turning_point() -> None:
    assert not disagreements("mxfp8_code", AMAXES)


def test_kv_codes_are_exact_on_every_turning_point() -> None:
    assert not disagreements("kv_code", AMAXES[torch.isfinite(AMAXES)])


@pytest.mark.parametrize("name", ["mxfp8_multiplier", "kv_multiplier"])
def test_multipliers_are_exact_on_every_code(name: str) -> None:
    assert not disagreements(name, CODES)


def test_scaling_keeps_infinities_and_nan_under_every_multiplier() -> None:
    points = float_sets.edges()[::5]
    multipliers = numerics.mxfp8_multiplier(CODES)
    x, multiplier = points.repeat(255), multipliers.repeat_interleave(len(points))
    assert not disagreements("scale_by_multiplier", x, multiplier)


def test_fp4_scales_are_exact_on_every_turning_point() -> None:
    assert not disagreements("fp4_scale", AMAXES)


def test_fake_fp4_is_exact_under_every_scale() -> None:
    scales = E4M3_GRID[1:]
    points = torch.cat([float_sets.grid_edges(E2M1_GRID), float_sets.edges()])
    x, scale = points.repeat(len(scales)), scales.repeat_interleave(len(points))
    assert not disagreements("fake_fp4", x * scale, scale)


def test_score_keys_are_exact() -> None:
    x = everything()
    key = on_device("score_key", torch.uint32, x).to(torch.int64)
    assert not float_sets.mismatches(numerics.score_key(x), key, x)


def test_amax_leaves_nan_out() -> None:
    nan = torch.nan
    x = torch.tensor(
        [[1.0, -3.0, nan, 2.0], [nan, nan, -nan, nan], [0.0, -0.0, -torch.inf, nan], [-1e-45] * 4]
    )
    got = torch.full((4,), 77.0, device=DEVICE)
    amax_of_rows[(4,)](x.to(DEVICE), got, columns=4, num_warps=1, enable_fp_fusion=False)
    assert not float_sets.mismatches(numerics.amax_without_nan(x), got.cpu())


def test_scalars_round_as_blocks_do() -> None:
    x = torch.tensor([0.0, 1e-45, 1e-4, 0.3, 448.0, 449.0, 3e38])
    codes = torch.full((2, 7), 77, dtype=torch.uint8, device=DEVICE)
    floats = torch.full((2, 7), 77.0, device=DEVICE)
    codes_of_scalars[(7,)](
        x.to(DEVICE), codes[0], codes[1], floats[0], floats[1], num_warps=1, enable_fp_fusion=False
    )
    assert not float_sets.mismatches(numerics.mxfp8_code(x), codes[0].cpu(), x)
    assert not float_sets.mismatches(numerics.kv_code(x), codes[1].cpu(), x)
    assert not float_sets.mismatches(numerics.fp4_scale(x), floats[0].cpu(), x)
    assert not float_sets.mismatches(numerics.fma32(x, x, x), floats[1].cpu(), x)
