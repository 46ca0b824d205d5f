"""The audit counts what was compared, and names what was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.conformance.audit import audit, due, lines, reports
from draftproof.conformance.names import Refused

DUE = [("an_op", "eager", "one"), ("an_op", "eager", "two"), ("an_op", "laws", "sum.one")]


def record(*results: tuple[str, str, str, str], implementation: str = "triton") -> dict[str, Any]:
    names = ("op", "check", "case", "status")
    return {
        "schema": "draftproof.verify/1",
        "results": [
            {**dict(zip(names, one, strict=True)), "implementation": implementation}
            for one in results
        ],
    }


def test_what_was_skipped_or_never_named_is_missing() -> None:
    kept = record(("an_op", "eager", "one", "passed"), ("an_op", "eager", "two", "skipped"))
    report = audit(DUE, [kept])
    assert (report["due"], report["exercised"]) == (3, 1)
    assert [one["case"] for one in report["missing"]] == ["two", "sum.one"]
    assert list(lines(report)) == [
        "an_op/eager: 1 not exercised: two",
        "an_op/laws: 1 not exercised: sum.one",
        "1 of 3 exercised",
    ]


def test_records_add_up_and_a_failure_counts_as_exercised() -> None:
    kept = [
        record(("an_op", "eager", "one", "passed")),
        record(("an_op", "eager", "two", "failed"), ("an_op", "laws", "sum.one", "passed")),
    ]
    assert audit(DUE, kept)["missing"] == []


def test_another_implementation_does_not_count_where_one_is_named() -> None:
    kept = [record(("an_op", "eager", "one", "passed"), implementation="baseline")]
    assert audit(DUE, kept)["exercised"] == 1
    assert audit(DUE, kept, "triton")["exercised"] == 0


def test_a_folder_holds_other_files_but_a_named_file_must_be_a_report(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({"schema": "draftproof.bench/1"}))
    with pytest.raises(Refused, match="no report of verify"):
        reports([tmp_path])
    (tmp_path / "verify.json").write_text(json.dumps(record(("an_op", "eager", "one", "passed"))))
    assert len(reports([tmp_path])) == 1
    with pytest.raises(Refused, match="not a report of verify"):
        reports([tmp_path / "bench.json"])
    with pytest.raises(Refused, match="cannot be read"):
        reports([tmp_path / "absent.json"])


def test_what_is_due_grows_with_the_profile_and_names_every_graph_on_a_gpu() -> None:
    quick = due(["c128_cleanup"], "quick", cuda=False)
    full = due(["c128_cleanup"], "soak", cuda=True)
    assert ("c128_cleanup", "graph", "every_case") in quick
    assert ("c128_cleanup", "graph", "every_case") not in full
    assert set(quick) - {("c128_cleanup", "graph", "every_case")} < set(full)
