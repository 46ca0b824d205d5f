"""The MXFP8 codec, the projection and its intervals, its dispatch, and its launches."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck import mxfp8 as scalar
from draftproof.conformance.crosscheck import wo_a_mxfp8 as crosscheck
from draftproof.conformance.engine.judges import differing
from draftproof.conformance.ops import wo_a_mxfp8 as ops
from draftproof.kernels import runtime
from draftproof.kernels import wo_a_mxfp8 as kernels
from draftproof.oracles import mxfp8
from draftproof.oracles import wo_a_mxfp8 as oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SEEDS = st.integers(0, 0xFFFF)

needs_triton = pytest.mark.skipif(
    not runtime.runs_triton(DEVICE), reason="no GPU, and Triton's interpreter is off"
)
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")

some = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def differences(one: Any, other: Any) -> int:
    """How many elements of two results differ in their bits; any NaN equals any other."""
    pairs = [(one, other)] if isinstance(one, Tensor) else zip(one, other, strict=True)
    return sum(int(differing(a.cpu(), b.cpu(), any_nan=True).sum()) for a, b in pairs)


def bf16_of(bits: Tensor) -> Tensor:
    return ops._from_bits(bits)


def every_bf16() -> Tensor:
    return bf16_of(torch.arange(1 << 16))


# ---------------------------------------------------------------- the codec


def test_codec_is_the_scalar_codec_for_every_bf16_alone_in_its_block() -> None:
    values = every_bf16()
    y = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    places = torch.arange(len(values)) % 32
    y[torch.arange(len(values)), places] = values
    data, codes = mxfp8.encode(y)
    data = data.view(torch.uint8)
    emitted = zip(
        data[torch.arange(len(values)), places].tolist(), codes[:, 0].tolist(), strict=True
    )
    for n, (value, found) in enumerate(zip(values.double().tolist(), emitted, strict=True)):
        ((element,), code) = scalar.encode_block([value])
        assert found == (element, code), hex(n)
    data[torch.arange(len(values)), places] = 0
    assert not data.any()


@some
@given(seed=SEEDS, kind=st.sampled_from(sorted(ops.VALUES)))
def test_codec_is_the_scalar_codec_for_whole_blocks(seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = ops.VALUES[kind](256, generator).reshape(1, 256)
    data, codes = mxfp8.encode(y)
    for g, block in enumerate(y.double().reshape(8, 32).tolist()):
        elements, code = scalar.encode_block(block)
        assert data.view(torch.uint8)[0, 32 * g : 32 * g + 32].tolist() == elements
        assert int(codes[0, g]) == code


def test_decoding_is_exact_for_every_pair_of_codes() -> None:
    data = torch.arange(256).repeat(256, 1).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(256)[:, None].repeat(1, 8).to(torch.uint8)
    values = mxfp8.decode(data, codes)
    for code, row in enumerate(values.tolist()):
        for element, value in enumerate(row):
            exact = scalar.decode_element(element, code)
            assert (exact is None) == (value != value)
            assert exact is None or Fraction(value) == exact
    # -0 keeps its sign.
    assert torch.signbit(values[:255, 0x80]).all()


def test_decoded_values_are_encoded_to_themselves() -> None:
    # Blocks that hold the largest element have but one scale.
    data = torch.arange(256).to(torch.uint8)
    data[[0x7F, 0xFF]] = 0x7E
    data = data.reshape(8, 32)
    data[:, 0] = 0x7E
    # Those that bf16 holds: from a step of 2^-133 to 448 * 2^119.
    for code in range(3, 247):
        codes = torch.full((8, 1), code, dtype=torch.uint8)
        values = mxfp8.decode(data.view(torch.float8_e4m3fn), codes)
        y = values.bfloat16()
        assert torch.equal(y.double(), values)
        again, found = mxfp8.encode(y)
        assert torch.equal(again.view(torch.uint8), data)
        assert torch.equal(found, codes)


@pytest.mark.parametrize("rows", [1, 2, 8, 31, 32, 33, 127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 64, 65])
def test_swizzle_is_the_layout_that_the_hardware_reads(rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + groups)
    codes = torch.randint(1, 255, (rows, groups), generator=generator).to(torch.uint8)
    swizzled = mxfp8.swizzle(codes)
    assert bytes(swizzled.numpy()) == bytes(scalar.swizzle(codes.tolist()))
    assert torch.equal(mxfp8.unswizzle(swizzled, rows, groups), codes)
    assert int((swizzled > 0).sum()) == rows * groups
    assert len(swizzled) == -(-rows // 128) * 128 * -(-groups // 4) * 4


def test_swizzle_of_no_rows_is_empty() -> None:
    empty = torch.empty(0, 3, dtype=torch.uint8)
    assert mxfp8.swizzle(empty).shape == (0,)
    assert mxfp8.unswizzle(mxfp8.swizzle(empty), 0, 3).shape == (0, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mxfp8.encode(torch.zeros(1, 32)),
        lambda: mxfp8.encode(torch.zeros(1, 33, dtype=torch.bfloat16)),
        lambda: mxfp8.encode(torch.zeros(1, 0, dtype=torch.bfloat16)),
        lambda: mxfp8.encode(torch.zeros(32, dtype=torch.bfloat16)),
        lambda: mxfp8.decode(torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.uint8)),
        lambda: mxfp8.unswizzle(torch.zeros(511, dtype=torch.uint8), 1, 1),
        lambda: mxfp8.unswizzle(torch.zeros(512, dtype=torch.int8), 1, 1),
    ],
)
def test_codec_refuses(call: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        call()


# ---------------------------------------------------------------- the oracle


EXACT = sorted({*ops.CONTENTS, *ops.VALUES} - set(ops.RANDOM))


@some
@given(
    seed=SEEDS,
    content=st.sampled_from(EXACT),
    rows=st.integers(1, 3),
    geometry=st.sampled_from([(1, 32, 8), (3, 32, 16), (2, 16, 40), (4, 8, 8), (32, 1, 8)]),
)
def test_oracle_and_crosscheck_give_the_same_bits(
    seed: int, content: str, rows: int, geometry: tuple[int, int, int]
) -> None:
    call = ops.build(ops._params(rows, *geometry, content), seed)
    for op in ("wo_a_mxfp8", "wo_a", "wo_a_partials"):
        assert differences(getattr(oracle, op)(**call), getattr(crosscheck, op)(**call)) == 0, op


@some
@given(params=ops.partials_strategy(), seed=SEEDS)
def test_quantisation_of_oracle_and_crosscheck_is_the_same(params: Any, seed: int) -> None:
    call = ops.build_partials({**params, "rows": min(params["rows"], 2)}, seed)
    assert differences(oracle.quantize_partials(**call), crosscheck.quantize_partials(**call)) == 0


@pytest.mark.parametrize("case", ops.SPECS[0].cases, ids=lambda case: case.name)
def test_sums_are_exact_in_every_case_that_is_not_random(case: Any) -> None:
    if case.profile != "quick":
        pytest.skip("full-sized")
    call = ops.build(case.params, 3)
    lower, upper = oracle.partial_bounds(**call)
    settled = (lower == upper) | (lower.isnan() & upper.isnan())
    if case.params["content"] in ops.RANDOM:
        assert not settled.all()
    else:
        assert settled.all()


@some
@given(params=ops.strategy(), seed=SEEDS, order=st.integers(0, 0xFFFF))
def test_sums_in_fp32_in_any_order_lie_within_the_bounds(
    params: Any, seed: int, order: int
) -> None:
    call = ops.build(params, seed)
    x, weight = call["x"].float(), call["weight"].float()
    lower, upper = oracle.partial_bounds(**call)
    depth = params["depth"]
    turn = torch.randperm(depth // 8, generator=torch.Generator().manual_seed(order))
    split_x = x.reshape(*x.shape[:2], 8, depth // 8)[..., turn]
    split_weight = weight.reshape(*weight.shape[:2], 8, depth // 8)[..., turn]
    total = torch.zeros(lower.shape)
    for d in range(depth // 8):
        term = split_x[:, :, :, d][:, :, None] * split_weight[:, :, :, d][None]
        total = total + term.permute(3, 0, 1, 2)
    nan = lower.isnan() & upper.isnan()
    inside = (total >= lower.float()) & (total <= upper.float())
    assert torch.where(nan, total.isnan(), inside).all()


def test_sums_that_are_exact_have_one_value_and_others_room() -> None:
    ones = torch.ones(1, 1, 16, dtype=torch.bfloat16)
    weight = torch.ones(1, 32, 16, dtype=torch.bfloat16)
    lower, upper = oracle.partial_bounds(ones, weight)
    assert torch.equal(lower, torch.full((8, 1, 1, 32), 2.0, dtype=torch.float64))
    assert torch.equal(lower, upper)
    # 1 + 2^-22 needs 23 bits: within fp32, but not within what a matrix unit keeps for sure.
    weight[..., ::2] = 2.0**-22
    lower, upper = oracle.partial_bounds(ones, weight)
    assert torch.equal(
        upper - lower,
        2
        * (1024 * 2.0**-24 * (1 + 2.0**-22) + 2 * 2.0**-149)
        * (torch.ones(8, 1, 1, 32, dtype=torch.float64)),
    )


def test_a_block_maximum_lies_between_the_bounds_of_its_magnitudes() -> None:
    lower = torch.zeros(1, 1, 32, dtype=torch.float64)
    upper = torch.zeros(1, 1, 32, dtype=torch.float64)
    lower[..., 0], upper[..., 0] = -3.0, 2.0
    lower[..., 1], upper[..., 1] = -2.0, -1.0
    lower[..., 2] = upper[..., 2] = torch.nan
    least, greatest = oracle.amax_of(lower, upper)
    assert (least.tolist(), greatest.tolist()) == ([[1.0]], [[3.0]])


def test_rows_are_independent() -> None:
    call = ops.build(ops._params(8, 2, 48, 64, "selected"), 5)
    whole = oracle.wo_a_mxfp8(**call)
    codes = mxfp8.unswizzle(whole.scales, 8, 3)
    for t in range(8):
        alone = oracle.wo_a_mxfp8(call["x"][t : t + 1], call["weight"])
        assert differences(alone.data, whole.data[t : t + 1]) == 0
        assert torch.equal(mxfp8.unswizzle(alone.scales, 1, 3), codes[t : t + 1])


def test_scaling_by_a_power_of_two_moves_the_codes_alone() -> None:
    call = ops.build(ops._params(4, 2, 48, 64, "integers"), 6)
    one = oracle.wo_a_mxfp8(**call)
    other = oracle.wo_a_mxfp8(call["x"] * 2.0**9, call["weight"])
    assert differences(one.data, other.data) == 0
    moved = mxfp8.unswizzle(other.scales, 4, 3).int() - mxfp8.unswizzle(one.scales, 4, 3).int()
    assert (moved == 9).all()


# ---------------------------------------------------------------- the linear behind


def _linear_weight(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, columns), generator=generator)
    data = torch.where(data % 128 == 127, 0x08, data).to(torch.uint8)
    scales = torch.randint(125, 130, (rows, columns // 32), generator=generator).to(torch.uint8)
    return data.view(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("rows, groups", [(1, 1), (3, 3), (8, 5)])
def test_linear_is_the_exact_one_where_float64_holds_its_sums(rows: int, groups: int) -> None:
    call = ops.build(ops._params(rows, groups, 32, 16, "integers"), rows)
    quantised = oracle.wo_a_mxfp8(**call)
    weight = _linear_weight(6, 32 * groups, groups)
    wanted = crosscheck.mxfp8_linear(crosscheck.Mxfp8SwizzledInput(*quantised), *weight)
    assert torch.equal(oracle.mxfp8_linear(quantised, *weight), wanted)


def test_linear_knows_the_smallest_scale_and_nan() -> None:
    data = torch.zeros(1, 64, dtype=torch.uint8)
    data[0, 0] = data[0, 32] = 0x38
    weight = torch.full((3, 64), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 127], [255, 127], [0, 0]], dtype=torch.uint8)
    given = oracle.Mxfp8SwizzledInput(
        data.view(torch.float8_e4m3fn), mxfp8.swizzle(torch.tensor([[127, 0]]).to(torch.uint8))
    )
    out = oracle.mxfp8_linear(given, weight, scales)
    assert out[0, 0] == 1.0 + 2.0**-127
    assert out[0, 1].isnan()
    assert out[0, 2] == 2.0**-127 + 2.0**-254


@pytest.mark.parametrize("wrong", ["columns", "scales", "input"])
def test_linear_refuses(wrong: str) -> None:
    given = oracle.quantize_partials(torch.zeros(1, 2, 1, 64))
    weight, scales = _linear_weight(4, 64, 0)
    if wrong == "columns":
        weight = weight[:, :32]
    if wrong == "scales":
        scales = scales[:, :1]
    if wrong == "input":
        given = oracle.Mxfp8SwizzledInput(given.data, given.scales[:256])
    with pytest.raises(ValueError, match=r"weight_q|codes|scales"):
        oracle.mxfp8_linear(given, weight, scales)


@needs_triton
@pytest.mark.parametrize("content", ["integers", "selected", "amax_at_448"])
def test_full_outputs_of_the_linear_are_those_of_the_oracle_s_rows(content: str) -> None:
    call = ops.build(ops._params(8, 3, 32, 64, content), 11)
    weight = _linear_weight(64, 96, 1)
    wanted = oracle.mxfp8_linear(oracle.wo_a_mxfp8(**call), *weight)
    got = kernels.wo_a_mxfp8(**{name: tensor.to(DEVICE) for name, tensor in call.items()})
    on_cpu = oracle.Mxfp8SwizzledInput(got.data.cpu(), got.scales.cpu())
    assert torch.equal(oracle.mxfp8_linear(on_cpu, *weight), wanted)


# ---------------------------------------------------------------- the kernels


@needs_triton
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "thirty_two_neighbours"])
def test_kernel_quantises_every_bf16_as_the_oracle_does(alone: bool) -> None:
    values = every_bf16()
    if alone:
        # Every 31st, since 31 and 2^16 have no common factor; on a GPU all.
        values = values[:: 1 if DEVICE.type == "cuda" else 31]
        values = values[: len(values) // 64 * 64]
        y = torch.zeros(len(values), 32, dtype=torch.bfloat16)
        y[:, 7] = values
    else:
        y = values.reshape(-1, 32)
    partials = y.float().reshape(1, -1, 1, 64 * 32)
    got = kernels.quantize_partials(partials.to(DEVICE))
    assert differences(oracle.quantize_partials(partials), got) == 0


@needs_triton
def test_two_launches_serve_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.kernel)
            return self.kernel[grid]

    for name in ("_partials_kernel", "_quantize_kernel", "_sum_kernel"):
        monkeypatch.setattr(kernels, name, Counted(getattr(kernels, name)))
    call = ops.build(ops._params(4, 2, 48, 64, "integers"), 0)
    kernels.wo_a_mxfp8(**{name: tensor.to(DEVICE) for name, tensor in call.items()})
    assert len(launched) == 2


def _forms(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The compile-time constants that projections of some shapes are launched with."""
    forms: set[Any] = set()

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: forms.add(
                tuple((key, value) for key, value in kwargs.items() if key.isupper())
            )

    monkeypatch.setattr(kernels, "_partials_kernel", Noted())
    for rows, groups, width, depth, gap in calls:
        call = ops.build(ops._params(rows, groups, width, depth, "zeros", gap=gap), 0)
        kernels.wo_a_partials(**{name: tensor.to(DEVICE) for name, tensor in call.items()})
    return forms


