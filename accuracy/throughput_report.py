"""Text, Markdown, HTML and plots of a throughput measurement."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from draftproof.accuracy.report import PLOT_STYLE, Page, Section, write_page

_COLOURS = ("#1f4e79", "#c0562b", "#2a7d3f", "#7a4a9e")


def _ratio_text(one: dict[str, Any]) -> str:
    text = f"{one['of']} against {one['to']}, {one['concurrency']} at a time: "
    text += f"{one['value']:.4f}"
    if one["low"] is not None:
        text += f", {100 * one['level']:g}% interval {one['low']:.4f} to {one['high']:.4f}"
    text += f" ({one['method']}): {one['claim']}"
    if one["ranges_overlap"]:
        text += "; the ranges of the rounds overlap"
    return text


def _point_row(point: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    accept = point["accept_length"]
    return [
        _label(point["label"], summary),
        str(point["concurrency"]),
        f"{point['launches']} x {point['rounds'] / point['launches']:g}",
        f"{point['user_rate']:.2f}",
        f"{point['range'][0]:.2f} to {point['range'][1]:.2f}",
        f"{100 * point['spread']:.2f}%",
        f"{1000 * point['ttft_s']:.1f}",
        f"{point['output_rate']:.1f}",
        "" if accept is None else f"{accept:.3f}",
    ]


_COLUMNS = [
    "arm",
    "users",
    "launches x rounds",
    "tok/s/user",
    "range",
    "spread",
    "TTFT, ms",
    "output tok/s",
    "accept length",
]


def _label(label: str, summary: dict[str, Any]) -> str:
    """An arm's name; made-up acceptance stands wherever its figures do."""
    made_up = summary["simulated_acceptance"].get(label)
    return f"{label} (simulated acceptance: {made_up})" if made_up else label


def throughput_text(summary: dict[str, Any]) -> str:
    """Write a summary (see `summarise`) as a few lines for a terminal."""
    lines = [f"workload {summary['plan']['workload']} ({summary['plan']['workload_sha256'][:12]})"]
    for point in summary["points"]:
        row = dict(zip(_COLUMNS, _point_row(point, summary), strict=True))
        lines.append(", ".join(f"{name} {text}" for name, text in row.items() if text))
    lines += [_ratio_text(one) for one in summary["ratios"]]
    lines += [f"note: {flag}" for flag in summary["flags"]]
    return "\n".join(lines)


def write_throughput(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.md`, `summary.html` and the plot into a folder."""
    plan = summary["plan"]
    ratios = [_ratio_text(one) for one in summary["ratios"]]
    lead = ratios[0] if ratios else "One arm: its figures, and nothing to compare them with."
    sections = [
        Section(
            "Figures",
            [
                f"Workload: {plan['workload']}, SHA-256 {plan['workload_sha256']}; "
                f"{plan['output_tokens']} tokens out, checked.",
                "tok/s/user is 1 / median seconds a token behind the first event; medians over "
                "rounds, spread (max - min) / median.",
            ],
            _COLUMNS,
            [_point_row(point, summary) for point in summary["points"]],
        )
    ]
    if ratios:
        sections.append(Section("Ratios of tok/s/user", ratios))
    if summary["flags"]:
        sections.append(Section("To know", summary["flags"]))
    claims = {one["claim"] for one in summary["ratios"]}
    tone = "bad" if "slower" in claims else "good" if "faster" in claims else "unsure"
    title = "Decode throughput: " + ", ".join(
        f"{_label(label, summary)} {model}" for label, model in summary["models"].items()
    )
    page = Page(
        title, lead, tone, sections, _plot(summary), "Rates by users, and what users cost each"
    )
    write_page(page, folder)


def _plot(summary: dict[str, Any]) -> str:
    """tok/s/user by users, with the rounds' ranges, beside output tok/s by tok/s/user."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for place, label in enumerate(summary["models"]):
            points = [point for point in summary["points"] if point["label"] == label]
            points.sort(key=lambda point: point["concurrency"])
            style: dict[str, Any] = {
                "color": _COLOURS[place % len(_COLOURS)],
                "label": _label(label, summary),
                "marker": "o",
                "markersize": 4,
                "linewidth": 1,
            }
            users = [point["concurrency"] for point in points]
            rates = [point["user_rate"] for point in points]
            ends = [
                [abs(point["user_rate"] - point["range"][end]) for point in points]
                for end in (0, 1)
            ]
            left.errorbar(users, rates, yerr=ends, capsize=3, **style)
            right.plot(rates, [point["output_rate"] for point in points], **style)
        left.set_xscale("log", base=2)
        left.set_xlabel("users at a time")
        left.set_ylabel("tok/s/user, with the range of the rounds")
        right.set_xlabel("tok/s/user")
        right.set_ylabel("output tok/s")
        for axis in (left, right):
            axis.grid(linewidth=0.3)
            axis.legend(fontsize=7)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "draftproof"})
    return target.getvalue()
