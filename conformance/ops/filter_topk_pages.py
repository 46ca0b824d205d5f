"""What `filter_topk_pages` must do, as data: bad scores, bad indices, and pages at their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    BenchPoint,
    Case,
    Effect,
    OpSpec,
    Params,
)

DTYPES = {"int32": torch.int32, "int64": torch.int64}

SPECIALS: Mapping[str, int] = {
    "nan": 0x7FC00000,
    "-nan": 0xFFC00000,
    "signalling_nan": 0x7F800001,
    "-full_nan": 0xFFFFFFFF,
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "max": 0x7F7FFFFF,
    "-max": 0xFF7FFFFF,
    "0": 0x00000000,
    "-0": 0x80000000,
    "-tiny": 0x80000001,
    "1": 0x3F800000,
}
"""Bit patterns of scores on both sides of the line between valid and not."""

FLOAT_NAN_BITS = 2143289344
"""A quiet NaN's bits as an index: what a top-k over bit patterns leaves where it found none."""

STRAY = (-1, -2, FLOAT_NAN_BITS, -(2**31), 2**31 - 1)
"""Indices out of range that an int32 holds; `width` and `width + 1` join them."""

STRAY_64 = (2**31, 2**32, 2**32 + 3, -(2**32) + 3, 2**62, -(2**63), 2**63 - 1)
"""Those that only int64 holds: the lower 32 bits of some are a position in range."""

STRAY_SHARE = 4
"""One index in so many is a stray one."""

ENTRIES = 512
"""The top-k of production."""


# ---------------------------------------------------------------- building a call


def build(params: Params, seed: int) -> Args:
    """Make one call.

    Parameters
    ----------
    params : mapping
        `rows`, `width`, `k` and `page_size`; optional: `dtype` of the indices; `raw` ("none",
        "own" or "indices"); `fill` of the scores ("normal", "ties", "mixed" or the name of a
        special that fills everything); `choice` ("topk": best positions first, -1 behind them;
        "stray": random positions and numbers out of range; "all": every position in turn);
        `pokes` ([row, column, special]) and `index_pokes` ([row, column, number]); `more_pages`
        behind those that the width needs; `highest` (a page whose last slot is the last of an
        int32); `wild_pages` (pages that no valid entry uses hold anything); `row_strides` by name
        of the argument.
    seed : int
    """
    generator = torch.Generator().manual_seed(seed)
    rows, width, k = params["rows"], params["width"], params["k"]
    page_size = params["page_size"]
    scores = _scores(params.get("fill", "mixed"), rows, width, generator)
    patterns = scores.view(torch.int32)
    for row, column, special in params.get("pokes", ()):
        patterns[slice(None) if row is None else row, column] = _signed(SPECIALS[special])

    kind = params.get("dtype", "int32")
    indices = _indices(params, scores, generator).to(DTYPES[kind])
    for row, column, number in params.get("index_pokes", ()):
        indices[slice(None) if row is None else row, column] = number

    pages = -(-width // page_size)
    table = _pages(params, rows, pages + params.get("more_pages", 0), generator)
    if params.get("wild_pages"):
        wild = ~_used_pages(scores, indices, table, page_size)
        garbage = torch.randint(-(2**31), 0, table.shape, generator=generator, dtype=torch.int32)
        table[wild] = garbage[wild]

    strides = params.get("row_strides", {})
    laid = {
        name: _laid(tensor, strides.get(name))
        for name, tensor in (
            ("scores", scores),
            ("indices", indices),
            ("page_table", table),
            ("page_indices", torch.full((rows, k), 12345, dtype=torch.int32)),
        )
    }
    raw = {
        "none": lambda: None,
        "own": lambda: _laid(torch.full_like(indices, 54321), strides.get("raw_indices")),
        "indices": lambda: laid["indices"],
    }[params.get("raw", "own")]()
    return {**laid, "page_size": page_size, "raw_indices": raw}


def _signed(pattern: int) -> int:
    return pattern - (1 << 32) if pattern >> 31 else pattern


def _scores(fill: str, rows: int, width: int, generator: torch.Generator) -> Tensor:
    if fill in SPECIALS:
        return torch.full((rows, width), _signed(SPECIALS[fill]), dtype=torch.int32).view(
            torch.float32
        )
    if fill == "ties":
        return torch.randint(-1, 2, (rows, width), generator=generator).float()
    scores = torch.randn(rows, width, generator=generator) * 3
    if fill == "mixed":
        # Two scores in five are as ugly as they come.
        table = torch.tensor(list(map(_signed, SPECIALS.values())), dtype=torch.int32)
        chosen = table[torch.randint(len(table), (rows, width), generator=generator)]
        ugly = torch.randint(5, (rows, width), generator=generator) < 2
        scores = torch.where(ugly, chosen.view(torch.float32), scores)
    return scores


def _indices(params: Params, scores: Tensor, generator: torch.Generator) -> Tensor:
    rows, width, k = params["rows"], params["width"], params["k"]
    choice = params.get("choice", "stray")
    if choice == "all":
        return torch.arange(k).expand(rows, k) % width
    if choice == "topk":
        best = scores.topk(min(k, width), dim=1).indices
        return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)
    # Drawn with repetition: every case has duplicates that are not neighbours.
    indices = torch.randint(width, (rows, k), generator=generator)
    stray = [*STRAY, width, width + 1]
    if params.get("dtype") == "int64":
        stray += STRAY_64
    drawn = torch.tensor(stray)[torch.randint(len(stray), (rows, k), generator=generator)]
    return torch.where(
        torch.randint(STRAY_SHARE, (rows, k), generator=generator) == 0, drawn, indices
    )