@needs_triton
def test_all_geometries_share_two_forms_of_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list(itertools.product((1, 5, 8), (1, 2), (32, 128), (8, 64, 1024, 2048), (0, 3, 8)))
    assert len(_forms(calls, monkeypatch)) == 2


@needs_cuda
def test_every_geometry_of_a_server_is_compiled_once() -> None:
    for rows, gap, width in itertools.product(range(1, 9), (0, 8, 3), (128, 192)):
        call = ops.build(ops._params(rows, 2, width, 1024, "integers", gap=gap), 0)
        kernels.wo_a_mxfp8(**{name: tensor.to(DEVICE) for name, tensor in call.items()})
    for kernel in (kernels._partials_kernel, kernels._quantize_kernel):
        assert len(kernel.device_caches[DEVICE.index][0]) <= 8


def test_a_device_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    call = ops.build(ops.BAD_PROJECTION, 0)
    for function in (kernels.wo_a_mxfp8, kernels.wo_a, kernels.wo_a_mxfp8_baseline):
        with pytest.raises(ValueError, match="x is on cpu, where Triton runs only"):
            function(**call)
    with pytest.raises(ValueError, match="partials is on cpu"):
        kernels.quantize_partials(torch.zeros(8, 1, 1, 32))


# ---------------------------------------------------------------- laws

