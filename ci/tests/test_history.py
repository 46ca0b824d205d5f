"""History: every run counts once, and a fall is named exactly where the spreads part."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftproof.ci.history import breaks, conformance, falls, gather, page, ratios
from draftproof.conformance.cli import main
from draftproof.conformance.names import Refused
from draftproof.conformance.plugin import ROOT


def environment(number: int, device: str = "some GPU") -> dict[str, Any]:
    return {"time": f"2026-01-{number:02}T00:00:00Z", "commit": str(number) * 40, "device": device}


def bench(number: int, ours: float, *, spread: float = 0.02, **about: Any) -> dict[str, Any]:
    """A record with one row: the baseline takes 10 us, ours as said, each give or take a share."""

    def around(us: float) -> list[float]:
        return [us * (1 - spread), us * (1 + spread)]

    row = {
        "op": "an_op",
        "point": "rows_4",
        "mode": "graph",
        "subject": "fused",
        "baseline": "loop",
        "us": {"fused": ours, "loop": 10.0},
        "spread_us": {"fused": around(ours), "loop": around(10.0)},
        "ratio": 10.0 / ours,
    }
    return {
        "schema": "draftproof.bench/1",
        "environment": environment(number, **about),
        "rows": [row],
    }


def verify(number: int, *statuses: str) -> dict[str, Any]:
    results = [
        {"op": "an_op", "check": "eager", "case": f"case_{n}", "status": s, "implementation": "us"}
        for n, s in enumerate(statuses)
    ]
    return {
        "schema": "draftproof.verify/1",
        "environment": environment(number),
        "results": results,
    }


def keep(folder: Path, *documents: dict[str, Any]) -> Path:
    for number, document in enumerate(documents):
        (folder / f"{number}.json").write_text(json.dumps(document))
    return folder


def test_a_fall_is_found_at_the_commit_where_the_spreads_part(tmp_path: Path) -> None:
    records = gather(keep(tmp_path, bench(1, 2.0), bench(2, 2.05), bench(3, 3.0), bench(4, 3.0)))
    (fall,) = falls(ratios(records))
    assert (fall.before.commit, fall.after.commit) == ("1" * 12, "3" * 12)
    assert fall.stands


def test_a_fall_within_the_spread_is_none(tmp_path: Path) -> None:
    wide = [bench(1, 2.0, spread=0.3), bench(2, 3.0, spread=0.3)]
    assert falls(ratios(gather(keep(tmp_path, *wide)))) == []


def test_a_ratio_that_creeps_down_is_found(tmp_path: Path) -> None:
    steps = [bench(n, 2.0 * 1.02**n) for n in range(1, 9)]
    records = gather(keep(tmp_path, *steps))
    found = falls(ratios(records))
    assert found, "no two neighbours differ by more than their spread, but first and last do"
    assert found[0].before.commit == "1" * 12


def test_a_fall_that_was_made_good_does_not_stand(tmp_path: Path) -> None:
    records = gather(keep(tmp_path, bench(1, 2.0), bench(2, 4.0), bench(3, 2.0)))
    (fall,) = falls(ratios(records))
    assert not fall.stands


def test_devices_are_not_held_against_each_other(tmp_path: Path) -> None:
    records = gather(keep(tmp_path, bench(1, 2.0), bench(2, 9.0, device="a slower GPU")))
    assert falls(ratios(records)) == []
    assert len(ratios(records)) == 2


def test_a_check_that_passed_and_fails_later_is_a_break(tmp_path: Path) -> None:
    records = gather(keep(tmp_path, verify(1, "passed", "passed"), verify(2, "passed", "failed")))
    (broken,) = breaks(records)
    assert "case_1" in broken.what
    assert broken.stands
    assert [row[-1] for row in conformance(records)] == ["2 passed", "1 failed, 1 passed"]


def test_what_git_remembers_of_a_renewed_record_counts_once(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *own, *arguments], check=True)

    git("init", "-q")
    for number, ours in enumerate((2.0, 3.0, 3.5), start=1):
        keep(tmp_path, bench(number, ours))
        if number < 3:
            git("add", "-A")
            git("commit", "-qm", f"run {number}")
    (seen,) = ratios(gather(tmp_path)).values()
    assert [round(one.ratio, 2) for one in seen] == [5.0, 3.33, 2.86]


def test_other_json_is_passed_over_and_a_folder_without_records_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"schema": "another/1"}')
    (tmp_path / "half.json").write_text('{"schema": ')
    with pytest.raises(Refused, match="no record"):
        gather(tmp_path)
    with pytest.raises(Refused, match="not a folder"):
        gather(tmp_path / "nowhere")


@pytest.mark.parametrize(("ours", "code"), [((2.0, 2.0), 0), ((2.0, 4.0), 1)])
def test_the_command_exits_1_where_a_fall_stands(
    tmp_path: Path, ours: tuple[float, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, *(bench(n, us) for n, us in enumerate(ours, start=1)))
    with pytest.raises(SystemExit) as ended:
        main(["history", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert ended.value.code == code
    assert ("fell at" in capsys.readouterr().out) == bool(code)
    written = (tmp_path / "page.html").read_text()
    assert ("fell at" in written) == bool(code)
    assert written.count('<svg role="img"') == 1


def test_the_page_of_our_own_records_names_every_op_and_device() -> None:
    records = gather(ROOT / "ci" / "records")
    written = page(records)
    for record in records:
        assert record.device in written
    for series in ratios(records):
        assert series.op in written