def _pages(params: Params, rows: int, pages: int, generator: torch.Generator) -> Tensor:
    """Draw physical pages, small ones and large ones; slots fit int32 at the next page size too."""
    page_size = params["page_size"]
    most = 2**31 // (page_size + 1)
    table = torch.randint(max(1, min(most, 4 * pages)), (rows, pages), generator=generator)
    high = torch.randint(most, (rows, pages), generator=generator) if most else table
    table = torch.where(torch.randint(3, table.shape, generator=generator) == 0, high, table)
    if params.get("highest"):
        table[:, ::2] = (2**31 - page_size) // page_size
    return table.to(torch.int32)


def _used_pages(scores: Tensor, indices: Tensor, table: Tensor, page_size: int) -> Tensor:
    used = torch.zeros(table.shape, dtype=torch.bool)
    for row, chosen in enumerate(indices.tolist()):
        for index in chosen:
            if 0 <= index < scores.shape[1] and float(scores[row, index]) > float("-inf"):
                used[row, index // page_size] = True
    return used


def _laid(tensor: Tensor, stride: int | None) -> Tensor:
    """Copy a matrix into memory of its own, with rows `stride` elements apart."""
    if stride is None:
        return tensor
    rows, width = tensor.shape
    # Left unwritten between the rows, so that huge strides touch little memory.
    memory = torch.empty(max(0, rows - 1) * stride + width, dtype=tensor.dtype)
    laid = memory.as_strided((rows, width), (stride, 1))
    # Rows that share their memory all hold the first one's content.
    laid[: 1 if stride == 0 else rows].copy_(tensor[: 1 if stride == 0 else rows])
    return laid


def replays(params: Params) -> list[Params]:
    """Calls of the same geometry: other scores, indices and pages; nothing valid; a plain top-k."""
    plain = {**params, "pokes": [], "index_pokes": []}
    return [
        {**plain, "fill": "mixed", "choice": "stray"},
        {**plain, "fill": "-inf", "choice": "stray"},
        {**plain, "fill": "normal", "choice": "topk"},
    ]


def rescale(args: Args) -> Args:
    """The same tensors with the next page size, where every page still has slots of int32."""
    table, page_size = args["page_table"], args["page_size"] + 1
    fits = not table.numel() or (
        int(table.min()) >= 0 and int(table.max()) * page_size + page_size <= 2**31
    )
    return {**args, "page_size": page_size} if fits else args


# ---------------------------------------------------------------- cases

VALUES = ("eager", "graph")
"""For cases that only differ in what scores, indices and pages are."""

LAYOUT = ("eager", "guards", "strided", "graph")
"""For cases whose point is where the entries lie."""


def _call(rows: int, width: int, k: int, page_size: int = 16, **more: Any) -> dict[str, Any]:
    return {"rows": rows, "width": width, "k": k, "page_size": page_size, **more}


def _score_cases() -> list[Case]:
    all_of = {"choice": "all", "fill": "normal"}
    return [
        Case("row_of_minus_infinity", _call(2, 33, 40, 8, fill="-inf"), checks=VALUES),
        Case("row_of_nan", _call(2, 33, 40, 8, fill="nan", dtype="int64"), checks=VALUES),
        Case("row_of_infinity", _call(2, 33, 40, 8, fill="inf"), checks=VALUES),
        Case("one_nan", _call(1, 9, 9, 4, **all_of, pokes=[[0, 5, "nan"]])),
        Case("one_infinity", _call(1, 9, 9, 4, fill="-inf", choice="all", pokes=[[0, 5, "inf"]])),
        Case(
            "one_minus_infinity_a_row",
            _call(3, 9, 9, 4, **all_of, pokes=[[row, 2 * row, "-inf"] for row in range(3)]),
            checks=VALUES,
        ),
        Case(
            "every_special_score",
            _call(
                1,
                len(SPECIALS),
                len(SPECIALS),
                4,
                choice="all",
                pokes=[[0, at, name] for at, name in enumerate(SPECIALS)],
            ),
            checks=VALUES,
        ),
        Case("ties", _call(3, 65, 30, 16, fill="ties", choice="topk"), checks=VALUES),
        # Position 0 stands in for an index that may not be looked up: its score must not decide.
        Case(
            "stray_indices_where_position_0_is_valid",
            _call(2, 7, 20, 4, fill="1"),
            checks=VALUES,
        ),
        Case(
            "stray_indices_where_position_0_is_not",
            _call(2, 7, 20, 4, fill="normal", pokes=[[None, 0, "-inf"]]),
            checks=VALUES,
        ),
    ]


def _index_cases() -> list[Case]:
    width = 20
    stray = [*STRAY, width, width + 1, width - 1, 0]
    return [
        Case(
            "every_stray_index_int32",
            _call(
                1,
                width,
                len(stray),
                8,
                fill="1",
                index_pokes=[[0, at, number] for at, number in enumerate(stray)],
            ),
        ),
        Case(
            "every_stray_index_int64",
            _call(
                2,
                width,
                len(stray) + len(STRAY_64),
                8,
                fill="1",
                dtype="int64",
                index_pokes=[[None, at, number] for at, number in enumerate([*stray, *STRAY_64])],
            ),
        ),
        Case(
            "nan_bits_as_indices",
            _call(2, width, 6, 8, fill="1", index_pokes=[[0, at, FLOAT_NAN_BITS] for at in (0, 3)]),
            checks=VALUES,
        ),
        Case(
            "duplicates",
            _call(2, 40, 33, 8, fill="normal", index_pokes=[[None, at, 17] for at in range(33)]),
            checks=VALUES,
        ),
        Case("nothing_chosen", _call(2, 40, 5, 8, index_pokes=[[None, i, -1] for i in range(5)])),
        # More places than positions: the rest is -1.
        Case(
            "more_places_than_positions",
            _call(2, 64, 2048, 64, fill="normal", choice="topk"),
            checks=VALUES,
        ),
        Case(
            "more_places_than_positions_int64",
            _call(1, 1, 257, 16, fill="1", choice="topk", dtype="int64"),
            checks=VALUES,
        ),
    ]


def _page_cases() -> list[Case]:
    return [
        *(
            Case(
                f"page_size_{page_size}",
                _call(2, 300, 80, page_size, choice="all" if page_size == 1 else "stray"),
                checks=(*VALUES, "repeat"),
            )
            for page_size in (1, 16, 64, 256)
        ),
        # No power of two: neither a shift nor a mask.
        Case("page_size_3", _call(3, 50, 60, 3, fill="normal")),
        Case("page_wider_than_the_row", _call(2, 30, 30, 4096, choice="all"), checks=VALUES),
        # Position 0 of page 0 is slot 0, whatever a page's size is.
        Case(
            "page_size_beyond_int32",
            _call(2, 30, 30, 2**40, choice="all", fill="normal"),
            checks=VALUES,
        ),
        Case(
            "last_slot_of_int32",
            _call(2, 64, 64, 16, choice="all", fill="normal", highest=True),
            checks=VALUES,
        ),
        Case("last_position_of_a_cut_page", _call(1, 17, 17, 16, choice="all", fill="normal")),
        Case(
            "table_wider_than_needed",
            _call(3, 17, 20, 8, more_pages=5, fill="normal"),
            checks=LAYOUT,
        ),
        # What no valid entry uses may be anything; products of it overflow.
        Case(
            "unused_pages_hold_anything",
            _call(3, 200, 24, 8, more_pages=2, wild_pages=True),
            checks=VALUES,
        ),
    ]


def _layout_cases() -> list[Case]:
    strided = {"scores": 8, "indices": 11, "page_table": 7, "page_indices": 9, "raw_indices": 13}
    return [
        Case("no_rows", _call(0, 9, 4, 4), noop=True),
        Case("no_places", _call(2, 9, 0, 4), noop=True, checks=("eager", "guards")),
        Case("one_of_everything", _call(1, 1, 1, 1, fill="1", choice="all")),
        # The page of the index `width` would lie behind the table: nothing is loaded for it, nor
        # for its neighbours, in any row.
        Case(
            "width_is_whole_pages",
            _call(
                3,
                32,
                9,
                8,
                fill="1",
                index_pokes=[
                    [None, at, stray] for at, stray in enumerate((32, -1, 33, 39, 40, -8))
                ],
            ),
            checks=("eager", "guards"),
        ),
        # Slices of wider buffers: a row's end is not the next one's start.
        Case(
            "width_5_in_stride_8",
            _call(2, 5, 6, 2, fill="normal", row_strides=strided),
        ),
        Case(
            "every_row_stride_another",
            _call(
                3,
                40,
                33,
                8,
                dtype="int64",
                row_strides={name: 41 + 9 * at for at, name in enumerate(strided)},
            ),
            checks=LAYOUT,
        ),
        Case("raw_is_indices", _call(2, 33, 40, 8, raw="indices"), checks=(*LAYOUT, "repeat")),
        Case(
            "raw_is_indices_int64",
            _call(2, 33, 40, 8, raw="indices", dtype="int64", row_strides={"indices": 51}),
        ),
        Case("no_raw", _call(2, 33, 40, 8, raw="none")),
        Case("no_raw_int64", _call(2, 33, 40, 8, raw="none", dtype="int64"), checks=VALUES),
        Case(
            "rows_share_scores_and_pages",
            _call(3, 33, 40, 8, row_strides={"scores": 0, "page_table": 0}),
            checks=VALUES,
        ),
        *(
            Case(f"rows_{rows}", _call(rows, 65, 9, 16), checks=("eager", "guards", "graph"))
            for rows in (6, 64, 300)
        ),
        *(
            Case(
                f"k_{k}",
                _call(1 if k > 200 else 2, 100, k, 16, dtype="int64" if k % 2 else "int32"),
                checks=("eager", "guards", "graph"),
            )
            for k in (1, 127, 128, 129, 255, 256, 257, 512)
        ),
        Case("k_2048", _call(3, 4096, 2048, 64, choice="topk", fill="normal"), checks=VALUES),
    ]  # fmt: skip


def _large_cases() -> list[Case]:
    return [
        *(
            Case(f"width_{width}", _call(1, width, 70, 64), checks=VALUES)
            for width in (1, 65, 4096)
        ),
        Case("production", _call(6, 32768, ENTRIES, 64, choice="topk"), checks=VALUES),
        Case("width_1m", _call(1, 1 << 20, ENTRIES, 64, choice="topk"), checks=VALUES),
        Case(
            "production_rows_64",
            _call(64, 32768, ENTRIES, 64, choice="topk"),
            profile="full",
            checks=VALUES,
        ),
        Case(
            "width_1m_k_2048_pages_of_1",
            _call(2, 1 << 20, 2048, 1, dtype="int64"),
            profile="full",
            checks=VALUES,
        ),
        # More rows than a grid has programs in its second dimension.
        Case(
            "seventy_thousand_rows",
            _call(70000, 5, 3, 2),
            profile="full",
            checks=("eager",),
            device="cuda",
        ),
        # Row times stride passes 2^31 elements at the third row. Little of that memory is touched.
        *(
            Case(
                f"{name}_rows_past_2_31",
                _call(3, 33, 20, 8, fill="normal", row_strides={name: 2**30 + 8}),
                profile="full",
                checks=("eager",),
            )
            for name in ("scores", "indices", "page_table", "page_indices", "raw_indices")
        ),
    ]


# ---------------------------------------------------------------- fuzz


@st.composite
def strategy(draw: st.DrawFn) -> Params:
    """Params of small calls: geometry, a few special scores, a few indices one by one."""
    rows, width = draw(st.integers(0, 3)), draw(st.integers(1, 70))
    k = draw(st.one_of(st.integers(1, 9), st.sampled_from((64, 129, 257))))
    dtype = draw(st.sampled_from(("int32", "int64")))
    page_size = draw(st.one_of(st.integers(1, 9), st.sampled_from((16, 64, 256))))
    params = _call(
        rows,
        width,
        k,
        page_size,
        dtype=dtype,
        raw=draw(st.sampled_from(("none", "own", "indices"))),
        fill=draw(st.sampled_from(("normal", "mixed", "ties", "-inf", "inf", "nan"))),
        choice=draw(st.sampled_from(("topk", "stray", "all"))),
        more_pages=draw(st.integers(0, 2)),
    )
    if rows:
        row = st.integers(0, rows - 1)
        poke = st.tuples(row, st.integers(0, width - 1), st.sampled_from(list(SPECIALS)))
        strays = (*STRAY, width, width + 1, *(STRAY_64 if dtype == "int64" else ()))
        number = st.one_of(st.integers(0, width - 1), st.sampled_from(strays))
        index = st.tuples(row, st.integers(0, k - 1), number)
        params["pokes"] = [list(found) for found in draw(st.lists(poke, max_size=4))]
        params["index_pokes"] = [list(found) for found in draw(st.lists(index, max_size=4))]
    return params


# ---------------------------------------------------------------- bad inputs


def _bad(
    name: str, names: str, edit: Callable[[Args], Mapping[str, Any]], params: Params | None = None
) -> BadInput:
    return BadInput(name, lambda args: {**args, **edit(args)}, names, params=params)


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Args], Mapping[str, Any]]:
    return lambda args: {name: change(args[name])}


