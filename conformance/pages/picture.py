"""Pictures of wrong elements, drawn from what travels with a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.conformance.engine.places import ALL_WRONG

WIDTH = 640
"""Units of a picture's width, its height at most."""

LARGEST_CELL = 24
"""Units of a cell's side, at most."""


@dataclass(frozen=True)
class Bar:
    """Cells of one line and one level, side by side, in units of the picture."""

    x: float
    y: float
    width: float
    height: float
    full: bool
    """Whether every element under it is wrong."""


@dataclass(frozen=True)
class Picture:
    """One drawing.

    Parameters
    ----------
    title : str
        What it shows, in words: all that a screen reader says of it.
    note : str
        How to read it.
    width, height : float
        Its size in units.
    bars : list of Bar
    """

    title: str
    note: str
    width: float
    height: float
    bars: list[Bar]


def pictures(place: Mapping[str, Any], *, named: bool) -> list[Picture]:
    """Draw every picture of one leaf.

    Parameters
    ----------
    place : mapping
        As `engine.places.places` made it.
    named : bool
        Whether to name the leaf, where a report shows several.
    """
    return [
        _draw(place, picture, number, named) for number, picture in enumerate(place["pictures"])
    ]


def _draw(
    place: Mapping[str, Any], picture: Mapping[str, Any], number: int, named: bool
) -> Picture:
    lines = [line for line, repeats in picture["lines"] for _ in range(repeats)]
    wide = max(map(len, lines))
    side = min(LARGEST_CELL, WIDTH / max(wide, len(lines)))
    bars = []
    for y, line in enumerate(lines):
        x = 0
        while x < len(line):
            end = x
            while end < len(line) and line[end] == line[x]:
                end += 1
            if line[x] != "0":
                full = int(line[x]) == ALL_WRONG
                bars.append(Bar(x * side, y * side, (end - x) * side, side, full))
            x = end
    shape = " x ".join(map(str, place["shape"])) or "a single element"
    top, bottom = picture["rows"]
    left, right = picture["columns"]
    part = f"rows {top} to {bottom - 1}, columns {left} to {right - 1}"
    if number == 0:
        count = f"{place['wrong']} of {place['of']} elements are wrong"
        title = f"{place['path']}: {count}, in a tensor of {shape}"
    else:
        title = f"{place['path'] + ', ' if named else ''}the part that holds them: {part}"
    high, broad = picture["cell"]
    note = "a square is one element" if high == broad == 1 else f"a square is {high} x {broad}"
    if number == 0 and len(place["shape"]) > 2:
        note += "; a line is a row of the last dimension, all others in order"
    elif number == 0 and len(place["shape"]) == 1 and place["fold"][0] > 1:
        note += f"; folded into lines of {place['fold'][1]}"
    return Picture(title, note, wide * side, len(lines) * side, bars)
