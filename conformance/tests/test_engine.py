"""Every check and contract catches the fault that it is there for, and passes what is right."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.calls import (
    POISONS,
    Placement,
    clone,
    geometry,
    leaves,
    restride,
)
from draftproof.conformance.engine.checks import Outcome, run_target, targets
from draftproof.conformance.engine.judges import Bits, Look, RoundedInterval, TopKSet
from draftproof.conformance.engine.replay import replay_target
from draftproof.conformance.engine.running import Subject, case_seed
from draftproof.conformance.engine.spec import BadInput, Case, Effect
from draftproof.conformance.interpreted import casts, interpreter, memcheck
from draftproof.conformance.tests.toys import SPEC, build, double_live

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a CUDA device")


def run(function: Callable[..., Any], check: str, **subject: Any) -> list[Outcome]:
    """The outcomes of one check on all its cases."""
    spec = subject.pop("spec", SPEC)
    under_test = Subject(spec, function, "toy", DEVICE, named_errors=True, **subject)
    chosen = targets(spec, "quick", cuda=DEVICE.type == "cuda")
    return [run_target(under_test, target) for target in chosen if target.check == check]


def statuses(function: Callable[..., Any], check: str, **subject: Any) -> set[str]:
    """The distinct statuses of one check."""
    return {outcome.status for outcome in run(function, check, **subject)}


def failures(function: Callable[..., Any], check: str, **subject: Any) -> str:
    """What one check reports; empty where it passes."""
    outcomes = run(function, check, **subject)
    assert not [outcome for outcome in outcomes if outcome.status == "error"]
    return "\n".join(outcome.detail for outcome in outcomes if outcome.status == "failed")


def element(tensor: Tensor, offset: int) -> Tensor:
    """The element that stands `offset` elements from a tensor's start, wherever that is."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