def _two_apart(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(matrix.shape[0], 2 * matrix.shape[1])[:, ::2]


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def _tensor_faults(name: str, *wrong_types: torch.dtype) -> list[BadInput]:
    faults: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("1d", lambda t: t[0]),
        ("3d", lambda t: t[None]),
        ("one_row_less", lambda t: t[:-1]),
        ("one_row_more", lambda t: torch.cat([t, t[:1]])),
        ("columns_two_apart", _two_apart),
        ("transposed", lambda t: t.t().contiguous().t()),
        ("on_another_device", lambda t: t.to("meta")),
    ]
    faults += [(f"of_{str(dtype).removeprefix('torch.')}", _to(dtype)) for dtype in wrong_types]
    return [_bad(f"{name}_{fault}", name, _change(name, change)) for fault, change in faults]


def _bad_inputs() -> list[BadInput]:
    none = _call(0, 9, 4, 4)
    return [
        *_tensor_faults("scores", torch.float64, torch.bfloat16, torch.float16, torch.int32),
        *_tensor_faults("indices", torch.int16, torch.uint8, torch.float32, torch.bool),
        *_tensor_faults("page_table", torch.int64, torch.int16, torch.float32),
        *_tensor_faults("page_indices", torch.int64, torch.int16, torch.float32),
        *_tensor_faults("raw_indices", torch.int64, torch.int16, torch.float32),
        _bad(
            "raw_of_int32_for_indices_of_int64",
            "raw_indices",
            _change("raw_indices", lambda t: t.int()),
            _call(2, 9, 4, 4, dtype="int64"),
        ),
        *(
            _bad(f"{name}_{fault}", name, _change(name, change))
            for name in ("page_indices", "raw_indices")
            for fault, change in (
                ("one_place_less", lambda t: t[:, :-1]),
                ("one_place_more", lambda t: t.new_zeros(t.shape[0], t.shape[1] + 1)),
                ("without_places", lambda t: t[:, :0]),
            )
        ),
        _bad("width_0", "scores", _change("scores", lambda t: t[:, :0])),
        _bad("table_one_page_short", "page_table", _change("page_table", lambda t: t[:, :-1])),
        _bad("table_without_pages", "page_table", _change("page_table", lambda t: t[:, :0])),
        _bad("table_short_for_smaller_pages", "page_table", lambda args: {"page_size": 2}),
        _bad("page_size_0", "page_size", lambda args: {"page_size": 0}),
        _bad("page_size_negative", "page_size", lambda args: {"page_size": -4}),
        # With nothing to do the arguments are no better.
        _bad("page_size_0_without_rows", "page_size", lambda args: {"page_size": 0}, none),
        _bad("width_0_without_rows", "scores", _change("scores", lambda t: t[:, :0]), none),
        _bad(
            "table_short_without_rows",
            "page_table",
            _change("page_table", lambda t: t[:, :-1]),
            none,
        ),
        _bad(
            "raw_of_int64_without_rows",
            "raw_indices",
            _change("raw_indices", lambda t: t.long()),
            none,
        ),
        _bad(
            "page_size_0_without_places",
            "page_size",
            lambda args: {"page_size": 0},
            _call(2, 9, 0, 4),
        ),
    ]


