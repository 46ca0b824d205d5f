"""Records: read with care, and stale exactly when what they prove has changed."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftproof.ci import records
from draftproof.conformance.environment import sources
from draftproof.conformance.plugin import ROOT

OP = "c128_cleanup"


def a_record() -> dict[str, Any]:
    return {
        "schema": "draftproof.verify/1",
        "environment": {
            "time": "2026-01-02T03:04:05Z",
            "commit": "0123456789abcdef",
            "device": "some GPU",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "sources": sources(),
        },
        "results": [
            {"op": OP, "check": "eager", "status": "passed"},
            {"op": OP, "check": "graph", "status": "skipped"},
            {"op": "another_op", "check": "eager", "status": "not_provided"},
        ],
        "totals": {},
    }


def write(folder: Path, content: Any, name: str = "record.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_a_record_of_these_sources_is_current(tmp_path: Path) -> None:
    record = records.read_record(write(tmp_path, a_record()))
    assert record.ops() == [OP]
    assert record.counts() == {"passed": 1, "skipped": 1, "not_provided": 1}
    assert records.changed_files(record) == []


@pytest.mark.parametrize(
    "file", [*records.SHARED_FILES, *records.files_of(OP)], ids=lambda file: file
)
def test_a_change_of_any_file_that_decides_the_bits_makes_it_stale(
    tmp_path: Path, file: str
) -> None:
    content = a_record()
    assert file in content["environment"]["sources"], "the file is not recorded at all"
    content["environment"]["sources"][file] = "0" * 64
    assert records.changed_files(records.read_record(write(tmp_path, content))) == [file]


def test_a_file_that_the_record_does_not_know_makes_it_stale(tmp_path: Path) -> None:
    content = a_record()
    del content["environment"]["sources"][f"kernels/{OP}.py"]
    record = records.read_record(write(tmp_path, content))
    assert records.changed_files(record) == [f"kernels/{OP}.py"]


def test_a_change_elsewhere_leaves_a_record_current(tmp_path: Path) -> None:
    content = a_record()
    content["environment"]["sources"]["conformance/report.py"] = "0" * 64
    assert records.changed_files(records.read_record(write(tmp_path, content))) == []


def test_the_source_digest_tells_different_sources_apart_whatever_their_order() -> None:
    one, other = {"a.py": "1", "b.py": "2"}, {"b.py": "2", "a.py": "1"}
    assert records.source_digest(one) == records.source_digest(other)
    assert records.source_digest(one) != records.source_digest({"a.py": "2", "b.py": "1"})
    assert records.source_digest(one) != records.source_digest({"a.py": "1", "b.py": None})


def broken(part: str) -> Any:
    content = copy.deepcopy(a_record())
    if part == "schema":
        content["schema"] = "draftproof.case/1"
    elif part == "sources":
        del content["environment"]["sources"]
    elif part == "results":
        content["results"] = {"op": OP}
    elif part == "op":
        del content["results"][0]["op"]
    elif part == "list":
        return [content]
    return content


@pytest.mark.parametrize("part", ["schema", "sources", "results", "op", "list"])
def test_a_file_that_is_no_record_is_refused_by_name(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, broken(part), "odd.json")
    assert records.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "odd.json" in said
    assert said.count("\n") == 1


def test_a_truncated_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, a_record())
    path.write_text(path.read_text()[:-20])
    assert records.main([str(tmp_path)]) == 2
    assert "record.json" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert records.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_list_shows_what_ran_where_and_whether_it_still_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = a_record()
    old["environment"]["sources"][f"oracles/{OP}.py"] = "0" * 64
    write(tmp_path, a_record(), "new.json")
    write(tmp_path, old, "old.json")
    assert records.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("new.json", "old.json", OP, "some GPU", "torch 2.11.0", "0123456789ab", "current"):
        assert word in shown
    assert "stale:" in shown
    assert f"oracles/{OP}.py" in shown


def test_a_stale_record_fails_only_where_current_ones_are_required(tmp_path: Path) -> None:
    write(tmp_path, a_record(), "new.json")
    assert records.main([str(tmp_path), "--require-current"]) == 0
    old = a_record()
    old["environment"]["sources"]["kernels/numerics.py"] = "0" * 64
    write(tmp_path, old, "old.json")
    assert records.main([str(tmp_path)]) == 0
    assert records.main([str(tmp_path), "--require-current"]) == 1


def test_a_benchmark_record_counts_what_met_its_reach(tmp_path: Path) -> None:
    content = a_record()
    del content["results"]
    content["schema"] = "draftproof.bench/1"
    content["rows"] = [{"op": OP, "met": met} for met in (True, True, False, None)]
    record = records.read_record(write(tmp_path, content))
    assert record.ops() == [OP]
    assert record.counts() == {"reach met": 2, "reach missed": 1, "measured": 1}


def test_every_record_of_this_repository_can_be_read() -> None:
    names = [path.name for path in records.RECORDS.glob("*.json")]
    assert sorted(record.path.name for record in records.read_records(records.RECORDS)) == sorted(
        names
    )


@pytest.mark.parametrize("said", [None, "0123456789ab+", "0123456789ab?", "0123456789abcdef"])
@pytest.mark.parametrize("is_its_own", [True, False])
def test_only_an_uncertain_commit_is_replaced_and_only_by_that_of_all_sources(
    tmp_path: Path, said: str | None, is_its_own: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout

    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    file = "oracles/numerics.py"
    digest = hashlib.sha256(git("show", f"HEAD:{file}")).hexdigest() if is_its_own else "0" * 64
    content = a_record()
    content["environment"] |= {"commit": said, "sources": {file: digest}}
    path = write(tmp_path, content)
    assert records.main([str(tmp_path), "--name-commit", "HEAD"]) == 0
    head = git("rev-parse", "HEAD").decode().strip()
    uncertain = said != "0123456789abcdef"
    named = json.loads(path.read_text())["environment"]["commit"]
    assert named == (head if uncertain and is_its_own else said)
    told = f"{file} is not that of HEAD" in capsys.readouterr().out
    assert told == (uncertain and not is_its_own)
