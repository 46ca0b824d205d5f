"""The oracle of `c2_compress` against the second one, its bounds, its codec, and the vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck import c2_compress as crosscheck
from draftproof.conformance.engine import casefile, vectors
from draftproof.conformance.engine.calls import clone, leaves
from draftproof.conformance.engine.judges import differing
from draftproof.conformance.engine.running import case_seed
from draftproof.conformance.ops import c2_compress as ops
from draftproof.oracles import c2_compress as oracle
from draftproof.oracles.numerics import round_bf16, widen_bf16

SPECS = {spec.name: spec for spec in ops.SPECS}
CASES = [
    pytest.param(spec, case, id=f"{spec.name}-{case.name}")
    for spec in ops.SPECS
    for case in spec.cases
    if case.profile == "quick" and len(case.params["starts"]) * case.params["draft_len"] <= 20
]

some = settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
    """How many elements of two calls' tensors differ, by path; any NaN equals any other."""
    counts = {
        path: int(differing(tensor, leaves(other)[path], any_nan=True).sum())
        for path, tensor in leaves(one).items()
    }
    return {path: count for path, count in counts.items() if count}


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_oracle_and_crosscheck_leave_the_same_bits(spec: Any, case: Any) -> None:
    call = spec.build(case.params, case_seed(0, case.name))
    one, other = clone(call), clone(call)
    spec.oracle(**one)
    getattr(crosscheck, spec.name)(**other)
    assert not differences(one, other)


@some
@given(params=ops._strategy((1, 2, 3))(), seed=st.integers(0, 0xFFFF))
def test_oracle_and_crosscheck_agree_on_any_call_within_the_domain(params: Any, seed: int) -> None:
    call = ops.build({**params, "starts": params["starts"][:2], "padded": 0}, seed)
    one, other = clone(call), clone(call)
    oracle.c2_verify(**one)
    crosscheck.c2_verify(**other)
    beyond = ops._completing(call) & ops._undefined(call)
    if not beyond.any():
        assert not differences(one, other)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_exact_contents_leave_no_choice_and_others_do(spec: Any, case: Any) -> None:
    call = spec.build(case.params, 3)
    region = ops.emitted_region(call, "out")
    ends = (round_bf16(end).double() for end in ops._out_ends(call, {}, "out"))
    lower, upper = (end[region] for end in ends)
    settled = (lower == upper) | (lower.isnan() & upper.isnan())
    if case.params["content"] in ops.EXACT and case.params["weight"] != "subnormals":
        # Around 0 the floor of the pool leaves the smallest steps open.
        settled |= (lower.abs() < 2.0**-60) & (upper.abs() < 2.0**-60)
        assert settled.all()
    assert (lower <= upper)[~lower.isnan()].all()


@pytest.mark.parametrize("op", SPECS)
def test_vectors_are_of_calls_that_leave_no_choice(op: str) -> None:
    compared = 0
    for path in sorted((vectors.FOLDER / op).glob("*.json")):
        if path.name == "manifest.json":
            continue
        call = casefile.read(path).calls[0]
        region = ops.emitted_region(call, "out")
        lower, upper = (round_bf16(end)[region] for end in ops._out_ends(call, {}, "out"))
        # A zero may have either sign, which FP4 does not see.
        assert ((lower == upper) | (lower.isnan() & upper.isnan())).all(), path.name
        compared += int(region.sum())
    assert compared > 0


