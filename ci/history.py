"""What kept records say over time: conformance and ratios by device, and where a ratio fell."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.conformance.bench.rows import BENCH_SCHEMA
from draftproof.conformance.engine.session import VERIFY_SCHEMA
from draftproof.conformance.names import Refused
from draftproof.conformance.pages.page import render
from draftproof.conformance.pages.plots import Line, Plot, draw

HERE = Path(__file__).resolve().parent

SHOWN_DIGITS = 12
"""Hex digits of a commit that a table shows."""

MAX_PLOTS = 24
"""Plots on a page; those of ratios that fell come first."""


@dataclass(frozen=True)
class Record:
    """One run, as its JSON says.

    Parameters
    ----------
    name : str
        The file.
    document : mapping
        What `verify --json` or `bench --json` wrote.
    """

    name: str
    document: Mapping[str, Any]

    @property
    def time(self) -> str:
        """When it ran, UTC."""
        return str(self.document["environment"].get("time", ""))

    @property
    def commit(self) -> str:
        """The commit that ran, shortened; with `+` or `?` where it is not certain."""
        commit = self.document["environment"].get("commit")
        if not commit:
            return "unknown"
        return commit[:SHOWN_DIGITS] + (commit[-1] if commit.endswith(("+", "?")) else "")

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self.document["environment"].get("device", "unknown"))

    @property
    def is_bench(self) -> bool:
        """Whether it holds timings."""
        return self.document["schema"] == BENCH_SCHEMA


@dataclass(frozen=True)
class Observation:
    """A ratio in one run.

    Parameters
    ----------
    time, commit : str
    ratio : float
        Medians: baseline / subject.
    low, high : float
        The ratio that the rounds' extremes allow: fastest baseline over slowest subject, and the
        other way round.
    """

    time: str
    commit: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, order=True)
class Series:
    """What is one thing over time."""

    device: str
    op: str
    point: str
    mode: str
    arms: str
    """`subject over baseline`."""


@dataclass(frozen=True)
class Fall:
    """A ratio that fell by more than the spread of its rounds.

    Parameters
    ----------
    series : Series
    before : Observation
        The best until then, whose whole spread lies above that of `after`.
    after : Observation
        The first that fell.
    stands : bool
        Whether the newest observation still lies as far below.
    """

    series: Series
    before: Observation
    after: Observation
    stands: bool


@dataclass(frozen=True)
class Break:
    """A check that passed in one run and failed in a later one on the same device."""

    device: str
    what: str
    """`op / check / case, implementation`."""
    before: str
    after: str
    """Commits."""
    stands: bool


def gather(folder: Path) -> list[Record]:
    """Every record of a folder and of the folders in it, oldest first.

    In a git checkout the earlier committed contents of its files count too: a record that is
    renewed under its name keeps its history there.

    Raises
    ------
    Refused
        The folder is none, or holds no record.
    """
    if not folder.is_dir():
        raise Refused(f"history {folder}: not a folder")
    found: dict[str, Record] = {}
    files = [(str(path.relative_to(folder)), path.read_text()) for path in folder.rglob("*.json")]
    for name, text in [*sorted(files), *_committed(folder)]:
        record = _parsed(name, text)
        if record is not None:
            # One run may stand under two names, or in two commits.
            found.setdefault(f"{record.document['schema']} {record.time} {record.name}", record)
    if not found:
        raise Refused(f"history {folder}: no record of verify or bench lies there")
    return sorted(found.values(), key=lambda record: (record.time, record.name))


def _parsed(name: str, text: str) -> Record | None:
    """A record, or None for JSON that is none of ours."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("environment"), dict):
        return None
    results = {VERIFY_SCHEMA: "results", BENCH_SCHEMA: "rows"}.get(str(document.get("schema")))
    if results is None or not isinstance(document.get(results), list):
        return None
    return Record(name, document)