# ---------------------------------------------------------------- benchmark

PUBLISHED_US = {1: 1.80, 6: 1.78, 64: 2.00}
"""Graph replay of the published kernel on an H200, by rows, at k 512 and width 32768."""

BENCH_GRID: Sequence[tuple[int, int, int]] = (
    *((rows, 32768, ENTRIES) for rows in PUBLISHED_US),
    *((rows, 32768, 2048) for rows in PUBLISHED_US),
    *((rows, 1 << 20, 2048) for rows in PUBLISHED_US),
)
"""Rows, width and k: the published points, then a longer top-k and a long context."""


def _reach(published: float | None) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        if published is None:
            return us["triton"] < us["baseline"], "faster than the chain of operations"
        return round(us["triton"], 2) <= published, f"at most the published {published:.2f} us"

    return reach


def bench() -> list[BenchPoint]:
    """The published grid and two wider ones; pages of 64, positions given back too."""
    points = []
    for rows, width, k in BENCH_GRID:
        published = PUBLISHED_US.get(rows) if (width, k) == (32768, ENTRIES) else None
        points.append(
            BenchPoint(
                f"rows_{rows}_width_{width}_k_{k}",
                _call(rows, width, k, 64, fill="normal", choice="topk"),
                # Index, score, page, slot and raw index of each entry.
                bytes_moved=rows * k * 5 * 4,
                published_us={} if published is None else {"triton": published},
                reach=_reach(published),
            )
        )
    return points


OPS = ("filter_topk_pages",)

SPECS = [
    OpSpec(
        name="filter_topk_pages",
        family="filter_topk_pages",
        summary="turn the indexer's top-k into KV slots, and what may not be read into -1",
        build=build,
        effects=[
            # Named because its memory may be that of raw_indices.
            Effect("indices", rule="indices stay, unless raw_indices is indices", reads=True),
            Effect(
                "page_indices",
                rule="page_table[row, i // page_size] * page_size + i % page_size where 0 <= i < "
                "width and scores[row, i] > -inf, else -1",
            ),
            Effect(
                "raw_indices",
                rule="the index itself where 0 <= i < width and scores[row, i] > -inf, else -1",
            ),
        ],
        cases=[
            *_score_cases(),
            *_index_cases(),
            *_page_cases(),
            *_layout_cases(),
            *_large_cases(),
        ],
        strategy=strategy,
        bad_inputs=_bad_inputs(),
        bad_input_params=_call(3, 9, 4, 4),
        replays=replays,
        rescale=rescale,
        strides=dict.fromkeys(
            ("scores", "indices", "page_table", "page_indices", "raw_indices"), "rows"
        ),
        bench=bench,
    )
]
