"""`draftproof accuracy ...` ends with the exit codes of the accuracy commands."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftproof.accuracy.tests.support import fake_server

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="the front of all commands needs torch, which is absent"
)


def draftproof(*arguments: str) -> subprocess.CompletedProcess[str]:
    front = "from draftproof.conformance.cli import main; main()"
    command = [sys.executable, "-c", front, "accuracy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_measurement_exits_0_and_no_measurement_4(tmp_path: Path) -> None:
    arguments = ("arithmetic", "--set", "limit=4", "--out", str(tmp_path))
    with fake_server() as server:
        good = draftproof("run", *arguments, "--base-url", server.url)
        server.control(fault="status")
        bad = draftproof("run", *arguments, "--base-url", server.url)
    assert good.returncode == 0, good.stderr
    assert "score 100.00% (4 of 4)" in good.stdout
    assert bad.returncode == 4
    assert bad.stderr.startswith("not a measurement: the server fails at a first request")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nolane", "--base-url", "http://127.0.0.1:9"),
        ("run", "arithmetic"),
        ("run", "arithmetic", "--base-url", "http://127.0.0.1:9"),
        ("last-good", "arithmetic", "/nowhere"),
    ],
)
def test_bad_usage_and_input_exit_2_with_one_line(arguments: tuple[str, ...]) -> None:
    done = draftproof(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