def _committed(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and content of every file that git ever knew in a folder; nothing without git."""

    def git(*arguments: str, given: str | None = None) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, input=given)
        return done.stdout

    try:
        log = git(
            "log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--relative", "--", "."
        )
        blobs = {}
        for line in log.splitlines():
            about, _, name = line.partition("\t")
            blob = about.split()[3] if about.startswith(":") else "0"
            if name.endswith(".json") and set(blob) != {"0"}:
                blobs[blob] = name
        contents = _contents(folder, list(blobs))
    except (OSError, subprocess.CalledProcessError):
        return
    for blob, name in blobs.items():
        if blob in contents:
            yield name, contents[blob]


def _contents(folder: Path, blobs: list[str]) -> dict[str, str]:
    """The text of git's blobs, in one call; a shallow clone lacks some."""
    command = ["git", "-C", str(folder), "cat-file", "--batch"]
    given = "".join(f"{blob}\n" for blob in blobs).encode()
    left = subprocess.run(command, capture_output=True, check=True, input=given).stdout
    found = {}
    while left:
        head, _, left = left.partition(b"\n")
        words = head.decode().split()
        if len(words) == 3:
            size = int(words[2])
            found[words[0]] = left[:size].decode("utf-8", "replace")
            left = left[size + 1 :]
    return found


def ratios(records: Sequence[Record]) -> dict[Series, list[Observation]]:
    """Every ratio of the records over time, oldest first."""
    found: dict[Series, list[Observation]] = {}
    for record in records:
        if not record.is_bench:
            continue
        for row in record.document["rows"]:
            if row.get("ratio") is None:
                continue
            subject, baseline = row["subject"], row["baseline"]
            (fast, slow), (base_fast, base_slow) = (
                row["spread_us"][subject],
                row["spread_us"][baseline],
            )
            series = Series(
                record.device, row["op"], row["point"], row["mode"], f"{subject} over {baseline}"
            )
            found.setdefault(series, []).append(
                Observation(
                    record.time, record.commit, row["ratio"], base_fast / slow, base_slow / fast
                )
            )
    return found


def falls(found: Mapping[Series, Sequence[Observation]]) -> list[Fall]:
    """Every fall by more than the spread of the rounds, and whether it stands today.

    An observation is held against the best since the last fall, not against the one before it: a
    ratio that creeps down a little in every run falls in the run that takes it out of the spread.
    """
    fallen = []
    for series, seen in found.items():
        best = seen[0]
        for now in seen[1:]:
            if now.high < best.low:
                fallen.append(Fall(series, best, now, stands=seen[-1].high < best.low))
                best = now
            elif now.low > best.low:
                best = now
    return fallen


def breaks(records: Sequence[Record]) -> list[Break]:
    """Every check that passed and later failed on the same device, and whether it fails today."""
    seen: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for record in records:
        if record.is_bench:
            continue
        for result in record.document["results"]:
            if result.get("status") in ("passed", "failed"):
                what = f"{result['op']} / {result['check']} / {result['case']}"
                what += f", {result['implementation']}"
                key = (record.device, what)
                seen.setdefault(key, []).append((record.commit, result["status"] == "passed"))
    return [
        Break(device, what, before, after, stands=not told[-1][1])
        for (device, what), told in seen.items()
        for (before, passed), (after, still) in itertools.pairwise(told)
        if passed and not still
    ]


def conformance(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Device, time, commit, implementation, ops and outcome of every conformance run.

    The records of one commit, device and implementation are one line.
    """
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if not record.is_bench:
            for name in {result["implementation"] for result in record.document["results"]}:
                grouped.setdefault((record.device, record.commit, name), []).append(record)
    rows = []
    for (device, commit, name), members in grouped.items():
        counts: Counter[str] = Counter()
        ops: dict[str, None] = {}
        for record in members:
            for result in record.document["results"]:
                if result["implementation"] == name:
                    counts[result["status"]] += 1
                    ops[result["op"]] = None
        outcome = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        rows.append((device, members[-1].time, commit, name, ", ".join(ops), outcome))
    return sorted(rows)


def fall_text(fall: Fall) -> str:
    """A fall in one sentence."""
    return (
        f"{fall.series.op} / {fall.series.point} / {fall.series.mode}: {fall.series.arms} fell at "
        f"{fall.after.commit} from {_spread(fall.before)} ({fall.before.commit}) to "
        f"{_spread(fall.after)}" + ("" if fall.stands else "; since then made good")
    )


def break_text(broken: Break) -> str:
    """A break in one sentence."""
    return f"{broken.what}: passed at {broken.before}, failed at {broken.after}" + (
        "" if broken.stands else "; passes today"
    )


def _spread(seen: Observation) -> str:
    return f"{seen.ratio:.2f}x [{seen.low:.2f}, {seen.high:.2f}]"


def text(records: Sequence[Record], width: int | None) -> str:
    """The history for a terminal."""
    console = Console(width=width)
    found = ratios(records)
    with console.capture() as captured:
        table = Table(title="conformance")
        for column in ("device", "time", "commit", "implementation", "ops", "results"):
            table.add_column(column, overflow="fold")
        for row in conformance(records):
            table.add_row(*row)
        console.print(table)
        for device in dict.fromkeys(series.device for series in found):
            table = Table(title=f"ratios on {device}: first to last, each with its spread")
            for column in ("op", "point", "mode", "ratio", "runs", "first", "last", "at"):
                table.add_column(column, overflow="fold")
            for series, seen in found.items():
                if series.device == device:
                    table.add_row(
                        series.op,
                        series.point,
                        series.mode,
                        series.arms,
                        str(len(seen)),
                        _spread(seen[0]),
                        _spread(seen[-1]),
                        seen[-1].commit,
                    )
            console.print(table)
        for fall in falls(found):
            console.print(fall_text(fall), markup=False, highlight=False)
        for broken in breaks(records):
            console.print(break_text(broken), markup=False, highlight=False)
        console.print(_verdict(records, found)[0], markup=False, highlight=False)
    return captured.get()


def _verdict(
    records: Sequence[Record], found: Mapping[Series, Sequence[Observation]]
) -> tuple[str, bool]:
    """The history in one line, and whether a regression stands today."""
    fallen = sum(fall.stands for fall in falls(found))
    broken = sum(one.stands for one in breaks(records))
    several = sum(len(seen) > 1 for seen in found.values())
    if fallen or broken:
        return f"{fallen} ratios fell and {broken} checks broke, and still are so.", True
    if not several:
        return f"No ratio was measured twice on one device: {len(found)} stand alone.", False
    return f"None of {several} ratios that were measured more than once lies below its best.", False


def page(records: Sequence[Record]) -> str:
    """The history as one HTML file, with a plot of every ratio that was measured more than once.

    Raises
    ------
    Refused
        Something is to be plotted, and Matplotlib is not installed.
    """
    found = ratios(records)
    fallen, broken = falls(found), breaks(records)
    lead, bad = _verdict(records, found)
    several = {series: seen for series, seen in found.items() if len(seen) > 1}
    first = {fall.series for fall in fallen}
    order = sorted(several, key=lambda series: (series not in first, series))
    plots = [
        _plot(series, several[series], number) for number, series in enumerate(order[:MAX_PLOTS])
    ]
    return render(
        "history.html.j2",
        HERE,
        title="draftproof history",
        lead=lead,
        tone="bad" if bad else "good" if several else "unsure",
        contents=[("changes", "Changes"), ("conformance", "Conformance"), ("ratios", "Ratios")],
        environment=[],
        changes=[
            *((fall.stands, fall.series.device, fall_text(fall)) for fall in fallen),
            *((one.stands, one.device, break_text(one)) for one in broken),
        ],
        conformance=conformance(records),
        plots=plots,
        left_out=len(order) - len(plots),
        ratios=[
            (series, len(seen), _spread(seen[0]), _spread(seen[-1]), seen[-1].commit)
            for series, seen in found.items()
        ],
    )


def _plot(series: Series, seen: Sequence[Observation], number: int) -> dict[str, str]:
    places = list(range(len(seen)))
    line = Line(
        series.arms,
        "ours",
        places,
        [one.ratio for one in seen],
        [one.low for one in seen],
        [one.high for one in seen],
    )
    title = f"{series.op}, {series.point.replace('_', ' ')} ({series.mode}), {series.device}"
    ticks = [(place, one.commit[:7]) for place, one in zip(places, seen, strict=True)]
    drawn = draw(Plot(title, "commit", "ratio", [line], ticks, log_y=False), f"ratio-{number}")
    return {"title": title, "svg": drawn}


def show(folder: Path, html: Path | None, width: int | None) -> int:
    """Print the history of a folder and write its page.

    Returns
    -------
    int
        1 where a ratio that fell, or a check that broke, is so in the newest record; else 0.
    """
    records = gather(folder)
    print(text(records, width), end="")
    if html is not None:
        html.write_text(page(records), encoding="utf-8")
    return int(_verdict(records, ratios(records))[1])
