"""Pictures of wrong elements show every one of them, and stay small."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.conformance.engine.places import ALL_WRONG, GRID_COLUMNS, GRID_ROWS, places

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def lit(picture: dict[str, Any], level: str | None = None) -> list[tuple[range, range]]:
    """Rows and columns of the cells that are not empty, or that have one level."""
    found = []
    top, bottom = picture["rows"]
    left, right = picture["columns"]
    high, wide = picture["cell"]
    lines = [line for line, repeats in picture["lines"] for _ in range(repeats)]
    for y, line in enumerate(lines):
        for x, digit in enumerate(line):
            if digit != "0" and level in (None, digit):
                rows = range(top + y * high, min(bottom, top + (y + 1) * high))
                columns = range(left + x * wide, min(right, left + (x + 1) * wide))
                found.append((rows, columns))
    return found


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Masks of every rank, with a few wrong elements or many."""
    shape = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(1, 9_000)),
            st.tuples(st.integers(1, 150), st.integers(1, 200)),
            st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 200)),
        )
    )
    mask = torch.zeros(shape, dtype=torch.bool).reshape(-1)
    for start in draw(st.lists(st.integers(0, mask.numel() - 1), min_size=1, max_size=4)):
        mask[start : start + draw(st.sampled_from([1, 1, 7, 1000]))] = True
    return mask.reshape(shape)


@settings(deadline=None, max_examples=40)
@given(masks())
def test_a_cell_is_lit_exactly_where_an_element_under_it_is_wrong(mask: torch.Tensor) -> None:
    found = places("out", mask.to(DEVICE), "a rule")
    rows, columns = found["fold"]
    flat = torch.zeros(rows * columns, dtype=torch.bool)
    flat[: mask.numel()] = mask.reshape(-1)
    folded = flat.reshape(rows, columns)
    assert (found["wrong"], found["of"]) == (int(mask.sum()), mask.numel())
    for picture in found["pictures"]:
        shown = torch.zeros_like(folded)
        for part_rows, part_columns in lit(picture):
            part = folded[part_rows.start : part_rows.stop, part_columns.start : part_columns.stop]
            assert bool(part.any()), "a cell is lit over right elements"
            shown[part_rows.start : part_rows.stop, part_columns.start : part_columns.stop] = True
        assert not bool((folded & ~shown).any()), "a wrong element is not shown"
        for part_rows, part_columns in lit(picture, str(ALL_WRONG)):
            part = folded[part_rows.start : part_rows.stop, part_columns.start : part_columns.stop]
            assert bool(part.all()), "a cell claims that all under it is wrong"
        lines = [line for line, repeats in picture["lines"] for _ in range(repeats)]
        assert len(lines) <= GRID_ROWS
        assert {len(line) for line in lines} == {len(lines[0])}
        assert len(lines[0]) <= GRID_COLUMNS


def test_one_wrong_element_of_many_is_shown_whole_and_near() -> None:
    mask = torch.zeros(4096, 7168, dtype=torch.bool, device=DEVICE)
    mask[1234, 567] = True
    whole, near = places("cache", mask, "a rule")["pictures"]
    assert [(r.start, c.start) for r, c in lit(whole)] == [(1152, 560)]
    assert (near["rows"], near["columns"], near["lines"]) == ([1234, 1235], [567, 568], [["9", 1]])
    assert len(json.dumps(places("cache", mask, "a rule"))) < 600


def test_lines_that_repeat_are_written_once() -> None:
    mask = torch.zeros(512, 64, dtype=torch.bool)
    mask[:, 32:] = True
    (picture, _) = places("out", mask, "a rule")["pictures"]
    assert picture["lines"] == [["0" * 32 + "9" * 32, 32]]


@pytest.mark.parametrize("shape", [(1,), (64,), (16, 8), (4, 4, 4)])
def test_a_small_tensor_has_one_picture_of_its_elements(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.reshape(-1)[0] = True
    found = places("out", mask, "a rule")
    assert [picture["cell"] for picture in found["pictures"]] == [[1, 1]]
