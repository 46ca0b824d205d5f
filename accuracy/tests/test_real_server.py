"""A real model behind a real server: damage is seen, health is not called damage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy.cli import app
from draftproof.accuracy.realserver import default_folder, prepare, serve
from draftproof.accuracy.tests.support import Ran, gsm8k_file, run

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
