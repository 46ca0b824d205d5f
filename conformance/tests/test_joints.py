"""The joints of a spec on ops of a few lines: parts, laws, roundings, strides, leaves of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.calls import leaves, restride
from draftproof.conformance.engine.checks import Outcome, run_target, targets
from draftproof.conformance.engine.judges import Anything, Bits, Look, RoundedInterval
from draftproof.conformance.engine.laws import LawRun
from draftproof.conformance.engine.replay import replay_target
from draftproof.conformance.engine.running import Subject, Violation, framed
from draftproof.conformance.engine.spec import Args, Case, Effect, Law, OpSpec, Params, Part

CPU = torch.device("cpu")
BOX_BYTES = 13


def box(x: Tensor, room: Tensor) -> None:
    """room[r] = x[r, :4] as bf16 in bytes 0-7, a code in byte 8; bytes 9-12 are nobody's."""
    room[:, :8] = x.bfloat16().contiguous().view(torch.uint8)
    room[:, 8] = 7


@dataclasses.dataclass(frozen=True)
class BoxSpec(OpSpec):
    """An op of one uint8 leaf that holds values of two kinds."""

    @property
    def oracle(self) -> Callable[..., Any]:  # type: ignore[override]
        return box


def build(params: Params, seed: int) -> Args:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(params["rows"], 4, generator=generator),
        "room": torch.randint(
            0, 256, (params["rows"], BOX_BYTES), generator=generator, dtype=torch.uint8
        ),
    }


def columns(first: int, last: int) -> Callable[[Args, str], Tensor]:
    """The region of some columns of `room`, counted in bytes."""

    def region(before: Args, path: str) -> Tensor:
        at = torch.arange(BOX_BYTES, device=before["room"].device)
        return ((at >= first) & (at < last)).expand(before["room"].shape)

    return region


def four_of_six(before: Args, path: str) -> Tensor:
    """Of the six bf16 that fit into a row, the first four."""
    return (torch.arange(6, device=before["room"].device) < 4).expand(len(before["room"]), 6)


def within_one(before: Args, got: Any, path: str) -> tuple[Tensor, Tensor]:
    """Codes 6 to 8 are legal."""
    lower = torch.full(before["room"].shape, 6.0, dtype=torch.float64)
    return lower, lower + 2.0


VALUES = Part("the values", Bits(nan="any"), four_of_six, torch.bfloat16)
CODE = Part("the code", RoundedInterval(within_one, lambda bound: bound.to(torch.uint8)), None)


def spec_of(*parts: Part, laws: Sequence[Law] = ()) -> OpSpec:
    return BoxSpec(
        name="box",
        family="box",
        summary="a toy",
        build=build,
        effects=[Effect("room", parts=parts, reads=True)],
        cases=[Case("two_rows", {"rows": 2})],
        strategy=lambda: st.just({"rows": 1}),
        bad_inputs=[],
        bad_input_params={},
        laws=laws,
    )


BOX = spec_of(VALUES, dataclasses.replace(CODE, region=columns(8, 9)))


def outcomes(
    spec: OpSpec, check: str, function: Callable[..., Any], **subject: Any
) -> list[Outcome]:
    under_test = Subject(spec, function, "toy", CPU, **subject)
    return [
        run_target(under_test, target)
        for target in targets(spec, "quick", cuda=False)
        if target.check == check
    ]


def only(spec: OpSpec, check: str, function: Callable[..., Any], **subject: Any) -> Outcome:
    (outcome,) = outcomes(spec, check, function, **subject)
    return outcome


def boxed(change: Callable[[Tensor], object]) -> Callable[..., None]:
    """The right implementation, followed by one fault."""

    def function(x: Tensor, room: Tensor) -> None:
        box(x, room)
        change(room)

    return function


# ---------------------------------------------------------------- parts


def test_each_part_of_a_leaf_is_judged_its_own_way() -> None:
    assert only(BOX, "eager", box).status == "passed"
    assert only(BOX, "eager", boxed(lambda room: room[:, 8].fill_(6))).status == "passed"
    code = only(BOX, "eager", boxed(lambda room: room[:, 8].fill_(9)))
    assert code.status == "failed"
    assert "the code" in code.detail
    assert "the values" not in code.detail
    value = only(BOX, "eager", boxed(lambda room: room[1, 1].bitwise_xor_(0x80)))
    assert value.status == "failed"
    assert "the values" in value.detail
    assert "[1, 0]" in value.detail


def test_a_part_read_as_another_type_takes_any_nan_of_that_type() -> None:
    def build_nan(params: Params, seed: int) -> Args:
        call = build(params, seed)
        call["x"][0, 2] = float("nan")
        return call

    spec = dataclasses.replace(BOX, build=build_nan)
    assert only(spec, "eager", boxed(lambda room: room[0, 4].fill_(0xC1))).status == "passed"
    assert only(spec, "eager", boxed(lambda room: room[0, 5].fill_(0))).status == "failed"


