"""Known differences: what the file may hold, what it covers, and when it no longer holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.conformance.engine.known import BadKnown, Entry, of_report, read, stale, write
from draftproof.conformance.engine.session import Report, Result, mark_known

GOOD = '[[known]]\nop = "x"\ncheck = "eager"\ncase = "wide_*"\nreason = "32 bits"\n'
THERE = [("x", "eager", "wide_1"), ("x", "eager", "wide_2"), ("x", "guards", "wide_1")]


def result(case: str, status: str = "failed", **more: Any) -> Result:
    return Result("x", more.pop("check", "eager"), case, "mine", status, **more)


def entry(**more: Any) -> Entry:
    return Entry(
        **{"op": "x", "checks": ("eager",), "cases": ("wide_*",), "reason": "32 bits", **more}
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[known", "not TOML"),
        ("other = 1", "entries [[known]]"),
        ("known = 3", "entries [[known]]"),
        (GOOD.replace('op = "x"\n', ""), "entry 1: op is missing"),
        (GOOD.replace("32 bits", " "), "entry 1: reason is missing"),
        (GOOD.replace("eager", "earger"), "no check earger"),
        (GOOD.replace('"wide_*"', "[]"), "case is a string, or a list"),
        (GOOD.replace('"wide_*"', "3"), "case is a string, or a list"),
        (GOOD + "cases = 3\n", "cases is none of"),
        (GOOD + 'ended = "hang"\n', "ended is crash or timeout, got 'hang'"),
        (GOOD + "link = 3\n", "link is a string"),
        (GOOD + GOOD.replace('"x"', "3"), "entry 2: op is a string"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_entry(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(BadKnown) as raised:
        read(path)
    assert says in str(raised.value)
    assert f"--known {path}" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_an_entry_covers_the_failures_of_its_checks_and_cases_that_ended_so() -> None:
    assert entry().covers(result("wide_1"))
    assert not entry().covers(result("narrow"))
    assert not entry().covers(result("wide_1", check="guards"))
    assert not entry(op="y").covers(result("wide_1"))
    assert not entry().covers(result("wide_1", "error"))
    assert not entry().covers(result("wide_1", ended="crash"))
    assert not entry(ended="crash").covers(result("wide_1"))
    assert not entry(ended="crash").covers(result("wide_1", ended="timeout"))
    assert entry(ended="crash").covers(result("wide_1", ended="crash"))


def test_a_known_failure_is_counted_apart() -> None:
    found = [mark_known(result(case), [entry()]) for case in ("wide_1", "narrow")]
    totals = Report(found).totals()
    assert (totals["failed"], totals["known"]) == (1, 1)
    assert Report(found).compared == 2


@pytest.mark.parametrize(
    ("entries", "results", "says"),
    [
        ([entry()], [result("wide_1")], []),
        ([entry()], [result("wide_1"), result("wide_2", "passed")], ["wide_2 passes"]),
        # Another check, one that was skipped, and an op that the run leaves out say nothing.
        ([entry()], [result("wide_1", "passed", check="guards")], []),
        ([entry()], [result("wide_1", "skipped")], []),
        ([entry(op="y")], [], []),
        ([entry(cases=("tall_*", "wide_1"))], [], ["tall_* matches nothing"]),
        ([entry()], [result("wide_1", ended="crash")], ["as a wrong result, and ended as crash"]),
        ([entry(ended="crash")], [result("wide_1")], ["as crash, and ended as a wrong result"]),
    ],
)
def test_an_entry_that_passes_or_matches_nothing_is_told(
    entries: list[Entry], results: list[Result], says: list[str]
) -> None:
    lines = stale(entries, [mark_known(one, entries) for one in results], THERE)
    assert len(lines) == len(says)
    assert all(words in line for words, line in zip(says, lines, strict=True))


def test_what_is_written_of_a_report_covers_its_failures_and_nothing_else(tmp_path: Path) -> None:
    odd = 'a "quoted" \\ rule\twith a tab, 1 \u2264 2 \U0001f600'
    results = [
        result("wide_1", detail=f"title\nx: 3 elements\n  rule: {odd}"),
        result("wide_2", detail="title\ny: 4 elements"),
        result("late", ended="timeout", detail="title\ndid not end within 2 s"),
        result("wide_1", check="guards", detail="title\n(red zones hold nan)\nstray"),
        result("fine", "passed"),
        result("left_out", "skipped", detail="no device"),
    ]
    document = {"results": [vars(one) for one in results]}
    path = tmp_path / "known.toml"
    path.write_text(write(of_report(json.loads(json.dumps(document)))), encoding="utf-8")
    entries = read(path)
    assert [one.reason for one in entries] == [odd, "did not end within 2 s", "stray"]
    covered = {one.case for one in results if any(each.covers(one) for each in entries)}
    assert covered == {"wide_1", "wide_2", "late"}
