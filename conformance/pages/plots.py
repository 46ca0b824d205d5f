"""Plots as SVG that takes its colours from the page, so that it reads in the dark too."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.conformance.names import Refused

TONES = ("ours", "other", "limit", "published", "text")
"""What a line is; the page's style has a colour of the same name."""

# Colours that stand in the drawing for the page's own, one for each tone.
_STANDINS = dict(zip(TONES, ("#010101", "#020202", "#030303", "#040404", "#050505"), strict=True))

_STYLE: dict[Any, Any] = {
    # Without a salt of its own Matplotlib draws random ids; texts stay texts, so that no font of
    # this machine gets into the file.
    "svg.hashsalt": "draftproof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": _STANDINS["text"],
    "axes.edgecolor": _STANDINS["text"],
    "axes.labelcolor": _STANDINS["text"],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": _STANDINS["text"],
    "ytick.color": _STANDINS["text"],
    "grid.color": _STANDINS["text"],
    "grid.alpha": 0.2,
    "legend.frameon": False,
}

_DASHES = {"ours": "-", "other": "--", "limit": ":", "published": "", "text": "-"}
_MARKERS = {"ours": "o", "other": "s", "limit": "", "published": "D", "text": ""}


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Parameters
    ----------
    label : str
    tone : str
        One of `TONES`. Lines differ by dash and marker too, for those who see no colours.
    x, y : sequence of float
    low, high : sequence of float, optional
        Ends of the bars around each point.
    """

    label: str
    tone: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Plot:
    """One set of axes.

    Parameters
    ----------
    title : str
        What it shows; all that a screen reader says of it beside the table.
    x_label, y_label : str
    lines : sequence of Line
    ticks : sequence of (float, str), optional
        Marks of the x axis. None: the values, on a logarithmic scale.
    log_y : bool
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Sequence[tuple[float, str]] | None = None
    log_y: bool = True


def draw(plot: Plot, name: str) -> str:
    """Draw a plot as SVG to stand inside a page.

    Parameters
    ----------
    plot : Plot
    name : str
        Unique on the page: ids of the drawing begin with it.

    Raises
    ------
    Refused
        Matplotlib is not installed.
    """
    # Matplotlib takes a second to import: only who draws pays for it.
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise Refused(
            f"plots need the package {error.name}: pip install 'draftproof[reports]'"
        ) from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if plot.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        if plot.ticks is None:
            axes.set_xscale("log", base=2)
            marks = sorted({x for line in plot.lines for x in line.x})
            axes.set_xticks(marks, [short(mark) for mark in marks])
            axes.minorticks_off()
        else:
            axes.set_xticks([at for at, _ in plot.ticks], [text for _, text in plot.ticks])
            if len(plot.ticks) > 4:
                axes.tick_params(axis="x", rotation=60)
        for line in plot.lines:
            _add(axes, line)
        axes.grid(linewidth=0.6)
        axes.legend(fontsize=8.5)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "draftproof"})
    return _inline(target.getvalue(), plot.title, name)


def _add(axes: Any, line: Line) -> None:
    style = {
        "color": _STANDINS[line.tone],
        "linestyle": _DASHES[line.tone],
        "marker": _MARKERS[line.tone],
        "markersize": 4,
        "linewidth": 1.6,
        "label": line.label,
    }
    if line.low is None or line.high is None:
        axes.plot(line.x, line.y, **style)
        return
    below = [max(0.0, y - low) for y, low in zip(line.y, line.low, strict=True)]
    above = [max(0.0, high - y) for y, high in zip(line.y, line.high, strict=True)]
    axes.errorbar(line.x, line.y, yerr=[below, above], elinewidth=1, capsize=2, **style)


def short(number: float) -> str:
    """A number for an axis: 65536 is 64k, 1048576 is 1M."""
    for size, sign in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= size and number % size == 0:
            return f"{number // size:g}{sign}"
    return f"{number:g}"


def _inline(svg: str, title: str, name: str) -> str:
    """The drawing without its file's head, named for screen readers, coloured by the page."""
    svg = svg[svg.index("<svg") :]
    # A page holds several drawings, and an id may stand in it once.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    for tone, colour in _STANDINS.items():
        svg = svg.replace(colour, "currentColor" if tone == "text" else f"var(--{tone})")
    # What no colour was said for is black in SVG.
    svg = re.sub(r'style="(font: [^"]*)"', _with_fill, svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_escaped(title)}" ', 1)


def _with_fill(match: re.Match[str]) -> str:
    style = match[1]
    return f'style="{style if "fill" in style else style + "; fill: currentColor"}"'


@functools.cache
def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