@pytest.mark.parametrize("byte", [9, 10, 11, 12])
def test_what_no_part_covers_must_be_as_the_oracle_left_it(byte: int) -> None:
    fault = boxed(lambda room: room[0, byte].bitwise_xor_(1))
    assert only(BOX, "eager", fault).status == "failed"


def test_parts_that_cover_one_byte_twice_are_an_error_of_the_spec() -> None:
    spec = spec_of(VALUES, dataclasses.replace(CODE, region=columns(7, 9)))
    outcome = only(spec, "eager", box)
    assert outcome.status == "error"
    assert "the values" in outcome.detail
    assert "the code" in outcome.detail


def test_anything_frees_its_part_alone() -> None:
    spec = spec_of(
        VALUES,
        dataclasses.replace(CODE, region=columns(8, 9)),
        Part("scratch", Anything(), columns(10, 13)),
    )
    assert only(spec, "eager", boxed(lambda room: room[:, 10:].fill_(1))).status == "passed"
    assert only(spec, "eager", boxed(lambda room: room[:, 9:].add_(1))).status == "failed"


def test_an_effect_has_either_parts_or_a_rule() -> None:
    with pytest.raises(ValueError, match="'room': either parts or a rule"):
        Effect("room", rule="r", parts=[VALUES])
    with pytest.raises(ValueError, match="'room': a rule is due"):
        Effect("room")


# ---------------------------------------------------------------- the first match wins


def test_of_two_effects_and_of_two_strides_that_match_the_first_counts() -> None:
    first = dataclasses.replace(
        BOX,
        effects=[Effect("room", "free", Anything()), Effect("r*", "bits")],
        strides={"x": "rows", "*": "any"},
    )
    assert only(first, "eager", boxed(lambda room: room.add_(1))).status == "passed"
    turned = dataclasses.replace(first, effects=[*reversed(first.effects)])
    assert only(turned, "eager", boxed(lambda room: room.add_(1))).status == "failed"

    def packed_columns(x: Tensor, room: Tensor) -> None:
        assert x.stride(1) == 1
        box(x, room)

    alone = {"effects": BOX.effects}
    rows_first = dataclasses.replace(first, **alone, strides={"x": "rows", "*": "any"})
    assert only(rows_first, "strided", packed_columns).status == "passed"
    any_first = dataclasses.replace(first, **alone, strides={"*": "any", "x": "rows"})
    assert only(any_first, "strided", packed_columns).status == "failed"


@pytest.mark.parametrize(("kind", "free"), [("outer", {0}), ("rows", {0, 1}), ("any", {0, 1, 2})])
def test_each_kind_of_stride_frees_what_it_says(kind: str, free: set[int]) -> None:
    cube = torch.arange(40.0).view(2, 5, 4)
    spread = restride({"cube": cube}, {"cube": kind}, 3)["cube"]
    assert torch.equal(spread, cube)
    follows = [spread.stride(1) * 5, spread.stride(2) * 4, 1]
    assert {dim for dim in range(3) if spread.stride(dim) > follows[dim]} == free


# ---------------------------------------------------------------- roundings


def one_interval(low: float, high: float, rounding: Any = None) -> RoundedInterval:
    ends = (torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64))
    return RoundedInterval(lambda before, got, path: ends, rounding)


def wrong(judge: RoundedInterval, got: Tensor) -> bool:
    return bool(judge.wrong(Look({}, "leaf", got, got, {"leaf": got}, {"leaf": got})))


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.float16, 2.0**-10), (torch.float8_e4m3fn, 2.0**-3)]
)
def test_an_interval_beside_a_tie_of_any_type_allows_both_neighbours(
    dtype: torch.dtype, step: float
) -> None:
    judge = one_interval(1.0 + step / 2 - 1e-9, 1.0 + step / 2 + 1e-9)
    for value, bad in (
        (1.0 - step / 2, True),
        (1.0, False),
        (1.0 + step, False),
        (1 + 2 * step, True),
    ):
        assert wrong(judge, torch.tensor([value]).to(dtype)) is bad


def test_an_interval_of_e4m3_saturates() -> None:
    assert not wrong(one_interval(400.0, 1e9), torch.tensor([448.0]).to(torch.float8_e4m3fn))


def test_an_interval_may_be_one_of_exponent_codes() -> None:
    def code(bound: Tensor) -> Tensor:
        return (torch.frexp(bound).exponent - 1 + 127).to(torch.uint8)

    judge = one_interval(3.999, 4.001, code)
    for exponent, bad in ((127, True), (128, False), (129, False), (130, True)):
        assert wrong(judge, torch.tensor([exponent], dtype=torch.uint8)) is bad


def test_an_interval_of_a_type_without_a_rounding_is_refused() -> None:
    with pytest.raises(TypeError, match="no interval of"):
        wrong(one_interval(0.0, 1.0), torch.tensor([1], dtype=torch.int32))


