"""Timings of one run put together: ratios, the empty launch, the bandwidth limit, the reach."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.session import Settings
from draftproof.conformance.engine.spec import BenchPoint
from draftproof.conformance.environment import describe

BENCH_SCHEMA = "draftproof.bench/1"
TABLE_WIDTH = 170
"""Columns of the table where the output is not a terminal."""


@dataclass(frozen=True)
class Row:
    """One point in one mode.

    Parameters
    ----------
    us : dict of str to float
        Median time of one call by arm, in microseconds, "empty" among them.
    spread_us : dict of str to list
        Smallest and largest round by arm.
    subject, baseline : str
        The arm whose speed is claimed, and the one that it is held against.
    ratio : float
        baseline / subject.
    bandwidth_limit_us : float, optional
        Bytes that must move over the copy bandwidth measured in this run.
    published_us : dict of str to float
        Published times by arm.
    met : bool, optional
        Whether the reach was met; None where the point has none.
    verdict : str
        The reach in words.
    """

    op: str
    point: str
    mode: str
    subject: str
    baseline: str
    us: dict[str, float]
    spread_us: dict[str, list[float]]
    ratio: float | None
    bandwidth_limit_us: float | None
    published_us: dict[str, float]
    met: bool | None
    verdict: str


def bench_rows(timings: Sequence[dict[str, Any]], settings: Settings) -> list[Row]:
    """Group the timings of a run by point and mode."""
    points = {
        (op, point.name): point
        for op in settings.chosen()
        for point in (load_specs()[op].bench or list)()
    }
    grouped: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for timing in timings:
        key = (timing["op"], timing["point"], timing["mode"])
        grouped.setdefault(key, {})[timing["arm"]] = timing
    eager = {
        (op, point): {f"{arm}/eager": timing["median_us"] for arm, timing in arms.items()}
        for (op, point, mode), arms in grouped.items()
        if mode == "eager"
    }
    return [
        _row(points[op, point], op, mode, arms, eager.get((op, point), {}))
        for (op, point, mode), arms in grouped.items()
    ]


def _row(
    point: BenchPoint,
    op: str,
    mode: str,
    arms: dict[str, dict[str, Any]],
    eager: dict[str, float],
) -> Row:
    us = {arm: timing["median_us"] for arm, timing in arms.items()}
    subject = next(iter(point.arms), "triton")
    limit = next((timing["bandwidth_limit_us"] for timing in arms.values()), None)
    met, verdict = None, ""
    # The reach is judged once, with the graph replays; it may look at eager times too.
    if point.reach is not None and mode in ("graph", "cold"):
        known = {**us, **eager, **({"copy_limit": limit} if limit else {})}
        met, verdict = point.reach(known)
    ratio = us[point.baseline] / us[subject] if {point.baseline, subject} <= set(us) else None
    return Row(
        op=op,
        point=point.name,
        mode=mode,
        subject=subject,
        baseline=point.baseline,
        us=us,
        spread_us={arm: [timing["min_us"], timing["max_us"]] for arm, timing in arms.items()},
        ratio=None if mode == "interpreted" else ratio,
        bandwidth_limit_us=limit,
        published_us=dict(point.published_us),
        met=met,
        verdict=verdict,
    )


def record(rows: Sequence[Row], settings: Settings) -> dict[str, Any]:
    """A record of the run: the JSON of `bench --json`."""
    return {
        "schema": BENCH_SCHEMA,
        "environment": {**describe(settings.device), "device_kind": settings.device},
        "rows": [asdict(row) for row in rows],
        "totals": {
            "rows": len(rows),
            "reach_met": sum(row.met is True for row in rows),
            "reach_missed": sum(row.met is False for row in rows),
        },
    }


def table_lines(rows: Sequence[Row], settings: Settings) -> str:
    """The table of a run, times in microseconds per call."""
    console = Console(file=io.StringIO(), width=TABLE_WIDTH)
    if settings.device == "cpu":
        console.print(
            "No CUDA device: the first point of each op ran under the interpreter, which shows "
            "that the benchmark works and says nothing of speed.",
            highlight=False,
        )
    for op in dict.fromkeys(row.op for row in rows):
        chosen = [row for row in rows if row.op == op]
        arms = list(dict.fromkeys(arm for row in chosen for arm in row.us if arm != "empty"))
        table = Table(title=f"{op}: median us per call (published in brackets)")
        for column in ("point", "mode", *arms, "empty", "ratio", "bandwidth limit", "reach"):
            table.add_column(column, no_wrap=column in ("mode", "ratio"))
        for row in chosen:
            table.add_row(
                row.point,
                row.mode,
                *[_cell(row, arm) for arm in arms],
                _cell(row, "empty"),
                "" if row.ratio is None else f"{row.ratio:.2f}x",
                "" if row.bandwidth_limit_us is None else f"{row.bandwidth_limit_us:.2f}",
                row.verdict and ("met: " if row.met else "MISSED: ") + row.verdict,
            )
        console.print(table)
    judged = [row for row in rows if row.met is not None]
    if judged:
        met = sum(row.met is True for row in judged)
        console.print(f"reach met in {met} of {len(judged)} rows", highlight=False)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def _cell(row: Row, arm: str) -> str:
    if arm not in row.us:
        return ""
    published = row.published_us.get(arm)
    return f"{row.us[arm]:.2f}" + (f" [{published:g}]" if published is not None else "")