@some
@given(
    seed=st.integers(0, 0xFFFF), content=st.sampled_from(sorted(ops.ROWS)), eps=st.floats(1e-6, 2)
)
def test_fp32_in_any_order_lies_within_the_bounds(seed: int, content: str, eps: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    partner, own = ops.ROWS[content](2, 4, generator)[:, None].unbind(0)
    weight = ops.WEIGHTS["near_one"](generator)
    lower, upper = oracle.norm_bounds(*oracle.pool_bounds(partner, own), weight, eps)
    (kv0, s0), (kv1, s1) = partner.split(512, dim=1), own.split(512, dim=1)
    e = torch.exp(-(s0 - s1).abs())
    value = torch.where(s0 >= s1, kv0 + kv1 * e, kv0 * e + kv1) / (1 + e)
    x = widen_bf16(round_bf16(value))
    order = torch.randperm(512, generator=generator)
    mean = (x * x)[:, order].cumsum(1)[:, -1:] / 512
    y = round_bf16(x * torch.rsqrt(mean + eps) * widen_bf16(weight)).double()
    low, high = (widen_bf16(round_bf16(end)).double() for end in (lower, upper))
    nan = low.isnan() & high.isnan()
    assert torch.where(nan, y.isnan(), (y >= low) & (y <= high)).all()


def test_bounds_of_random_rows_leave_one_pattern_nearly_everywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    partner, own = (ops.ROWS["normal"](64, 0, generator) for _ in range(2))
    weight = ops.WEIGHTS["near_one"](generator)
    ends = oracle.norm_bounds(*oracle.pool_bounds(partner, own), weight, 1e-6)
    lower, upper = map(round_bf16, ends)
    assert (lower == upper).double().mean() > 0.98


def encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of latents that are not turned."""
    still = torch.zeros(len(values), 64)
    still[:, ::2] = 1.0
    return oracle.encode(values, still)


def test_codec_is_the_scalar_codec_for_every_bf16() -> None:
    patterns = torch.arange(1 << 16)
    # Neighbours in one group, and 128 groups apart: both share scales with other numbers.
    for order in (patterns, patterns.reshape(512, 128).T.flatten()):
        latent = ops._from_bits(order).reshape(128, 512)
        data, codes = encoded(latent)
        for row in range(0, 128, 3):
            values = latent[row].double().tolist()
            wanted = crosscheck.token(values, [1.0, 0.0] * 32)
            assert (bytes(data[row].tolist()), bytes(codes[row].tolist())) == wanted, row


def test_a_token_of_zeros_has_the_floor_s_code_and_keeps_no_sign() -> None:
    data, codes = encoded(torch.full((1, 512), -0.0, dtype=torch.bfloat16))
    assert (codes == 105).all()
    assert not data.any()


def test_layout_of_584_bytes_is_that_of_the_page() -> None:
    layout = oracle.LAYOUTS[584]
    assert layout.data_bytes + layout.scale_bytes == 584
    assert layout.codes == 7
    assert [layout.page_bytes(size) for size in (1, 2, 64, 128)] == [1152, 1728, 37440, 74880]


def test_places_of_all_tokens_of_a_page_are_disjoint_and_within_it() -> None:
    data, codes = oracle.places(torch.arange(8), 8)
    taken = torch.cat((data.flatten(), codes.flatten()))
    assert len(taken.unique()) == len(taken)
    assert int(taken.max()) < oracle.LAYOUT.page_bytes(8)
    assert int(codes.min()) == 8 * 576


def test_rows_of_other_requests_do_not_matter() -> None:
    call = ops.build(ops._params([3, 8, 5], 3, ring_size=4, content="normal"), 5)
    whole = clone(call)
    oracle.c2_verify(**whole)
    for block in range(3):
        rows = slice(3 * block, 3 * block + 3)
        alone = clone(call)
        per_row = ("kv_input", "positions", "req", "raw_out_loc", "out")
        oracle.c2_verify(**{**alone, **{name: alone[name][rows] for name in per_row}})
        assert not differing(alone["out"][rows], whole["out"][rows]).any()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"eps": float("nan")}, "eps"),
        ({"page_size": 6}, "page_size"),
        ({"ring_size": 2}, "ring_size"),
        ({"draft_len": 3}, "draft_len"),
        ({"kv_state": torch.zeros(5, 1024)}, "kv_state"),
    ],
)
def test_oracle_refuses(change: dict[str, Any], names: str) -> None:
    call = ops.build(ops.BAD_VERIFY, 0)
    with pytest.raises(ValueError, match=names):
        oracle.c2_verify(**{**call, **change})
