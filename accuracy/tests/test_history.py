"""What CI takes from runs: the last good one, JSON, JUnit and a job summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from typer.testing import CliRunner

from draftproof.accuracy.cli import app
from draftproof.accuracy.compare import SCHEMA_FILE
from draftproof.accuracy.outputs import Case, junit
from draftproof.accuracy.tests.make_runs import lane_for, make_run
from draftproof.accuracy.tests.support import fake_server

FOUR = ("--set", "limit=4")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def at(hour: int) -> str:
    return f"2026-01-01T{hour:02}:00:00.000+00:00"


def test_last_good_is_the_newest_run_of_the_lane_that_is_a_measurement(tmp_path: Path) -> None:
    marks = ["1", "0", "1", "1"]
    make_run(tmp_path / "old", marks, started=at(1))
    newest = make_run(tmp_path / "good", marks, started=at(2))
    make_run(tmp_path / "bad", marks, started=at(3), measurement=False, not_a_measurement=["x"])
    make_run(tmp_path / "longer", [*marks, "1"], started=at(4))
    make_run(tmp_path / "killed", marks, started=at(5))
    (tmp_path / "killed" / "result.json").unlink()
    (tmp_path / "no-run").mkdir()
    got = invoke("last-good", "arithmetic", tmp_path, *FOUR)
    assert (got.exit_code, got.stdout) == (0, f"{newest}\n")


def test_last_good_can_ask_for_a_label(tmp_path: Path) -> None:
    for hour, label in enumerate(("main", "branch")):
        folder = make_run(tmp_path / label, ["1", "0", "1", "1"], started=at(hour))
        receipt = json.loads((folder / "receipt.json").read_text())
        (folder / "receipt.json").write_text(json.dumps({**receipt, "label": label}))
    got = invoke("last-good", "arithmetic", tmp_path, *FOUR, "--label", "main")
    assert got.stdout == f"{tmp_path / 'main'}\n"


def test_without_a_good_run_last_good_exits_4_and_says_why(tmp_path: Path) -> None:
    why = {"measurement": False, "not_a_measurement": ["errors: 3"]}
    make_run(tmp_path / "bad", ["1", "0", "1", "1"], **why)
    make_run(tmp_path / "other", ["1", "1"], lane_for(2))
    got = invoke("last-good", "arithmetic", tmp_path, *FOUR)
    assert got.exit_code == 4
    assert "(1 of other lanes or labels)" in got.stderr
    assert "errors: 3" in got.stderr
    assert got.stdout == ""
    assert invoke("last-good", "arithmetic", tmp_path / "none").exit_code == 2


def test_a_comparison_gives_json_junit_and_a_summary(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", ["1"] * 90 + ["0"] * 6)
    b = make_run(tmp_path / "b", ["1"] * 40 + ["0"] * 56)
    files = ("--junit", tmp_path / "j.xml", "--summary", tmp_path / "s.md")
    got = invoke("compare", a, b, "--json", "-", *files)
    assert got.exit_code == 1
    told = json.loads(got.stdout)
    jsonschema.validate(told, json.loads(SCHEMA_FILE.read_text()))
    assert told["verdict"] == "worse"
    assert "B against A: worse" in got.stderr
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    assert suite.find("testcase/failure").get("message") == "worse"  # type: ignore[union-attr]
    assert "**worse**" in (tmp_path / "s.md").read_text()
    # A job's summary is appended to: other steps write there too.
    missing = invoke("compare", a, tmp_path / "none", "--json", "-", *files)
    assert missing.exit_code == 4
    assert json.loads(missing.stdout)["exit_code"] == 4
    assert "is missing" in json.loads(missing.stdout)["reason"]
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    summary = (tmp_path / "s.md").read_text()
    assert summary.index("**worse**") < summary.index("**not a measurement: run")


def test_a_run_gives_json_junit_and_a_summary(tmp_path: Path) -> None:
    files = ("--junit", tmp_path / "j.xml", "--summary", tmp_path / "s.md")
    with fake_server() as server:
        run = ("run", "arithmetic", "--base-url", server.url, "--out", tmp_path / "runs", *FOUR)
        good = invoke(*run, "--json", "-", "--label", "nightly", *files)
        server.control(fault="status", fault_status=500)
        bad = invoke(*run, "--json", tmp_path / "bad.json", *files)
        refused = invoke(*run, "--json", "-", "--model", "none", *files)
    told = json.loads(good.stdout)
    assert (good.exit_code, told["exit_code"]) == (0, 0)
    assert told["result"]["score"] == 1.0
    assert told["result"]["label"] == "nightly"
    folder = Path(told["folder"])
    assert json.loads((folder / "result.json").read_text()) == told["result"]
    assert "score 100.00% (4 of 4)" in good.stderr
    told = json.loads((tmp_path / "bad.json").read_text())
    assert (bad.exit_code, told["exit_code"], told["result"]) == (4, 4, None)
    assert told["reason"].startswith("not a measurement: the server fails at a first request")
    assert json.loads(refused.stdout)["reason"].startswith("error: --model: the server has no")
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    summary = (tmp_path / "s.md").read_text()
    assert summary.count("### Accuracy: arithmetic") == 3
    assert "**score 100.00% (4 of 4)" in summary
    assert invoke("last-good", "arithmetic", tmp_path / "runs", *FOUR).stdout == f"{folder}\n"


@pytest.mark.parametrize("text", ["\x00\x1b[31mred", "\ud800", "a\nb", "<&>]]>", "", "\ufffe"])
def test_no_text_breaks_a_junit_file(text: str) -> None:
    written = junit([Case("x", text, error=text or "y", failure=None)])
    suite = ElementTree.fromstring(written)
    assert suite.find("testcase") is not None
