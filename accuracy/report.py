"""Markdown and HTML summaries of a run, and of a comparison with a plot of its arms."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from draftproof.accuracy.runs import Run, load_run

PLOT_FILE = "plot.svg"

# So many flipped questions are listed; the JSON has all of them.
_FLIPPED_SHOWN = 50

PLOT_STYLE: dict[Any, Any] = {
    # Without a salt of its own Matplotlib draws random ids; texts stay texts, so that no font of
    # this machine gets into the file.
    "svg.hashsalt": "draftproof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
}
_RATE_METRIC = re.compile(r"^(pass|majority|score|no_answer|.*_rate)")

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=jinja2.select_autoescape(["html.j2"]),
)
_TEMPLATES.filters["cell"] = lambda text: " ".join(str(text).split()).replace("|", "\\|")


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs and perhaps a table."""

    heading: str
    paragraphs: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """What both templates show. `tone` colours the lead: good, bad or unsure."""

    title: str
    lead: str
    tone: str
    sections: list[Section]
    plot_svg: str | None
    plot_alt: str = ""


@dataclass(frozen=True)
class Bar:
    """One interval of the plot, in percent or percentage points; `low` and `high` None: a dot."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def percent(rate: float) -> str:
    """Write a fraction as a percentage with two decimals."""
    return f"{100 * rate:.2f}%"


def points(difference: float) -> str:
    """Write a difference of fractions as signed percentage points."""
    return f"{100 * difference:+.2f} points"


def _range_text(interval: dict[str, Any], form: Any) -> str:
    return (
        f"{form(interval['low'])} to {form(interval['high'])} "
        f"({100 * interval['level']:g}%, {interval['method']})"
    )


def draw(panels: list[tuple[str, list[Bar], list[float]]]) -> str:
    """Draw horizontal intervals, one panel under the other.

    Parameters
    ----------
    panels : list of (axis label, bars, positions of vertical lines)

    Returns
    -------
    str
        SVG; the same bytes for the same input and Matplotlib.
    """
    # Matplotlib takes a second to import, and only a comparison draws.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(PLOT_STYLE):
        heights = [0.5 + 0.32 * len(bars) for _, bars, _ in panels]
        figure = Figure(figsize=(7.0, 0.5 + sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (label, bars, lines) in zip(axes, panels, strict=True):
            for place, bar in enumerate(reversed(bars)):
                if bar.low is not None:
                    axis.plot([bar.low, bar.high], [place, place], color="#1f4e79", linewidth=2)
                marker = "o" if bar.low is not None else "x"
                axis.plot([bar.value], [place], marker, color="#1f4e79", markersize=5)
            for line in lines:
                axis.axvline(line, color="#a33", linewidth=1, linestyle="--")
            axis.set_yticks(range(len(bars)), [bar.label for bar in reversed(bars)])
            axis.set_ylim(-0.6, len(bars) - 0.4)
            axis.set_xlabel(label)
            axis.grid(axis="x", linewidth=0.3)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "draftproof"})
    return target.getvalue()


def write_page(page: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encoded = base64.b64encode(page.plot_svg.encode()).decode() if page.plot_svg else None
    for suffix in ("md", "html"):
        text = _TEMPLATES.get_template(f"report.{suffix}.j2").render(
            page=page, plot_file=PLOT_FILE, plot_base64=encoded
        )
        (folder / f"summary.{suffix}").write_text(text, encoding="utf-8")
    if page.plot_svg:
        (folder / PLOT_FILE).write_text(page.plot_svg, encoding="utf-8")


def write_run_summary(folder: Path) -> None:
    """Write `summary.md` and `summary.html` into a run's folder.

    Its one interval stands in a line: a plot would cost more CPU time than 200 questions.

    Parameters
    ----------
    folder : Path
        A run folder with its result, responses and receipt. Of a run that is not a measurement no
        score or interval is shown.

    Raises
    ------
    ValueError
        If it is no run folder, or its files contradict each other.
    """
    write_page(_run_page(load_run(folder)), folder)


def _run_page(run: Run) -> Page:
    result, lane = run.result, run.lane
    counts = result["counts"]
    rows = []
    for name, value in counts.items():
        said = name.replace("_", " ").replace("paused s", "paused, seconds")
        if isinstance(value, dict):
            rows.append([said, str(sum(value.values()))])
            rows += [[f"{said}: {kind}", str(number)] for kind, number in value.items()]
        else:
            rows.append([said, str(value)])
    counted = Section(
        "Counts",
        [f"Planned: {lane.dataset.scored} questions times {lane.repeats}; the denominator."],
        ["what", "responses"],
        rows,
    )
    asked = Section(
        "Protocol",
        [],
        ["field", "value"],
        [
            ["lane", f"{lane.name} (SHA-256 {lane.sha256})"],
            ["label", str(run.receipt["label"] or "none")],
            ["model", str(run.receipt["model"]["id"])],
            ["server", str(run.receipt["server"]["base_url"])],
            *([name, str(value)] for name, value in _version(run.receipt["server"]["build"])),
            ["endpoint", lane.endpoint],
            ["concurrency", str(lane.concurrency)],
            *([name, str(value)] for name, value in lane.sampling.sent.items()),
            ["scorer", lane.scorer],
        ],
    )
    notes = [*result["flags"]]
    if lane.is_modified:
        notes.append("The lane is modified: no figure here compares with a published one.")
    sections = [counted, asked]
    if notes:
        sections.insert(0, Section("To know", notes))
    title = f"Accuracy run: {lane.name}"
    if result["status"] != "complete" or not result["measurement"]:
        reasons = result["not_a_measurement"] or [f"the run is {result['status']}"]
        lead = f"Not a measurement: {'; '.join(reasons)}."
        return Page(title, lead, "bad", sections, None)
    interval = result["interval"]
    metrics = Section(
        "Metrics",
        ["The interval speaks of these questions, not of all questions."],
        ["metric", "value"],
        [
            ["score", percent(result["score"])],
            ["interval", _range_text(interval, percent)],
            *([name, _metric_text(name, value)] for name, value in result["metrics"].items()),
        ],
    )
    if result["accept_length"] is not None:
        metrics.rows.append(["accept length", f"{result['accept_length']:.3f}"])
    return Page(
        title,
        f"Score {percent(result['score'])}, interval {_range_text(interval, percent)}."
        + "".join(f" But {doubt}." for doubt in result["doubts"]),
        "unsure" if result["doubts"] else "good",
        [metrics, *sections],
        None,
    )


def _version(build: dict[str, Any]) -> list[tuple[str, Any]]:
    """What of a build a reader knows it by."""
    return [(name, value) for name, value in build.items() if name.endswith("version")]


def _run_name(run: dict[str, Any]) -> str:
    """A run of a comparison by label, model, server and version."""
    label = f"{run['label']}: " if run["label"] else ""
    version = ", ".join(str(value) for _, value in _version(run["build"]))
    return f"{label}{run['model']} at {run['server']}{f' ({version})' if version else ''}"


def _attempts_text(runs: list[dict[str, Any]]) -> str:
    """How often an arm was asked, and asked again."""
    again: Counter[str] = sum((Counter(run["retried"]) for run in runs), Counter())
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(again.items()))
    attempts = sum(run["attempts"] for run in runs)
    return f"{attempts} attempts, asked again {again.total()}{f' ({kinds})' if kinds else ''}"


def _metric_text(name: str, value: Any) -> str:
    if isinstance(value, float) and _RATE_METRIC.match(name):
        return percent(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tells(comparison: dict[str, Any]) -> list[str]:
    """Say what would tell, where the verdict is that this cannot."""
    told = comparison["would_tell"]
    if told is None:
        return []
    sizes = []
    if told["questions"] is not None:
        sizes.append(f"{told['questions']} questions of this kind")
    if told.get("responses_per_question") is not None:
        sizes.append(f"{told['responses_per_question']} responses per question and arm")
    lines = []
    if sizes:
        lines.append(
            f"{' or '.join(sizes)} would tell, if difference and churn stay as they are "
            f"(now {comparison['questions']} x {comparison['responses_per_question']})."
        )
    if told["questions"] is None:
        lines.append("No number of questions up to ten million would tell at this difference.")
    if told.get("responses_per_question", 0) is None:
        lines.append("No number of responses to these questions alone would tell.")
    return lines


def _margin_text(comparison: dict[str, Any]) -> str:
    margin = comparison["margin"]
    text = f"margin {margin['points']:g} points"
    if margin["overridden"]:
        text += f" (overridden; the lane's is {margin['lane_points']:g})"
    return text


def _verdict_text(comparison: dict[str, Any]) -> str:
    return (
        f"B against A: {comparison['verdict']}. B - A = {points(comparison['difference'])}, "
        f"interval {_range_text(comparison['interval'], points)}; {_margin_text(comparison)}."
    )


def comparison_text(comparison: dict[str, Any]) -> str:
    """Write a comparison (see `compare.schema.json`) as a few lines for a terminal."""
    lines = [_verdict_text(comparison)]
    for name, arm in comparison["arms"].items():
        of = ", ".join(dict.fromkeys(map(_run_name, arm["runs"])))
        lines.append(
            f"{name.upper()}: {percent(arm['score'])}, {_range_text(arm['interval'], percent)}; "
            f"{len(arm['runs'])} run(s) of {of}{_of_repeats_text(arm)}; "
            f"{_attempts_text(arm['runs'])}"
        )
    table = comparison["table"]
    lines += [
        f"responses: both right {table['both_right']}, only A {table['only_a']}, only B "
        f"{table['only_b']}, neither {table['neither']}",
        f"questions: better in B {comparison['questions_better']}, worse "
        f"{comparison['questions_worse']} of {comparison['questions']}; exact McNemar "
        f"p = {comparison['mcnemar_p']:.3g}",
        *_tells(comparison),
    ]
    for floor in comparison["noise_floor"]:
        lines.append(_floor_text(floor))
    lines += [f"note: {flag}" for flag in comparison["flags"]]
    lines.append("The interval speaks of these questions, not of all questions.")
    return "\n".join(lines)


def _of_repeats_text(arm: dict[str, Any]) -> str:
    told = arm["of_repeats"]
    if told is None:
        return ""
    return (
        f"; pass@{told['k']} {percent(told['pass'])}, "
        f"majority@{told['k']} {percent(told['majority'])}"
    )


def _floor_text(floor: dict[str, Any]) -> str:
    flips = floor["questions_better"] + floor["questions_worse"]
    return (
        f"noise floor, {floor['arm']} against itself: {points(floor['difference'])}, {flips} "
        f"questions flipped, {floor['texts_that_differ']} texts differ"
    )


def write_comparison(comparison: dict[str, Any], folder: Path) -> None:
    """Write `summary.md`, `summary.html` and the plot of a comparison into a folder.

    Parameters
    ----------
    comparison : dict
        As `compare()` returns it.
    folder : Path
        Made if it is not there.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    write_page(_comparison_page(comparison), folder)