IMPLEMENTATIONS = {
    "oracle": (oracle.wo_a_mxfp8, oracle.wo_a, oracle.quantize_partials),
    "triton": (kernels.wo_a_mxfp8, kernels.wo_a, kernels.quantize_partials),
    "baseline": (
        kernels.wo_a_mxfp8_baseline,
        kernels.wo_a_baseline,
        kernels.quantize_partials_baseline,
    ),
}


@needs_triton
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows, width, depth", [(6, 48, 256), (2, 128, 1024), (8, 32, 200)])
@pytest.mark.parametrize("content", ["normal", "cancelling", "selected"])
def test_fused_op_gives_the_bytes_of_its_parts_on_every_run(
    implementation: str, rows: int, width: int, depth: int, content: str
) -> None:
    fused, project, quantise = IMPLEMENTATIONS[implementation]
    call = ops.build(ops._params(rows, 2, width, depth, content), depth)
    call = {name: tensor.to(DEVICE) for name, tensor in call.items()}
    once = fused(**call)
    assert differences(once, quantise(project(**call).float()[None])) == 0
    assert differences(once, fused(**call)) == 0


@needs_triton
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("splits", [1, 5, 7, 8])
def test_splits_of_negative_zero_add_nothing(implementation: str, splits: int) -> None:
    quantise = IMPLEMENTATIONS[implementation][2]
    partials = ops.build_partials(ops._partials_params(splits, 2, 3, 32, "normal"), 1)["partials"]
    zeros = torch.full_like(partials[:1], -0.0)
    alone = quantise(partials.to(DEVICE))
    for more in ([zeros, partials], [partials, zeros]):
        assert differences(alone, quantise(torch.cat(more).to(DEVICE))) == 0


