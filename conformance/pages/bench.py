"""The page of a benchmark run: tables by op, and time against each size that was varied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.conformance.pages.page import environment_rows, render
from draftproof.conformance.pages.plots import Line, Plot, draw

FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
"""What the letter behind a number of a point's name multiplies it by."""

MAX_PLOTS = 8
"""Plots of one op against one size."""


def bench_page(document: Mapping[str, Any]) -> str:
    """The page of a run.

    Parameters
    ----------
    document : mapping
        What `bench --json` writes.

    Returns
    -------
    str
        HTML that needs no other file.

    Raises
    ------
    Refused
        Matplotlib is not installed.
    """
    rows = document["rows"]
    about = document["environment"]
    totals = document["totals"]
    judged = totals["reach_met"] + totals["reach_missed"]
    if about.get("device_kind") == "cpu" or all(row["mode"] == "interpreted" for row in rows):
        lead, tone = (
            "No GPU: these times show that the benchmark works, not how fast it is.",
            ("unsure"),
        )
    elif totals["reach_missed"]:
        lead = f"The reach was missed in {totals['reach_missed']} of {judged} rows."
        tone = "bad"
    else:
        lead, tone = f"The reach was met in all {judged} rows that have one.", "good"
    ops = list(dict.fromkeys(row["op"] for row in rows))
    return render(
        "bench.html.j2",
        title=f"draftproof bench: {about.get('device', 'unknown device')}",
        lead=lead,
        tone=tone,
        contents=[*((op, op) for op in ops), ("environment", "Environment")],
        environment=environment_rows(about),
        ops=[_section(op, [row for row in rows if row["op"] == op]) for op in ops],
    )


def _section(op: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arms = list(dict.fromkeys(arm for row in rows for arm in row["us"]))
    drawn: list[dict[str, str]] = []
    left_out = 0
    found = plots(rows)
    for size in dict.fromkeys(plot.x_label for plot in found):
        chosen = [plot for plot in found if plot.x_label == size]
        left_out += max(0, len(chosen) - MAX_PLOTS)
        for plot in chosen[:MAX_PLOTS]:
            drawn.append({"title": plot.title, "svg": draw(plot, f"{op}-{len(drawn)}")})
    return {
        "op": op,
        "arms": arms,
        "rows": [_row(row, arms) for row in rows],
        "plots": drawn,
        "left_out": left_out,
    }


def _row(row: Mapping[str, Any], arms: Sequence[str]) -> dict[str, Any]:
    return {
        "point": row["point"].replace("_", " "),
        "mode": row["mode"],
        "times": [
            {
                "us": f"{row['us'][arm]:.2f}",
                "spread": " to ".join(f"{end:.2f}" for end in row["spread_us"][arm]),
                "published": row["published_us"].get(arm),
            }
            if arm in row["us"]
            else None
            for arm in arms
        ],
        "ratio": None if row["ratio"] is None else f"{row['ratio']:.2f}x",
        "limit": None if row["bandwidth_limit_us"] is None else f"{row['bandwidth_limit_us']:.2f}",
        "met": row["met"],
        "verdict": row["verdict"],
    }


def sizes(point: str) -> dict[str, float]:
    """The sizes that a point's name tells: `float32_layers31_requests8` has 31 layers.

    A number behind a word names that word's size, joined (`bs16`, `live64k`) or apart
    (`shard_19360`); a number behind a type's name is part of it.
    """
    found: dict[str, float] = {}
    word = ""
    for part in point.split("_"):
        match = re.fullmatch(r"([a-z]*?)(\d+)([km]?)", part)
        if match is None or match[1] in ("float", "bfloat", "fp", "bf", "int", "uint"):
            word = part
            continue
        if name := match[1] or word:
            found[name] = int(match[2]) * FACTORS[match[3]]
        word = ""
    return found


def plots(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Time against every size of which an op's rows have two values or more, all else equal."""
    found = []
    timed = [row for row in rows if row["mode"] in ("graph", "cold", "eager")]
    names = dict.fromkeys(name for row in timed for name in sizes(row["point"]))
    for name in names:
        groups: dict[tuple[str, ...], list[tuple[float, Mapping[str, Any]]]] = {}
        for row in timed:
            own = sizes(row["point"])
            if name not in own or row["mode"] == "eager":
                continue
            rest = _without(row["point"], name)
            key = (rest, row["mode"], row["subject"], row["baseline"])
            groups.setdefault(key, []).append((own[name], row))
        for (rest, mode, subject, baseline), members in groups.items():
            if len(members) > 1:
                members.sort(key=lambda member: member[0])
                about = " ".join(rest.replace("_", " ").split())
                title = f"{subject} and {baseline} against {name}" + (f", {about}" if about else "")
                found.append(
                    Plot(
                        f"{title} ({mode})",
                        name,
                        "us per call",
                        _lines(members, subject, baseline),
                    )
                )
    # Those with most points tell most.
    return sorted(found, key=lambda plot: -max(len(line.x) for line in plot.lines))


def _without(point: str, name: str) -> str:
    """A point's name less one of its sizes."""
    return re.sub(rf"(^|_){name}_?\d+[km]?(?=_|$)", r"\1", point).strip("_").replace("__", "_")


def _lines(
    members: Sequence[tuple[float, Mapping[str, Any]]], subject: str, baseline: str
) -> list[Line]:
    lines = []
    for arm, tone in ((subject, "ours"), (baseline, "other")):
        timed = [(x, row) for x, row in members if arm in row["us"]]
        if timed:
            lines.append(
                Line(
                    arm,
                    tone,
                    [x for x, _ in timed],
                    [row["us"][arm] for _, row in timed],
                    [row["spread_us"][arm][0] for _, row in timed],
                    [row["spread_us"][arm][1] for _, row in timed],
                )
            )
    limited = [(x, row["bandwidth_limit_us"]) for x, row in members if row["bandwidth_limit_us"]]
    if limited:
        lines.append(Line("bandwidth limit", "limit", *map(list, zip(*limited, strict=True))))
    said = [
        (x, row["published_us"][subject]) for x, row in members if subject in row["published_us"]
    ]
    if said:
        lines.append(
            Line(f"{subject}, published", "published", *map(list, zip(*said, strict=True)))
        )
    return lines
