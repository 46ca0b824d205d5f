"""The sanitizer's output becomes one verdict a tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.ci import sanitizer

CLEAN = "========= COMPUTE-SANITIZER\n900 compared: 900 passed\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at _clear_layer+0x2f0
=========     by thread (31,0,0) in block (2,0,0)
========= ERROR SUMMARY: 3 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k+0x70 and Read access at k+0xd0
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    "output, code, verdict, errors, warnings",
    [
        (CLEAN, 0, "clean", 0, 0),
        (NO_RACES, 0, "clean", 0, 0),
        (INVALID, 0, "errors", 3, 0),
        # Of several processes one is wrong.
        (CLEAN + INVALID + CLEAN, 0, "errors", 3, 0),
        (RACES, 0, "errors", 1, 1),
        # What ended before its time proves nothing.
        (CLEAN, 3, "no verdict", 0, 0),
        ("Error: no CUDA device\n", 0, "no verdict", 0, 0),
        (INVALID, 1, "errors", 3, 0),
    ],
)
def test_the_summaries_decide(
    output: str, code: int, verdict: str, errors: int, warnings: int
) -> None:
    found = sanitizer.judge("memcheck", output, code)
    assert (found.verdict, found.errors, found.warnings) == (verdict, errors, warnings)


def test_the_first_thing_reported_is_quoted() -> None:
    assert sanitizer.judge("memcheck", INVALID, 0).first == (
        "Invalid __global__ write of size 2 bytes"
    )


def stand_in(folder: Path, bad: str) -> None:
    """A compute-sanitizer that notes its arguments and finds races, or nothing."""
    races = folder / "races"
    races.write_text(RACES)
    script = folder / "compute-sanitizer"
    script.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {folder}/calls\n'
        f'if [ "$2" = {bad} ]; then cat {races}; '
        'else echo "========= ERROR SUMMARY: 0 errors"; fi\n'
    )
    script.chmod(0o755)


@pytest.mark.parametrize("bad, code", [("racecheck", 1), ("none", 0)])
def test_every_tool_runs_the_suite_and_one_that_finds_something_fails(
    bad: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(tmp_path, bad)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    written = tmp_path / "verdicts.json"
    assert sanitizer.main(["--json", str(written), "--", "--op", "c128_cleanup"]) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line.split()[2] for line in calls] == list(sanitizer.TOOLS)
    assert all(line.startswith("1 --tool ") for line in calls)
    assert all(line.endswith("--op c128_cleanup") and " verify " in line for line in calls)
    verdicts = {one["tool"]: one["verdict"] for one in json.loads(written.read_text())["verdicts"]}
    due = dict.fromkeys(sanitizer.TOOLS, "clean") | ({bad: "errors"} if code else {})
    assert verdicts == due
    assert "memcheck: clean" in capsys.readouterr().out


def test_a_sanitizer_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer.main(["--sanitizer", "no-such-sanitizer"]) == 2
    assert "no-such-sanitizer" in capsys.readouterr().err