def after(change: Callable[..., None]) -> Callable[..., Tensor]:
    """The right implementation, followed by one fault."""

    def function(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
        returned = double_live(x, lens, out, counter, scale=scale)
        change(x=x, lens=lens, out=out, counter=counter, returned=returned)
        return returned

    return function


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU converts by itself")
def test_interpreted_casts_between_fp32_and_bf16_are_those_of_a_gpu() -> None:
    from draftproof.conformance.tests.toy_kernels import cast

    casts.repair()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    widened = cast(every, torch.float32)
    assert torch.equal(widened.view(torch.int32), every.view(torch.int16).int() << 16)

    # Every upper half with what lies below, at, and above the middle; a NaN stays one.
    upper = every.view(torch.int16).int() << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        exact = (upper | lower).view(torch.float32)
        got, nan = cast(exact, torch.bfloat16), exact.isnan()
        assert torch.equal(got.isnan(), nan)
        wanted = exact.bfloat16().view(torch.int16)
        assert torch.equal(got.view(torch.int16)[~nan], wanted[~nan])


@pytest.mark.parametrize("check", ["eager", "guards", "poison", "strided", "repeat", "invalid"])
def test_a_correct_implementation_passes_every_check(check: str) -> None:
    assert statuses(double_live, check) == {"passed"}


def test_a_correct_implementation_survives_fuzzing() -> None:
    assert statuses(double_live, "fuzz") == {"passed"}


@needs_cuda
def test_a_correct_implementation_replays_from_a_graph() -> None:
    assert statuses(double_live, "graph") == {"passed"}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the reason is given where there is no GPU")
def test_graphs_without_a_gpu_are_skipped_once_with_the_reason() -> None:
    outcomes = run(double_live, "graph")
    assert [outcome.status for outcome in outcomes] == ["skipped"]
    assert "CUDA device" in outcomes[0].detail


# ---------------------------------------------------------------- eager


def test_eager_sees_one_wrong_element_and_reports_it_whole() -> None:
    report = failures(after(lambda out, **_: out[1, 0].add_(1)), "eager")
    assert "double_live / eager / three_rows, implementation toy" in report
    assert "out: 1 of 15 elements are wrong" in report
    assert "[1, 0] expected" in report
    assert "(0x" in report
    assert "rule: out[r, c] = scale * x[r, c] for c < lens[r]" in report


def test_eager_sees_a_negative_zero_where_a_positive_is_due() -> None:
    report = failures(after(lambda out, x, **_: out.copy_(torch.where(x == 0, -0.0, out))), "eager")
    assert "expected 0.0 (0x00000000), got -0.0 (0x80000000)" in report


def test_eager_sees_a_nan_where_a_number_is_due() -> None:
    report = failures(after(lambda out, **_: out[0, 1].fill_(float("nan"))), "eager")
    assert "got nan (0x7fc00000)" in report


def test_eager_sees_a_number_where_a_nan_is_due() -> None:
    report = failures(after(lambda out, **_: out.nan_to_num_(0.0)), "eager")
    assert "expected nan" in report


def test_eager_sees_a_changed_input() -> None:
    report = failures(after(lambda x, **_: x[0, 0].add_(1)), "eager")
    assert "x: 1 of 15 elements are wrong" in report
    assert "the op does not write this tensor" in report


def test_eager_sees_a_returned_tensor_of_another_kind() -> None:
    def function(**args: Any) -> Tensor:
        return double_live(**args).long()

    assert "return: int64[3] instead of int32[3]" in failures(function, "eager")


def test_eager_sees_a_missing_return_value() -> None:
    def function(**args: Any) -> None:
        double_live(**args)

    assert "return: nothing was returned" in failures(function, "eager")


def test_eager_sees_a_legal_call_that_raises() -> None:
    def function(**args: Any) -> None:
        raise RuntimeError("no kernel image")

    assert "a legal call raised RuntimeError: no kernel image" in failures(function, "eager")


def test_an_output_exchanged_in_its_container_does_not_count_as_written() -> None:
    @dataclasses.dataclass
    class Box:
        out: Tensor

    def oracle(box: Box) -> None:
        box.out.fill_(7)

    def cheat(box: Box) -> None:
        box.out = torch.full_like(box.out, 7)

    class BoxSpec(type(SPEC)):  # type: ignore[misc]
        oracle = property(lambda self: oracle)

    spec = BoxSpec(
        name="box",
        family="box",
        summary="a toy",
        build=lambda params, seed: {"box": Box(torch.zeros(3))},
        effects=[Effect("box.out", rule="seven")],
        cases=[Case("one", {})],
        strategy=SPEC.strategy,
        bad_inputs=[],
        bad_input_params={},
    )
    assert failures(oracle, "eager", spec=spec) == ""
    assert "box.out: the caller's own object was changed" in failures(cheat, "eager", spec=spec)


def test_an_output_moved_to_other_memory_does_not_count_as_written() -> None:
    def moved(counter: Tensor, **_: Any) -> None:
        counter.data = counter.clone()

    def rebound(out: Tensor, **_: Any) -> None:
        out.set_(out.clone())

    for function, name in ((after(moved), "counter"), (after(rebound), "out")):
        assert f"{name}: the caller's own object was changed" in failures(function, "eager")


def test_a_result_without_data_on_the_device_is_a_failure() -> None:
    def function(**args: Any) -> Tensor:
        return double_live(**args).to("meta")

    assert "is due, not a torch.strided one on meta" in failures(function, "eager")


def test_a_call_that_ends_the_process_in_good_order_is_a_failure() -> None:
    def function(**args: Any) -> None:
        raise SystemExit(0)

    assert "a legal call raised SystemExit: 0" in failures(function, "eager")


# ---------------------------------------------------------------- guards


@pytest.mark.parametrize(
    ("offset", "where"),
    [(lambda out: -1, "before out"), (lambda out: out.stride(0) * 2 + 5, "behind out")],
)
def test_guards_see_a_stray_write_of_one_element(
    offset: Callable[[Tensor], int], where: str
) -> None:
    stray = after(lambda out, **_: element(out, offset(out)).fill_(3.0))
    assert f"4 bytes were written {where}" in failures(stray, "guards")


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.name)
def test_guards_see_a_stray_write_that_equals_a_poison(poison: Any) -> None:
    value = {"nan": 0x7FC0DEAD, "inf": 0x7F800000}[poison.name]

    def stray(out: Tensor, **_: Any) -> None:
        element(out, -1).view(torch.int32).fill_(value)

    assert "written before out" in failures(after(stray), "guards")


