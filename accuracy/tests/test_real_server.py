"""A real model behind a real server: damage is seen, health is not called damage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy.cli import app
from draftproof.accuracy.qualify import QUALIFICATIONS_DIR, qualify_command
from draftproof.accuracy.realserver import default_folder, prepare, serve
from draftproof.accuracy.repeat import repeat_command
from draftproof.accuracy.tests.model_support import call
from draftproof.accuracy.tests.support import Ran, gsm8k_file, run
from draftproof.accuracy.throughput import throughput_command

pytestmark = [
    pytest.mark.skipif(
        "DRAFTPROOF_REAL_SERVER" not in os.environ,
        reason="installs 4.6 GB: DRAFTPROOF_REAL_SERVER is not set (make accuracy-real sets it)",
    ),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare(default_folder())
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def intact(out: Path) -> Iterator[str]:
    with serve(default_folder(), "model") as url:
        yield url


@pytest.fixture(scope="module")
def arithmetic(out: Path, intact: str) -> list[Ran]:
    """The lane on the intact model, twice."""
    return [run(out, intact, "arithmetic") for _ in range(2)]


@pytest.fixture(scope="module")
def damaged(out: Path) -> Ran:
    """The lane on the damaged model."""
    with serve(default_folder(), "damaged") as url:
        return run(out, url, "arithmetic")


def compare(out: Path, a: Ran, b: Ran) -> tuple[int, dict[str, Any]]:
    """Exit code and content of a comparison."""
    told = out / "comparison.json"
    done = CliRunner().invoke(app, ["compare", str(a.folder), str(b.folder), "--json", str(told)])
    return done.exit_code, json.loads(told.read_text())


def test_a_model_with_damaged_weights_is_worse(
    tmp_path: Path, arithmetic: list[Ran], damaged: Ran
) -> None:
    assert (arithmetic[0].code, damaged.code) == (0, 0)
    code, comparison = compare(tmp_path, arithmetic[0], damaged)
    assert (code, comparison["verdict"]) == (1, "worse")


def test_a_model_is_not_worse_than_itself(tmp_path: Path, arithmetic: list[Ran]) -> None:
    code, comparison = compare(tmp_path, *arithmetic)
    assert code == 0
    assert comparison["verdict"] in ("no worse", "cannot tell")
    if comparison["verdict"] == "cannot tell":
        assert comparison["would_tell"]["questions"] > 96


def test_gsm8k_runs_end_to_end(out: Path, intact: str) -> None:
    sets = ("--set", "limit=4", "--set", "max_tokens=96", "--data", str(gsm8k_file()))
    ran = run(out, intact, "gsm8k", *sets)
    is_whole(ran, 4)
    assert ran.receipt["protocol"]["sampling_sent"]["min_p"] == 0.0


def test_a_modified_aime25_runs_end_to_end(out: Path, intact: str) -> None:
    sets = ("--set", "limit=2", "--set", "repeats=2", "--set", "max_tokens=48")
    ran = run(out, intact, "aime25", *sets)
    is_whole(ran, 4)
    assert ran.result["metrics"]["distinct_texts"] > 2
    # The model knows no thinking, and its server says 200 all the same.
    assert ran.receipt["protocol"]["fields"]["thinking"]["state"] == "accepted"
    assert "unproven: thinking" in ran.out


def is_whole(ran: Ran, planned: int) -> None:
    """A measurement with a receipt of this server, and an answer to everything planned."""
    assert ran.code == 0, ran.out + ran.err
    assert ran.result["counts"]["landed"] == planned
    assert ran.result["tokens"]["completion_tokens"] > 0
    receipts.validate(ran.receipt)
    assert ran.receipt["model"]["id"] == "smollm2-135m"
    assert ran.receipt["model"]["context"] == 4096
    assert "/version" in ran.receipt["server"]["told"]
    assert ran.receipt["protocol"]["fields"]["max_tokens"]["state"] == "proven"


def test_the_small_qualification_passes_what_the_server_has(tmp_path: Path, intact: str) -> None:
    """What it lacks (a parser of tool calls, a stored reference) is not run."""
    content = yaml.safe_load((QUALIFICATIONS_DIR / "small.yaml").read_text())
    for gate in content["gates"]:
        if gate["kind"] == "soak":
            # The speed of a machine that does other things, too, says nothing of the server.
            gate["minutes"] = 0.3
            gate["least_kept"] = 1e-6
        if gate["kind"] == "mixed-load":
            gate["longest_pause_s"] = 300.0
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    told = call(
        qualify_command,
        tmp_path / "out",
        str(path),
        "--server",
        intact,
        "--references",
        str(tmp_path),
    )
    states = {gate["gate"]: (gate["status"], gate["reason"]) for gate in told.result["gates"]}
    for name in ("retrieval", "prefix-reuse", "structured-output", "mixed-load", "soak"):
        assert states[name][0] == "passed", states[name]
    for name in ("tool-calls", "stored-reference", "kv-pressure"):
        assert states[name][0] == "not run", states[name]


def test_greedy_texts_and_their_gaps_are_told(tmp_path: Path, intact: str) -> None:
    arguments = (
        "--server",
        intact,
        "--requests",
        "2",
        "--concurrency",
        "2",
        "--grid",
        "load=before",
    )
    fixtures = tmp_path / "fixtures.yaml"
    one = {"name": "short", "prompt": "Describe a lighthouse at night.", "max_tokens": 12}
    fixtures.write_text(yaml.safe_dump({"padding": "", "fixtures": [one]}))
    told = call(repeat_command, tmp_path / "out", *arguments, "--fixtures", str(fixtures))
    assert told.code == 0, told.out
    (fixture,) = told.result["fixtures"]
    assert (fixture["requests"], fixture["failed"]) == (16, 0)
    # Completions with log probabilities shared prefixes, so the arm's spread is known.
    assert told.result["spreads"]["A"] >= 0
    assert not [flag for flag in told.result["flags"] if "fresh was not" in flag]


def test_decode_throughput_is_measured_and_its_length_checked(tmp_path: Path, intact: str) -> None:
    arguments = ("--workload", "64/8", "--rounds", "2", "--concurrency", "1,2")
    told = call(throughput_command, tmp_path, "--server", intact, *arguments)
    assert told.code == 0, told.out
    assert [point["rounds"] for point in told.result["points"]] == [2, 2]
    assert all(point["user_rate"] > 0 for point in told.result["points"])
    # Its development mode offers a flush.
    assert told.result["flags"] == []