# ---------------------------------------------------------------- dispatch

BACKENDS = ("cutlass", "cutedsl", "trtllm", "deep_gemm", "")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_is_mxfp8", [True, False])
@pytest.mark.parametrize("repacked", [True, False])
def test_truth_table_of_what_a_linear_takes(
    backend: str, weight_is_mxfp8: bool, repacked: bool
) -> None:
    linear = kernels.Linear(backend, weight_is_mxfp8, repacked)
    takes = backend in ("cutlass", "cutedsl") and weight_is_mxfp8 and not repacked
    assert kernels.takes_swizzled(linear) is takes

    data, scales = torch.zeros(1, 32), torch.zeros(512, dtype=torch.uint8)
    # What is not marked takes the path that it took before there was a marker.
    assert kernels.linear_path(data, linear) == "quantise"
    assert kernels.linear_path((data, scales), linear) == "plain"
    assert kernels.linear_path((data, None), linear) == "plain"
    marked = kernels.Mxfp8SwizzledInput(data, scales)
    if takes:
        assert kernels.linear_path(marked, linear) == "swizzled"
    else:
        with pytest.raises(ValueError, match="input: swizzled scales"):
            kernels.linear_path(marked, linear)


READS = kernels.Linear("cutlass", weight_is_mxfp8=True)