def test_guards_see_a_stray_write_between_strided_rows() -> None:
    def stray(out: Tensor, **_: Any) -> None:
        if out.stride(0) > out.shape[1]:
            element(out, out.shape[1]).fill_(3.0)

    report = failures(after(stray), "guards")
    assert "written between the rows of out" in report
    assert "rows_apart" in report
    assert "three_rows" not in report


def test_guards_see_a_value_read_one_element_beyond_the_end() -> None:
    def reads(x: Tensor, out: Tensor, **_: Any) -> None:
        out[0, 0] += element(x, x.shape[0] * x.shape[1])[0] * 0

    assert failures(after(reads), "guards") != ""


def test_guards_see_an_index_read_beyond_the_end_that_only_chooses() -> None:
    def reads(x: Tensor, lens: Tensor, out: Tensor, **_: Any) -> None:
        chosen = element(lens, len(lens))[0]
        out[0, 0] = torch.where(chosen == 1, out[0, 0] + 1, out[0, 0])

    assert "(red zones hold inf)" in failures(after(reads), "guards")


def test_the_quicker_interpreter_wraps_integers_and_leaves_nothing_behind() -> None:
    if torch.cuda.is_available():
        pytest.skip("compiled kernels are not interpreted")
    from draftproof.conformance.tests.toy_kernels import double

    core, runtime = sys.modules["triton.language.core"], sys.modules["triton.runtime.interpreter"]
    changed = [
        (core.tensor, "__init__"),
        (core.block_type, "__init__"),
        (runtime.TritonSemantic, "broadcast_impl_value"),
        (runtime.interpreter_builder, "options"),
    ]
    before = [getattr(*place) for place in changed]
    values = torch.tensor([2**31 - 1, -(2**31), 5, -7], dtype=torch.int32)
    for pairs in (1, 2, 4, 2):
        with interpreter.quicker():
            assert all(
                getattr(*place) is not was for place, was in zip(changed, before, strict=True)
            )
            got = double(values, pairs)
        # As compiled kernels do: the sum wraps, and no assertion ends the launch.
        expected = torch.tensor([-2, 0, 10, -14], dtype=torch.int32)
        assert torch.equal(got, expected[:, None].expand(4, pairs))
    assert [getattr(*place) for place in changed] == before


def test_guards_see_an_unused_read_of_an_interpreted_kernel() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("only the interpreter's lanes can be watched")
    from draftproof.conformance.tests.toy_kernels import copies_and_peeks

    def function(**args: Any) -> Tensor:
        returned = double_live(**args)
        copies_and_peeks(args["x"], peek=True)
        return returned

    def clean(**args: Any) -> Tensor:
        returned = double_live(**args)
        copies_and_peeks(args["x"], peek=False)
        return returned

    assert "read outside x, the first 4 bytes past its end" in failures(function, "guards")
    assert failures(clean, "guards") == ""


