"""Every kernel compiles for GPUs that are not here and does not spill; the gate would notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.gate import compile_gate
from draftproof.conformance.gate.compile_gate import Compiled, Report

CONTROLS = Path(__file__).with_name("kernels_for_the_gate.py")


@pytest.fixture(scope="module")
def controls() -> Iterator[Report]:
    return compile_gate.compile_kernels(["c128_cleanup"], [str(CONTROLS)], variants=1)


def of_kernel(report: Report, name: str) -> dict[str, Compiled]:
    return {kernel.target: kernel for kernel in report.kernels if kernel.kernel == name}


def faulty(report: Report, name: str) -> set[str]:
    """Give the targets on which the gate refuses a kernel."""
    found = of_kernel(report, name)
    assert set(found) == set(compile_gate.TARGETS)
    return {
        target
        for target, kernel in found.items()
        if compile_gate.faults(Report(report.triton, [kernel], []))
    }


@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_every_gpu_and_spills_nowhere() -> None:
    report = compile_gate.compile_kernels(list(load_specs()))
    # A kernel that several ops launch alike is compiled once, for the first of them.
    assert {kernel.op for kernel in report.kernels} == set(load_specs()) - {"wo_a_partials"}
    assert {kernel.target for kernel in report.kernels} == set(compile_gate.TARGETS)
    assert {kernel.aligned for kernel in report.kernels} == {True, False}
    assert not compile_gate.faults(report)


@pytest.mark.timeout(300)
def test_gate_refuses_a_kernel_that_spills_on_every_target(controls: Report) -> None:
    assert faulty(controls, "holds_too_much") == set(compile_gate.TARGETS)
    for kernel in of_kernel(controls, "holds_too_much").values():
        assert kernel.stack > 0
        assert kernel.spills > 0


@pytest.mark.timeout(300)
def test_gate_passes_a_kernel_that_does_not_spill(controls: Report) -> None:
    assert not faulty(controls, "holds_little")
    for kernel in of_kernel(controls, "holds_little").values():
        assert kernel.registers > 0


@pytest.mark.timeout(300)
def test_gate_reads_the_shared_memory_that_a_reduction_over_warps_needs(controls: Report) -> None:
    for kernel in of_kernel(controls, "holds_too_much").values():
        assert kernel.shared > 0
    for kernel in of_kernel(controls, "holds_little").values():
        assert kernel.shared == 0


@pytest.mark.parametrize("target", compile_gate.TARGETS)
def test_gate_refuses_a_byte_of_shared_memory_more_than_there_is(target: str) -> None:
    for more in (0, 1):
        shared = compile_gate.SHARED_BYTES[target] + more
        kernel = Compiled("op", "triton", "case", True, target=target, shared=shared)
        assert len(compile_gate.faults(Report("", [kernel], []))) == more


@pytest.mark.timeout(300)
def test_gate_tells_why_a_kernel_does_not_compile(controls: Report) -> None:
    assert faulty(controls, "does_not_compile") == set(compile_gate.TARGETS)
    for kernel in of_kernel(controls, "does_not_compile").values():
        assert "made to fail" in kernel.error


@pytest.mark.timeout(300)
def test_gate_sees_which_options_a_launch_leaves_open(controls: Report) -> None:
    for kernel in controls.kernels:
        open_ones = ["enable_fp_fusion"] if kernel.kernel == "does_not_compile" else []
        assert kernel.unstated == open_ones


def test_gate_refuses_open_options_only_of_the_projects_own_kernels() -> None:
    for implementation, told in (("triton", 1), ("mine.py", 0)):
        kernel = Compiled("op", implementation, "case", True, unstated=["enable_fp_fusion"])
        assert len(compile_gate.faults(Report("", [kernel], []))) == told


def test_gate_refuses_a_kernel_that_no_case_launches() -> None:
    launched = Compiled("op", "triton", "case", True)
    assert compile_gate.faults(Report("", [launched], ["family.kernel"])) == [
        "family.kernel: no case launches it"
    ]


def test_gate_refuses_a_run_that_compiled_nothing() -> None:
    assert compile_gate.faults(Report("", [], []))


@pytest.mark.timeout(120)
def test_gate_tells_that_a_launcher_raised(tmp_path: Path) -> None:
    file = tmp_path / "raises.py"
    file.write_text("def dsa_decode_metadata(**kwargs):\n    raise KeyError('made to fail')\n")
    report = compile_gate.compile_kernels(["dsa_decode_metadata"], [str(file)])
    assert report.kernels
    assert all("made to fail" in kernel.error for kernel in report.kernels)
    assert len(compile_gate.faults(report)) == len(report.kernels)


def test_an_unknown_kind_of_target_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="targets holds 'sm_90'"):
        compile_gate.compile_kernels(["c128_cleanup"], targets=["sm_90"])