# ---------------------------------------------------------------- laws


def twice_is_once(run: LawRun, args: Args) -> None:
    once = run.call("box", args)
    twice = run.call("box", once.args)
    run.same("room after a second call", once.args["room"], twice.args["room"])


TWICE = Law("twice", "a second call changes nothing", twice_is_once, [Case("rows", {"rows": 2})])


def test_a_law_holds_an_implementation_against_itself(tmp_path: Path) -> None:
    # Legal both times, but not the same code each time: only the law sees it.
    def restless(x: Tensor, room: Tensor) -> None:
        code = 6 + int(room[0, 8] == 6)
        box(x, room)
        room[:, 8] = code

    spec = dataclasses.replace(BOX, laws=[TWICE])
    assert only(spec, "laws", box).status == "passed"
    assert only(spec, "eager", restless).status == "passed"
    outcome = only(spec, "laws", restless, failures=tmp_path)
    assert outcome.status == "failed"
    assert "a second call changes nothing" in outcome.detail
    assert outcome.case_file is not None
    content = casefile.read(outcome.case_file)
    assert content.check == "laws"
    assert content.case == "twice.rows"
    for function, status in ((restless, "failed"), (box, "passed")):
        again = run_target(Subject(spec, function, "toy", CPU), replay_target(content, spec))
        assert again.status == status


def test_a_law_over_an_op_that_is_not_there_is_not_provided() -> None:
    law = dataclasses.replace(TWICE, ops=["unbox"])
    spec = dataclasses.replace(BOX, laws=[law])
    outcome = only(spec, "laws", box)
    assert outcome.status == "not_provided"
    assert "unbox" in outcome.detail
    assert only(spec, "laws", box, peers=lambda op: box).status == "passed"


def test_a_law_that_calls_nothing_or_writes_into_its_call_is_an_error() -> None:
    def idle(run: LawRun, args: Args) -> None:
        pass

    def scribbles(run: LawRun, args: Args) -> None:
        run.call("box", args)
        args["x"].zero_()

    for holds, said in ((idle, "calls nothing"), (scribbles, "writes into x")):
        spec = dataclasses.replace(BOX, laws=[dataclasses.replace(TWICE, holds=holds)])
        outcome = only(spec, "laws", box)
        assert outcome.status == "error"
        assert said in outcome.detail


def test_a_law_sees_a_stray_write_of_a_call() -> None:
    def strays(x: Tensor, room: Tensor) -> None:
        box(x, room)
        room.as_strided((1,), (1,), room.storage_offset() + room.numel())[0] ^= 1

    spec = dataclasses.replace(BOX, laws=[TWICE])
    assert only(spec, "laws", strays).status == "failed"


# ---------------------------------------------------------------- moved tensors


def test_a_call_that_replaces_a_tensor_within_its_argument_is_seen_wherever_it_runs() -> None:
    def moves(steps: list[Tensor]) -> None:
        steps[0] = steps[0].clone()

    subject = Subject(BOX, moves, "toy", CPU)
    with pytest.raises(Violation, match=r"steps\[0\]: the caller's own object was changed"):
        framed(subject, {"steps": [torch.zeros(3)]})


# ---------------------------------------------------------------- leaves of case files


class Pair(NamedTuple):
    """A tuple with names, as callers hand to kernels."""

    codes: Any
    scale: Any


TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(TYPES))
    rows, width, gap = draw(st.integers(0, 3)), draw(st.integers(0, 4)), draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    content = torch.randint(
        0, high, (rows * (width + gap) * size,), generator=generator, dtype=torch.uint8
    )
    return content.view(dtype).view(rows, width + gap)[:, :width]


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(TYPES),
)
trees = st.recursive(
    st.one_of(tensors(), plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(lambda value: SimpleNamespace(value=value), inner),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_a_case_file_gives_back_every_kind_of_leaf(
    tmp_path_factory: pytest.TempPathFactory, tree: Any
) -> None:
    call = {"argument": tree}
    folder = tmp_path_factory.mktemp("case")
    written = casefile.CaseFile("op", "eager", "c", [call])
    back = casefile.read(casefile.write(folder / "case.json", written)).calls[0]
    assert casefile.same([call], [back])
    assert leaves(call).keys() == leaves(back).keys()


def test_a_named_tuple_comes_back_with_its_names(tmp_path: Path) -> None:
    call = {"pair": Pair(torch.ones(2), torch.float16)}
    path = casefile.write(tmp_path / "c.json", casefile.CaseFile("op", "eager", "c", [call]))
    pair = casefile.read(path).calls[0]["pair"]
    codes, scale = pair
    assert torch.equal(codes, torch.ones(2))
    assert pair.codes is codes
    assert scale is torch.float16
    assert pair.scale is scale
