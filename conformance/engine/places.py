"""Where the wrong elements of a tensor lie: pictures small enough to travel with a result."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GRID_ROWS = 32
"""Lines of a picture, at most."""

GRID_COLUMNS = 64
"""Cells of a line, at most."""

ALL_WRONG = 9
"""The level of a cell in which every element is wrong; 0: none is; 1 to 8: some are."""


def places(path: str, wrong: Tensor, rule: str) -> dict[str, Any]:
    """Picture the wrong elements of a leaf.

    Parameters
    ----------
    path : str
        The leaf.
    wrong : Tensor
        Bool mask of its wrong elements, at least one of them true, on any device.
    rule : str
        The rule that they break.

    Returns
    -------
    dict
        JSON: `path`, `rule`, `shape`, `wrong` and `of` (elements), `fold` (rows and columns that
        the pictures show: all dimensions but the last are rows; a long line is folded), and
        `pictures`: the whole leaf, and beside it the smallest rectangle that holds every wrong
        element where that is less. A picture has `rows` and `columns` (first, end), `cell` (rows
        and columns of a cell) and `lines`: pairs of a string with one digit a cell, 0 to
        `ALL_WRONG`, and how often that line repeats.
    """
    folded = _fold(wrong)
    rows, columns = folded.shape
    whole = (0, rows, 0, columns)
    box = _box(folded)
    pictures = [_picture(folded, whole)]
    # Where every cell is one element, the rectangle would show nothing new.
    if box != whole and pictures[0]["cell"] != [1, 1]:
        pictures.append(_picture(folded, box))
    return {
        "path": path,
        "rule": rule,
        "shape": list(wrong.shape),
        "wrong": int(wrong.sum()),
        "of": wrong.numel(),
        "fold": [rows, columns],
        "pictures": pictures,
    }


def _fold(wrong: Tensor) -> Tensor:
    """The mask in two dimensions."""
    if wrong.dim() > 1:
        return wrong.reshape(-1, wrong.shape[-1])
    flat = wrong.reshape(-1)
    if flat.numel() <= GRID_COLUMNS:
        return flat[None]
    width = 1 << math.ceil(math.log2(math.sqrt(flat.numel())))
    width = max(width, GRID_COLUMNS)
    missing = -flat.numel() % width
    return torch.nn.functional.pad(flat, (0, missing)).reshape(-1, width)


def _box(folded: Tensor) -> tuple[int, int, int, int]:
    """First and end row, first and end column of the smallest rectangle around what is true."""
    rows = folded.any(1).nonzero().flatten()
    columns = folded.any(0).nonzero().flatten()
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _picture(folded: Tensor, part: tuple[int, int, int, int]) -> dict[str, Any]:
    top, bottom, left, right = part
    shown = folded[top:bottom, left:right]
    rows, columns = shown.shape
    high, wide = -(-rows // GRID_ROWS), -(-columns // GRID_COLUMNS)
    lines: list[list[Any]] = []
    for start in range(0, rows, high):
        band = shown[start : start + high]
        counts = band.sum(0)
        cells = torch.nn.functional.pad(counts, (0, -columns % wide)).reshape(-1, wide).sum(1)
        line = ""
        for place, count in enumerate(cells.tolist()):
            area = band.shape[0] * min(wide, columns - place * wide)
            line += str(0 if not count else ALL_WRONG if count == area else 1 + 8 * count // area)
        if lines and lines[-1][0] == line:
            lines[-1][1] += 1
        else:
            lines.append([line, 1])
    return {"rows": [top, bottom], "columns": [left, right], "cell": [high, wide], "lines": lines}
