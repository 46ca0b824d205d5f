"""Faults by rule: what is put where, and what `draftproof mutants --of` says of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftproof.conformance.faults.sites import KINDS, Fault, faults, faulty

SOURCE = '''"""A page."""
import torch

LIMIT = 4


@triton.jit(do_not_specialize=["n"])
def kernel(x, y, n: tl.constexpr = 2):
    """Text with 1 < 2."""
    at = tl.arange(0, n)
    value = tl.load(
        x + at,
        mask=at < n,
        other=0.0,
    )
    value = tl.where(at > 1, value.to(tl.float32), float("-inf"))
    best = tl.max(value, axis=0)
    if best != 0 and not flag:
        tl.store(y, best)
    if flag:
        raise ValueError(f"{n}: at most {3 + 4}")
    kernel[(n,)](x, num_warps=4)
'''


def changes(source: str) -> set[tuple[int, str, str]]:
    return {(fault.line, fault.kind, fault.change) for fault in faults(source)}


def test_every_kind_of_fault_is_made() -> None:
    assert {fault.kind for fault in faults(SOURCE)} == set(KINDS)


@pytest.mark.parametrize(
    "expected",
    [
        (4, "constant", "4 -> 5"),
        (12, "operator", "+ -> -"),
        (13, "comparison", "< -> <="),
        (14, "other", "0.0 -> 1"),
        (11, "mask", "tl.load( x + at, mask=at < n, other=0.0, ) -> tl.load(x + at)"),
        (16, "cast", "value.to(tl.float32) -> (value)"),
        (16, "constant", '"-inf" -> "inf"'),
        (17, "extremum", "max -> min"),
        (18, "condition", "and -> or"),
        (18, "condition", "not flag -> (flag)"),
        (19, "statement", "tl.store(y, best) -> pass"),
        (20, "condition", "flag -> not (flag)"),
    ],
)
def test_a_fault_is_made_where_it_belongs(expected: tuple[int, str, str]) -> None:
    assert expected in changes(SOURCE)


def test_no_fault_is_put_where_no_bit_depends_on_it() -> None:
    shown = [(fault.line, fault.before) for fault in faults(SOURCE)]
    # The docstring, the text of the error, the number of warps, the decorator.
    assert not [line for line, _ in shown if line in (1, 2, 7, 9)]
    assert [before for line, before in shown if line == 21] == [
        'raise ValueError(f"{n}: at most {3 + 4}")'
    ]
    assert (22, "4") not in shown


def test_every_fault_is_a_program_of_as_many_lines() -> None:
    for fault in faults(SOURCE):
        text = faulty(SOURCE, fault)
        assert text != SOURCE
        assert text.count("\n") == SOURCE.count("\n"), fault
        compile(text, "faulty", "exec")


def test_a_fault_behind_letters_of_two_bytes_stands_at_its_place() -> None:
    source = 'x = {"ä": a - 1}\n'
    minus = next(fault for fault in faults(source) if fault.kind == "operator")
    assert isinstance(minus, Fault)
    assert faulty(source, minus) == 'x = {"ä": a + 1}\n'


SPEC = """
import torch
from hypothesis import strategies as st
from draftproof.conformance.engine.spec import Case, Effect, OpSpec


def capped(values, out):
    out.copy_(values.clamp(max=3) + 1)


def build(params, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 9, (params["n"],), generator=generator)
    return {"values": values, "out": torch.zeros(params["n"], dtype=torch.int64)}


SPECS = [
    OpSpec(
        name="capped",
        summary="values up to 3, plus 1",
        build=build,
        effects=[Effect("out", "out is the value, at most 3, plus 1")],
        cases=[Case("many", {"n": 64})],
        strategy=lambda: st.fixed_dictionaries({"n": st.integers(1, 9)}),
        bad_inputs=[],
        bad_input_params={"n": 1},
    )
]
"""

KERNEL = """
def capped(values, out):
    at = 0
    while at < len(values):
        value = int(values[at])
        if value > 3:
            value = 3
        out[at] = value + 1
        at += 1
    if len(out) == -1:
        spare(out)


def spare(out):
    out[0] = 5
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "spec.py").write_text(SPEC)
    command = [str(Path(sys.executable).with_name("draftproof")), "mutants", "--spec", "spec.py"]
    clean = {name: v for name, v in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    return subprocess.run(
        [*command, "--jobs", "1", *arguments],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_survivors_hangs_and_lines_never_entered_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = run(tmp_path, "--of", "kernel.py", "--json", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    by_status: dict[str, set[tuple[int, str]]] = {}
    for one in report["faults"]:
        by_status.setdefault(one["status"], set()).add((one["line"], one["change"]))
    # 3 is 3 whether it is cut or not; no length is -1 or -2.
    assert by_status["survived"] == {(6, "> -> >="), (10, "1 -> 2")}
    assert by_status["not_entered"] == {
        (11, "spare(out) -> pass"),
        (15, "0 -> 1"),
        (15, "5 -> 6"),
        (15, "out[0] = 5 -> pass"),
    }
    (hang,) = [one for one in report["faults"] if one["change"] == "at += 1 -> pass"]
    assert hang["status"] == "killed"
    assert "did not end" in hang["detail"]
    totals = report["totals"]
    assert totals["made"] == len(report["faults"]) == sum(totals.values()) - totals["made"]
    assert "kernel.py:6: survived (comparison) > -> >=" in done.stdout
    assert "not entered: spare, lines 15" in done.stdout


def test_a_file_that_fails_as_it_stands_is_not_given_faults(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL.replace("+ 1\n        at", "+ 2\n        at"))
    done = run(tmp_path, "--of", "kernel.py")
    assert done.returncode == 1
    assert "kernel.py fails as it stands" in done.stdout


def test_what_the_budget_leaves_out_is_counted(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = run(tmp_path, "--of", "kernel.py", "--budget", "0.001", "--json", "report.json")
    assert done.returncode == 1
    totals = json.loads((tmp_path / "report.json").read_text())["totals"]
    assert totals["not_run"] == totals["made"]


def test_a_budget_without_a_file_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--budget", "3")
    assert done.returncode == 2
    assert "--budget" in done.stderr