@pytest.mark.parametrize(
    "x, weight, linear, reason",
    [
        ((1, 2, 64), (2, 48, 64), READS, None),
        ((8, 2, 64), (2, 48, 64), READS, None),
        ((8, 2, 4096), (2, 1024, 4096), READS, None),
        ((4, 2, 64), (2, 48, 64), kernels.Linear("cutedsl", True), None),
        ((4, 2, 64), (2, 48, 64), kernels.Linear("trtllm", True), "does not read swizzled"),
        ((4, 2, 64), (2, 48, 64), kernels.Linear("cutlass", False), "does not read swizzled"),
        ((4, 2, 64), (2, 48, 64), kernels.Linear("cutlass", True, True), "does not read swizzled"),
        ((0, 2, 64), (2, 48, 64), READS, "not 1 to 8 rows"),
        ((9, 2, 64), (2, 48, 64), READS, "not 1 to 8 rows"),
        ((4, 2, 60), (2, 48, 60), READS, "the depth is no multiple of 8"),
        ((4, 2, 64), (2, 47, 64), READS, "the columns are no multiple of 32"),
    ],
)
def test_truth_table_of_the_fused_projection(
    x: tuple[int, ...], weight: tuple[int, ...], linear: kernels.Linear, reason: str | None
) -> None:
    made = torch.zeros(x, dtype=torch.bfloat16), torch.zeros(weight, dtype=torch.bfloat16)
    route = kernels.wo_a_route(*made, linear)
    assert route.fused is (reason is None)
    assert reason is None or reason in route.reason
    for dtype in (torch.float16, torch.float32):
        assert kernels.wo_a_route(made[0].to(dtype), made[1], linear).fused is False
        assert kernels.wo_a_route(made[0], made[1].to(dtype), linear).fused is False
    # Whoever is routed to the fused op is not refused by it.
    if route.fused:
        oracle.wo_a(*made)