@given(
    lanes=st.lists(st.integers(0, 120), min_size=1, max_size=4),
    active=st.lists(st.booleans(), min_size=4, max_size=4),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_an_address_is_a_fault_only_within_an_allocation_and_outside_its_tensor(
    lanes: list[int], active: list[bool], size: int
) -> None:
    extents = [(40, 72, 48, 64, "x"), (80, 104, 88, 100, "y")]
    watch = memcheck._Watch(None, extents)
    watch._look("read", np.array(lanes, np.uint64), np.array(active[: len(lanes)]), size)
    faulty = {
        name
        for low, high, first, end, name in extents
        for lane, on in zip(lanes, active, strict=False)
        if on and low <= lane < high and not first <= lane <= end - size
    }
    # One access is one report, of the first tensor that it leaves.
    assert len(watch.faults) == bool(faulty)
    assert all(any(f"outside {name}," in fault for name in faulty) for fault in watch.faults)


# ---------------------------------------------------------------- poison


def test_poison_sees_an_output_that_depends_on_what_was_there() -> None:
    def function(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
        stale = out[0, 0].clone()
        returned = double_live(x, lens, out, counter, scale=scale)
        out[0, 0] += torch.where(stale < -1e16, 1.0, 0.0)
        out[0, 0] += torch.where(stale.isnan(), 1.0, 0.0)
        return returned

    assert failures(function, "eager") == ""
    assert "outputs held 0xff bytes" in failures(function, "poison")


def test_poison_keeps_what_the_op_reads() -> None:
    """counter += 1 reads its old content: a fill would be a wrong input, and is not made."""
    assert failures(double_live, "poison") == ""


def test_poison_sees_a_returned_tensor_that_is_not_written() -> None:
    def function(**args: Any) -> Tensor:
        returned = torch.empty_like(double_live(**args))
        returned[0] = args["lens"][0]
        return returned

    assert failures(function, "poison") != ""


# ---------------------------------------------------------------- strided


def test_strided_sees_an_implementation_that_assumes_packed_rows() -> None:
    def function(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
        packed = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
        return double_live(packed, lens, out, counter, scale=scale)

    assert failures(function, "eager") == ""
    assert "(rows spread by 3 elements" in failures(function, "strided")


def test_strided_sees_an_implementation_that_assumes_an_aligned_base() -> None:
    def aligned(out: Tensor, **_: Any) -> None:
        if out.data_ptr() % 16:
            out[0, 0] += 1

    assert failures(after(aligned), "eager") == ""
    assert "(bases shifted by one element)" in failures(after(aligned), "strided")


def test_strided_sees_the_strides_of_another_tensor() -> None:
    def function(lens: Tensor, counter: Tensor, **rest: Any) -> Tensor:
        reach = (len(lens) - 1) * counter.stride(0) + lens.storage_offset()
        if reach < lens.untyped_storage().nbytes() // lens.element_size():
            lens = lens.as_strided(lens.shape, counter.stride())
        return double_live(lens=lens, counter=counter, **rest)

    assert failures(function, "eager") == ""
    assert "(rows spread by 3 elements" in failures(function, "strided")


def test_a_call_that_this_machine_has_no_memory_for_is_skipped_with_the_reason() -> None:
    def build_none(params: Any, seed: int) -> dict[str, Any]:
        return {"x": torch.empty(1 << 60, dtype=torch.int8)}

    for outcome in run(double_live, "eager", spec=dataclasses.replace(SPEC, build=build_none)):
        assert outcome.status == "skipped", outcome
        assert "not enough memory" in outcome.detail


# ---------------------------------------------------------------- repeat and graph


def test_repeat_sees_a_wrong_answer_on_the_second_call_only() -> None:
    calls = itertools.count(1)

    def second(out: Tensor, **_: Any) -> None:
        if next(calls) == 2:
            out[0, 0] += 1

    assert "(call 2 on the same inputs)" in failures(after(second), "repeat")


def test_repeat_sees_results_that_differ_between_runs_within_the_contract() -> None:
    class Loose(type(SPEC)):  # type: ignore[misc]
        pass

    wide = RoundedInterval(
        lambda before, got, path: (
            torch.full(before["out"].shape, -1e30, dtype=torch.float64),
            torch.full(before["out"].shape, 1e30, dtype=torch.float64),
        )
    )
    effects = [Effect("out", rule="anything near", judge=wide), *SPEC.effects[1:]]
    cases = [Case("three_rows", {"rows": 3, "width": 5})]
    spec = dataclasses.replace(SPEC, effects=effects, cases=cases)
    drift = itertools.count()
    function = after(lambda out, **_: out.add_(float(next(drift))))
    assert failures(function, "eager", spec=spec) == ""
    assert "calls 1 and 2 differ" in failures(function, "repeat", spec=spec)


def test_repeat_sees_a_number_remembered_by_shape(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, rescale=lambda args: {**args, "scale": args["scale"] + 1})
    known: dict[torch.Size, float] = {}

    def function(x: Tensor, *, scale: float, **tensors: Tensor) -> Tensor:
        return double_live(x, **tensors, scale=known.setdefault(x.shape, scale))

    assert statuses(double_live, "repeat", spec=spec) == {"passed"}
    failed = [o for o in run(function, "repeat", spec=spec, failures=tmp_path) if o.detail]
    assert "other numbers, same memory" in failed[0].detail
    assert failed[0].case_file is not None
    content = casefile.read(failed[0].case_file)
    known.clear()
    again = Subject(spec, function, "toy", DEVICE)
    assert run_target(again, replay_target(content, spec)).status == "failed"


def test_repeat_sees_an_answer_remembered_by_address() -> None:
    seen: dict[int, Tensor] = {}

    def function(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
        kept = seen.setdefault(x.data_ptr(), x.clone())
        return double_live(kept, lens, out, counter, scale=scale)

    assert "(changed inputs 0, same memory)" in failures(function, "repeat")


def test_repeat_sees_a_later_call_write_into_what_an_earlier_one_returned() -> None:
    rooms: dict[torch.Size, Tensor] = {}

    def function(lens: Tensor, **rest: Any) -> Tensor:
        room = rooms.setdefault(lens.shape, torch.empty_like(lens))
        return room.copy_(double_live(lens=lens, **rest))

    def aliasing(lens: Tensor, **rest: Any) -> Tensor:
        double_live(lens=lens, **rest)
        return lens

    assert failures(function, "eager") == ""
    assert "a later call wrote into what an earlier one returned" in failures(function, "repeat")
    assert failures(aliasing, "repeat") == ""


@needs_cuda
def test_graph_sees_a_length_that_was_captured() -> None:
    def function(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            function.lens = lens.clone()  # type: ignore[attr-defined]
        kept = function.lens  # type: ignore[attr-defined]
        double_live(x, kept, out, counter, scale=scale)
        return lens.clone()

    assert failures(function, "eager") == ""
    assert "replay 0 of" in failures(function, "graph")


@needs_cuda
def test_graph_sees_work_that_was_not_captured() -> None:
    def function(**args: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return args["lens"].clone()
        return double_live(**args)

    assert "replay 0 of" in failures(function, "graph")


@needs_cuda
def test_graph_sees_a_value_read_on_the_host() -> None:
    def function(**args: Any) -> Tensor:
        int(args["lens"][0])
        return double_live(**args)

    assert "capture failed" in failures(function, "graph")


@needs_cuda
def test_a_function_that_cannot_be_captured_is_skipped_with_its_reason() -> None:
    outcomes = run(double_live, "graph", graph_reason="made for reading")
    assert {(outcome.status, outcome.detail) for outcome in outcomes} == {
        ("skipped", "made for reading")
    }


# ---------------------------------------------------------------- invalid


def test_invalid_sees_an_accepted_bad_input() -> None:
    def function(x: Tensor, **rest: Any) -> Tensor:
        return double_live(x.reshape(-1, x.shape[-1]).expand(3, -1), **rest)

    assert "accepted, where ValueError is due" in failures(function, "invalid")


def test_invalid_sees_another_error() -> None:
    def function(**args: Any) -> Tensor:
        try:
            return double_live(**args)
        except ValueError as error:
            raise RuntimeError("cannot") from error

    report = failures(function, "invalid")
    assert "raised RuntimeError (cannot) instead of ValueError" in report


def test_invalid_sees_a_write_before_the_error() -> None:
    def function(**args: Any) -> Tensor:
        args["counter"] += 1
        return double_live(**args)

    assert "raised ValueError, but after writing counter" in failures(function, "invalid")


def test_invalid_sees_an_error_that_does_not_name_the_argument() -> None:
    def function(**args: Any) -> Tensor:
        try:
            return double_live(**args)
        except ValueError:
            raise ValueError("bad call") from None

    assert "the error does not name 'x'" in failures(function, "invalid")


# ---------------------------------------------------------------- fuzz and case files


def test_fuzz_finds_a_rare_fault_makes_it_small_and_saves_it(tmp_path: Path) -> None:
    def rare(out: Tensor, **_: Any) -> None:
        if out.shape[0] >= 2 and out.shape[1] >= 6:
            out[1, 5] += 1

    function = after(rare)
    assert failures(function, "eager") == ""
    (outcome,) = run(function, "fuzz", failures=tmp_path)
    assert outcome.status == "failed"
    assert "params: {'rows': 2, 'width': 6, 'zero': False}" in outcome.detail
    assert f"draftproof replay {outcome.case_file} --impl toy" in outcome.detail
    assert outcome.case_file is not None
    content = casefile.read(outcome.case_file)
    under_test = Subject(SPEC, function, "toy", DEVICE)
    assert run_target(under_test, replay_target(content, SPEC)).status == "failed"
    right = Subject(SPEC, double_live, "toy", DEVICE)
    assert run_target(right, replay_target(content, SPEC)).status == "passed"


@pytest.mark.parametrize("check", ["eager", "guards", "poison", "strided", "repeat", "invalid"])
def test_a_failure_of_any_check_fails_again_when_it_is_replayed(check: str, tmp_path: Path) -> None:
    calls = itertools.count(1)
    faults: dict[str, Callable[..., Any]] = {
        "eager": after(lambda out, **_: out[0, 0].add_(1)),
        "guards": after(lambda out, **_: element(out, -1).fill_(3.0)),
        "poison": after(lambda out, lens, **_: out.nan_to_num_(5.0)),
        "strided": after(lambda out, **_: out[0, 0].add_(1) if out.data_ptr() % 16 else None),
        "repeat": after(lambda out, **_: out[0, 0].add_(1) if next(calls) > 1 else None),
        "invalid": lambda **args: None,
    }
    outcome = next(
        outcome
        for outcome in run(faults[check], check, failures=tmp_path)
        if outcome.status == "failed"
    )
    assert outcome.case_file is not None
    content = casefile.read(outcome.case_file)
    subject = Subject(SPEC, faults[check], "toy", DEVICE)
    assert run_target(subject, replay_target(content, SPEC)).status == "failed"


def test_a_case_file_gives_the_same_call_back(tmp_path: Path) -> None:
    call = build({"rows": 3, "width": 4, "gap": 2, "nan": True}, 5)
    call["twin"] = call["out"]
    path = casefile.write(tmp_path / "case.json", casefile.CaseFile("op", "eager", "c", [call]))
    back = casefile.read(path).calls[0]
    assert casefile.same([call], [back])
    assert back["twin"].data_ptr() == back["out"].data_ptr()
    assert back["scale"] == call["scale"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("harm", ["truncated", "altered", "missing"])
def test_a_harmed_case_file_is_refused_in_one_line(suffix: str, harm: str, tmp_path: Path) -> None:
    call = build({"rows": 3, "width": 4}, 5)
    path = casefile.write(tmp_path / "case.json", casefile.CaseFile("op", "eager", "c", [call]))
    victim = path.with_suffix(suffix)
    content = bytearray(victim.read_bytes())
    if harm == "truncated":
        victim.write_bytes(content[: len(content) // 2])
    elif harm == "altered":
        at = content.index(b'"eager"') + 1 if suffix == ".json" else len(content) - 3
        content[at] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    with pytest.raises(casefile.BadCaseFile) as caught:
        casefile.read(path)
    assert "\n" not in str(caught.value)
    assert "case" in str(caught.value)


# ---------------------------------------------------------------- the suite's own faults


def test_a_case_in_which_the_oracle_changes_nothing_is_an_error() -> None:
    spec = dataclasses.replace(SPEC, cases=[Case("nothing", {"rows": 0, "width": 4})])
    (outcome,) = run(double_live, "eager", spec=spec)
    assert outcome.status == "error"
    assert "the case proves nothing" in outcome.detail


def test_a_case_marked_noop_that_changes_something_is_an_error() -> None:
    spec = dataclasses.replace(SPEC, cases=[Case("some", {"rows": 2, "width": 4}, noop=True)])
    (outcome,) = run(double_live, "eager", spec=spec)
    assert outcome.status == "error"


def test_replays_of_another_geometry_are_an_error() -> None:
    spec = dataclasses.replace(
        SPEC, replays=lambda params: [{**params, "width": 9}] * 3, cases=SPEC.cases[:1]
    )
    (outcome,) = run(double_live, "repeat", spec=spec)
    assert outcome.status == "error"
    assert "geometry" in outcome.detail


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="case 'twice' is defined twice"):
        dataclasses.replace(SPEC, cases=[Case("twice", {}), Case("twice", {})])


def test_an_edit_that_leaves_the_call_good_shows_as_accepted() -> None:
    spec = dataclasses.replace(SPEC, bad_inputs=[BadInput("none", lambda args: args, names="x")])
    assert "accepted" in failures(double_live, "invalid", spec=spec)


# ---------------------------------------------------------------- memory


def test_a_placement_keeps_geometry_and_moves_bases_by_one_element() -> None:
    call = build({"rows": 3, "width": 4, "gap": 2}, 1)
    for shifted, remainder in ((False, 0), (True, 4)):
        placement = Placement(call, DEVICE, shifted=shifted)
        for path, view in placement.views.items():
            tensor = leaves(call)[path]
            assert view.shape == tensor.shape
            assert view.stride() == tensor.stride()
            assert torch.equal(view.cpu(), tensor)
        assert placement.views["x"].data_ptr() % 16 == remainder


def test_tensors_that_share_storage_share_it_again() -> None:
    base = torch.arange(12)
    placement = Placement({"a": base[:6], "b": base[3:]}, DEVICE)
    placement.views["a"][5] = 77
    assert int(placement.views["b"][2]) == 77


def test_expanded_tensors_stay_expanded() -> None:
    placement = Placement({"a": torch.arange(4)[None].expand(1000, 4)}, DEVICE)
    assert placement.views["a"].stride() == (0, 1)
    assert placement.extents()[0][3] - placement.extents()[0][2] == 32


def test_a_restrided_call_holds_the_same_values_further_apart() -> None:
    call = build({"rows": 3, "width": 4}, 1)
    spread = restride(call, {"x": "any", "out": "rows", "lens": "any"}, 3)
    assert spread["x"].stride() == (19, 4)
    assert spread["out"].stride() == (7, 1)
    assert spread["lens"].stride() == (4,)
    assert all(torch.equal(spread[name], call[name]) for name in ("x", "out", "lens"))
    assert geometry(spread) != geometry(call)


def test_a_clone_shares_nothing_with_its_original() -> None:
    call = build({"rows": 2, "width": 4}, 1)
    copied = clone(call)
    copied["x"].zero_()
    assert bool(call["x"].any())


def test_seeds_depend_on_the_run_and_the_case_alone() -> None:
    assert case_seed(0, "a") == case_seed(0, "a")
    assert len({case_seed(0, "a"), case_seed(1, "a"), case_seed(0, "b")}) == 3


# ---------------------------------------------------------------- judges


def look(wanted: Tensor, got: Tensor, **before: Any) -> Look:
    return Look(before, "leaf", wanted, got, {"leaf": wanted}, {"leaf": got})


def test_bits_takes_any_nan_for_a_nan_unless_payloads_count() -> None:
    one = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert Bits().wrong(look(one, other)).tolist() == [False, False]
    assert Bits(nan="payload").wrong(look(one, other)).tolist() == [True, False]


def test_an_interval_holds_its_ends_and_nothing_beyond() -> None:
    step = torch.tensor([1.0], dtype=torch.bfloat16)
    judge = RoundedInterval(
        lambda before, got, path: (
            torch.tensor([0.9999], dtype=torch.float64),
            torch.tensor([1.0001], dtype=torch.float64),
        )
    )
    above = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert judge.wrong(look(step, step)).tolist() == [False]
    assert judge.wrong(look(step, above)).tolist() == [True]
    assert judge.wrong(look(step, step * float("nan"))).tolist() == [True]


def test_an_interval_next_to_a_rounding_boundary_allows_both_neighbours() -> None:
    tie = 1.0 + 2.0**-8
    judge = RoundedInterval(
        lambda before, got, path: (
            torch.tensor([tie - 1e-9], dtype=torch.float64),
            torch.tensor([tie + 1e-9], dtype=torch.float64),
        )
    )
    for value, wrong in ((1.0, False), (1.0 + 2.0**-7, False), (1.0 + 2.0**-6, True)):
        got = torch.tensor([value], dtype=torch.bfloat16)
        assert judge.wrong(look(got, got)).tolist() == [wrong]


def test_an_interval_of_nan_wants_a_nan() -> None:
    judge = RoundedInterval(
        lambda before, got, path: (torch.tensor([float("nan")], dtype=torch.float64),) * 2
    )
    assert judge.wrong(look(torch.ones(1), torch.ones(1))).tolist() == [True]
    assert judge.wrong(look(torch.ones(1), torch.ones(1) * float("nan"))).tolist() == [False]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("scores", "places", "kept", "right"),
    [
        ([3.0, 2.0, 1.0], 2, [1, 1, 0], True),
        ([3.0, 2.0, 1.0], 2, [1, 0, 1], False),
        ([2.0, 2.0, 2.0], 2, [1, 0, 1], True),
        ([2.0, 2.0, 2.0], 2, [1, 1, 1], False),
        ([2.0, 2.0, 2.0], 2, [1, 0, 0], False),
        ([-0.0, 0.0, -1.0], 1, [0, 1, 0], True),
        ([NAN, 5.0, 4.0], 2, [0, 1, 0], True),
        ([NAN, 5.0, 4.0], 2, [1, 1, 0], False),
        ([NAN, INF, 4.0], 1, [0, 0, 0], True),
        ([INF, INF, 4.0], 1, [0, 1, 0], True),
        ([-INF, -INF, 4.0], 2, [0, 0, 1], True),
        ([-INF, -INF, 4.0], 2, [1, 0, 1], False),
    ],
)
def test_a_top_k_set_takes_ties_either_way_and_nothing_else(
    scores: list[float], places: int, kept: list[int], right: bool
) -> None:
    judge = TopKSet(
        scores=lambda before: torch.tensor([scores]),
        places=lambda before: places,
        item_width=lambda before: 2,
    )
    # Items of two columns, the last cut to one.
    leaf = torch.tensor([kept]).bool().repeat_interleave(2, dim=1)[:, :-1]
    assert bool(judge.wrong(look(leaf, leaf)).any()) == (not right)


def test_a_top_k_set_sees_an_item_that_is_half_kept() -> None:
    judge = TopKSet(
        scores=lambda before: torch.tensor([[3.0, 1.0]]),
        places=lambda before: 1,
        item_width=lambda before: 2,
    )
    leaf = torch.tensor([[True, False, False, False]])
    assert judge.wrong(look(leaf, leaf)).tolist() == [[False, True, False, False]]