def _comparison_page(comparison: dict[str, Any]) -> Page:
    table = comparison["table"]
    arms = comparison["arms"]
    smallest = comparison["smallest_difference"]
    sections = [
        Section(
            "Verdict",
            [
                *_tells(comparison),
                "The interval decides; it speaks of these questions, not of all questions.",
                f"Exact McNemar: p = {comparison['mcnemar_p']:.3g} over "
                f"{comparison['questions_better']} better and {comparison['questions_worse']} "
                "worse questions.",
                *(
                    [f"Smallest difference found with 80% power here: {points(smallest)[1:]}."]
                    if smallest
                    else []
                ),
            ],
        ),
        Section(
            "Arms",
            [f"Lane {comparison['lane']}, runs in the order {comparison['order']}."],
            ["arm", "run", "of", "score", "interval, attempts", "accept length"],
            [
                row
                for name, arm in arms.items()
                for row in [
                    [
                        name.upper(),
                        f"all {len(arm['runs'])}",
                        "",
                        percent(arm["score"]),
                        _range_text(arm["interval"], percent) + _of_repeats_text(arm),
                        "",
                    ],
                    *(
                        [
                            name.upper(),
                            Path(run["folder"]).name,
                            _run_name(run),
                            percent(run["score"]),
                            _attempts_text([run]),
                            "" if run["accept_length"] is None else f"{run['accept_length']:.3f}",
                        ]
                        for run in arm["runs"]
                    ),
                ]
            ],
        ),
        Section(
            "Responses side by side",
            [f"{comparison['texts_that_differ']} of {sum(table.values())} texts differ."],
            ["", "B right", "B wrong"],
            [
                ["A right", str(table["both_right"]), str(table["only_a"])],
                ["A wrong", str(table["only_b"]), str(table["neither"])],
            ],
        ),
    ]
    if comparison["noise_floor"]:
        floors = [_floor_text(floor) for floor in comparison["noise_floor"]]
        sections.append(Section("Noise floor", floors))
    if comparison["flags"]:
        sections.append(Section("To know", comparison["flags"]))
    flipped = comparison["flipped"]
    shown = flipped[:_FLIPPED_SHOWN]
    more = len(flipped) - len(shown)
    total = comparison["responses_per_question"]
    sections.append(
        Section(
            "Flipped questions",
            [f"{len(flipped)} of {comparison['questions']}" + (f"; {more} not shown" * bool(more))],
            ["question", "A right", "B right", "A answered", "B answered"],
            [
                [
                    flip["question_id"],
                    *(f"{flip['right'][arm]}/{total}" for arm in "ab"),
                    *(
                        ", ".join("none" if text is None else text for text in flip["answers"][arm])
                        for arm in "ab"
                    ),
                ]
                for flip in shown
            ],
        )
    )
    tones = {"worse": "bad", "cannot tell": "unsure"}
    return Page(
        f"Accuracy comparison: {comparison['lane']}",
        _verdict_text(comparison),
        tones.get(comparison["verdict"], "good"),
        sections,
        _comparison_plot(comparison),
        "Scores of the arms and their difference, with intervals",
    )


def _comparison_plot(comparison: dict[str, Any]) -> str:
    bars = []
    for name, arm in comparison["arms"].items():
        interval = arm["interval"]
        bars.append(
            Bar(
                name.upper(),
                *(100 * value for value in (arm["score"], interval["low"], interval["high"])),
            )
        )
        if len(arm["runs"]) > 1:
            bars += [
                Bar(f"{name.upper()}{number}", 100 * run["score"])
                for number, run in enumerate(arm["runs"], start=1)
            ]
    interval = comparison["interval"]
    difference = Bar(
        "B - A",
        *(100 * v for v in (comparison["difference"], interval["low"], interval["high"])),
    )
    return draw(
        [
            ("score, %", bars, []),
            (
                "difference, points (lines: 0 and the margin)",
                [difference],
                [0.0, -comparison["margin"]["points"]],
            ),
        ]
    )
