"""What `candidate_blocks` must do, as data: tied blocks, NaN blocks, lengths at every edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.judges import TopKSet
from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    BenchPoint,
    Case,
    Effect,
    OpSpec,
    Params,
)
from draftproof.oracles.candidate_blocks import block_scores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SPECIALS: Mapping[str, Mapping[str, int]] = {
    name: {"fp32": fp32, "bf16": fp32 >> 16}
    for name, fp32 in {
        "nan": 0x7FC00000,
        "-nan": 0xFFC10000,
        "signalling_nan": 0x7F810000,
        "inf": 0x7F800000,
        "-inf": 0xFF800000,
        "max": 0x7F7FFFFF,
        "-max": 0xFF7FFFFF,
        "0": 0x00000000,
        "-0": 0x80000000,
        "-tiny": 0x80010000,
        "100": 0x42C80000,
        "-100": 0xC2C80000,
    }.items()
}
"""Bit pattern by name and type."""

TOPK_BLOCKS = 2048
"""Blocks that production keeps."""

BLOCK_SIZE = 8
"""Positions of a block in production."""


# ---------------------------------------------------------------- building a call


def build(params: Params, seed: int) -> Args:
    """Make one call.

    Parameters
    ----------
    params : mapping
        `width`, `block_size`, `topk_blocks` and `lens` (one a row); optional: `dtype`; `fill` of
        the logits ("normal", "coarse", "mixed", or the name of a special that fills everything);
        `pokes` ([row or None for all, column, special]); `row_stride`; `published` (None, "some",
        "blocks", "all" or "none") and `published_layout` ("rows", "apart": columns two apart,
        "columns": the transpose of a contiguous matrix, "shared": one row for all).
    seed : int
    """
    generator = torch.Generator().manual_seed(seed)
    kind, width, lens = params.get("dtype", "fp32"), params["width"], params["lens"]
    logits = _logits(params.get("fill", "normal"), len(lens), width, kind, generator)
    patterns = logits.view(torch.int32 if kind == "fp32" else torch.int16)
    for row, column, special in params.get("pokes", ()):
        patterns[slice(None) if row is None else row, column] = _signed(special, kind)
    args = {
        "logits": _laid(logits, params.get("row_stride")),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "topk_blocks": params["topk_blocks"],
        "block_size": params["block_size"],
    }
    published = params.get("published")
    if published is not None:
        flags = _published(published, len(lens), width, params["block_size"], generator)
        args["published"] = _flags_laid(flags, params.get("published_layout", "rows"))
    return args


def _signed(special: str, kind: str) -> int:
    bits = 32 if kind == "fp32" else 16
    pattern = SPECIALS[special][kind]
    return pattern - (1 << bits) if pattern >> (bits - 1) else pattern


def _logits(fill: str, rows: int, width: int, kind: str, generator: torch.Generator) -> Tensor:
    integer = torch.int32 if kind == "fp32" else torch.int16
    if fill in SPECIALS:
        return torch.full((rows, width), _signed(fill, kind), dtype=integer).view(DTYPES[kind])
    if fill == "coarse":
        # Few values: most blocks tie with others.
        return torch.randint(-2, 3, (rows, width), generator=generator).to(DTYPES[kind])
    logits = (torch.randn(rows, width, generator=generator) * 3).to(DTYPES[kind])
    if fill == "mixed":
        table = torch.tensor([_signed(name, kind) for name in SPECIALS], dtype=integer)
        chosen = table[torch.randint(len(table), (rows, width), generator=generator)]
        ugly = torch.randint(8, (rows, width), generator=generator) == 0
        logits = torch.where(ugly, chosen.view(DTYPES[kind]), logits)
    return logits


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


def _published(
    content: str, rows: int, width: int, block_size: int, generator: torch.Generator
) -> Tensor:
    if content in ("all", "none"):
        return torch.full((rows, width), content == "all")
    each = 1 if content == "some" else min(block_size, width)
    flags = torch.randint(2, (rows, -(-width // each)), generator=generator) == 0
    return flags.repeat_interleave(each, dim=1)[:, :width].contiguous()


def _flags_laid(flags: Tensor, layout: str) -> Tensor:
    if layout == "apart":
        return flags.repeat_interleave(2, dim=1)[:, ::2]
    if layout == "columns":
        return flags.t().contiguous().t()
    return flags[:1].expand_as(flags) if layout == "shared" else flags


def replays(params: Params) -> list[Params]:
    """Calls of the same geometry: lengths turned round, full, fallen to zero; other logits."""
    plain = {**params, "pokes": []}
    width, lens = params["width"], params["lens"]
    return [
        {**plain, "lens": [width - length for length in lens], "fill": "normal"},
        {**plain, "lens": [width] * len(lens), "fill": "mixed"},
        {**plain, "lens": [*lens[:1], *[0] * (len(lens) - 1)], "fill": "coarse"},
        {**plain, "lens": [(2 * length + 1) % (width + 1) for length in lens]},
    ]


def rescale(args: Args) -> Args:
    """The same tensors with another size of blocks, and one block more to choose."""
    block_size = args["block_size"]
    return {
        **args,
        "topk_blocks": args["topk_blocks"] + 1,
        "block_size": block_size // 2 if block_size > 1 else 2,
    }


def _scores(before: Args) -> Tensor:
    return block_scores(before["logits"], before["seq_lens"], before["block_size"])


# ---------------------------------------------------------------- cases

VALUES = ("eager", "graph")
"""For cases that only differ in what the logits are."""

LAYOUT = ("eager", "guards", "strided", "graph")
"""For cases whose point is where rows and blocks lie."""


def _call(
    lens: Sequence[int], width: int, block_size: int, topk_blocks: int, **more: Any
) -> dict[str, Any]:
    return {
        "lens": list(lens),
        "width": width,
        "block_size": block_size,
        "topk_blocks": topk_blocks,
        **more,
    }


def _edges(width: int) -> list[int]:
    return [0, 1, width // 2, width - 1, width]


def _length_cases() -> list[Case]:
    return [
        Case("every_length", _call(range(18), 17, 4, 2), checks=(*VALUES, "repeat")),
        Case("length_edges_blocks_of_8", _call(_edges(64), 64, 8, 3)),
        Case("length_edges_bf16", _call(_edges(64), 64, 8, 3, dtype="bf16")),
        Case("length_edges_width_65", _call(_edges(65), 65, 32, 1)),
        Case("length_beyond_the_width", _call([65, 66, 2**31 - 1], 65, 32, 2), checks=VALUES),
        Case("length_negative", _call([-1, 3, -(2**31)], 65, 32, 2), checks=VALUES),
        # A negative length's newest block must not be one counted from the end.
        Case("length_negative_everything", _call([-1, 9, -40], 40, 8, 9), checks=VALUES),
        Case("length_0_alone", _call([0], 24, 8, 2, fill="inf"), checks=VALUES),
        # What lies behind the length is not looked at: neither NaN nor +inf may decide.
        Case(
            "nan_and_infinity_behind_the_length",
            _call(
                [20, 20],
                48,
                8,
                2,
                pokes=[
                    *([0, at, name] for at, name in ((20, "nan"), (23, "inf"), (40, "nan"))),
                    *([1, at, name] for at, name in ((20, "inf"), (31, "inf"), (47, "-nan"))),
                ],
            ),
            checks=VALUES,
        ),
    ]


def _score_cases() -> list[Case]:
    return [
        # Every block ties: only how many are kept, and the newest, is settled.
        Case("row_of_zeros", _call([64, 40, 33], 64, 8, 4, fill="0"), checks=(*VALUES, "repeat")),
        Case(
            "zeros_of_both_signs",
            _call([64, 64], 64, 8, 4, fill="0", pokes=[[None, at, "-0"] for at in range(32)]),
            checks=VALUES,
        ),
        Case("coarse_logits", _call([80, 71, 17], 80, 8, 5, fill="coarse")),
        Case("row_of_minus_infinity", _call([64, 30], 64, 8, 4, fill="-inf"), checks=VALUES),
        Case("row_of_nan", _call([64, 30], 64, 8, 4, fill="nan"), checks=VALUES),
        Case("row_of_infinity", _call([64, 30], 64, 8, 4, fill="inf"), checks=VALUES),
        # Few finite blocks: places are left over for those of -inf, which nobody keeps.
        Case(
            "more_places_than_finite_blocks",
            _call([64], 64, 8, 5, fill="-inf", pokes=[[0, 3, "100"], [0, 20, "-max"]]),
            checks=VALUES,
        ),
        # One NaN makes its block take a place and stay away, however good the others are.
        Case("one_nan", _call([64, 64], 64, 8, 2, pokes=[[None, 19, "nan"], [1, 16, "100"]])),
        Case(
            "a_nan_at_each_place_of_a_block",
            _call(
                [32] * 8,
                32,
                8,
                2,
                pokes=[[at, at, ("nan", "-nan", "signalling_nan")[at % 3]] for at in range(8)],
            ),
            checks=VALUES,
        ),
        # As many NaN blocks as places: the newest is pushed out with all others.
        Case(
            "nan_blocks_take_every_place",
            _call([64], 64, 8, 2, pokes=[[0, 0, "nan"], [0, 9, "-nan"], [0, 17, "nan"]]),
            checks=VALUES,
        ),
        Case(
            "nan_in_the_newest_block",
            _call([64, 60, 57], 64, 8, 2, pokes=[[None, 56, "nan"], [0, 63, "nan"]]),
            checks=(*VALUES, "repeat"),
        ),
        Case(
            "nan_in_the_newest_block_one_place",
            _call([40, 33], 40, 8, 1, pokes=[[None, 32, "nan"]]),
            checks=VALUES,
        ),
        # Tied with the newest at +inf: with one place either may be kept, and just one.
        Case(
            "infinity_elsewhere_with_one_place",
            _call([64, 60], 64, 8, 1, pokes=[[None, 10, "inf"]]),
            checks=(*VALUES, "repeat"),
        ),
        Case(
            "infinity_elsewhere_with_two_places",
            _call([64, 60], 64, 8, 2, pokes=[[None, 10, "inf"]]),
            checks=VALUES,
        ),
        # The newest stands above every number, the largest too.
        Case(
            "largest_number_elsewhere_with_one_place",
            _call([64, 41, 20], 64, 8, 1, fill="max"),
            checks=VALUES,
        ),
        Case(
            "newest_block_is_the_worst",
            _call([64, 58], 64, 8, 2, pokes=[[None, at, "-100"] for at in range(56, 64)]),
            checks=VALUES,
        ),
        Case("mixed_fp32", _call([160, 99, 8], 160, 8, 7, fill="mixed")),
        Case("mixed_bf16", _call([160, 99, 8], 160, 8, 7, fill="mixed", dtype="bf16")),
        Case("negative_logits_alone", _call([64], 64, 8, 3, fill="-100", pokes=[[0, 9, "-0"]])),
    ]


def _block_cases() -> list[Case]:
    return [
        Case("no_rows", _call([], 16, 8, 1), noop=True),
        Case("one_of_everything", _call([1], 1, 1, 1)),
        Case("blocks_of_1", _call([33, 20], 33, 1, 5), checks=LAYOUT),
        Case("blocks_of_3", _call([50, 31], 50, 3, 4), checks=(*LAYOUT, "repeat")),
        Case("blocks_of_7_bf16", _call([50, 31], 50, 7, 4, dtype="bf16"), checks=LAYOUT),
        # Blocks of 8, but rows that no 16-byte access fits.
        Case("blocks_of_8_width_61", _call([61, 33], 61, 8, 3), checks=LAYOUT),
        Case("blocks_of_9", _call([100, 60], 100, 9, 4), checks=LAYOUT),
        Case("blocks_of_64", _call([300, 130], 300, 64, 2), checks=VALUES),
        Case("blocks_of_65", _call([300, 131], 300, 65, 2), checks=LAYOUT),
        # Wider than what a program looks at together.
        Case("blocks_of_1500", _call([4000, 1501, 1500, 0], 4000, 1500, 1), checks=LAYOUT),
        Case("block_wider_than_the_row", _call([20, 7], 20, 33, 2), checks=VALUES),
        Case("block_size_beyond_int32", _call([20, 0], 20, 2**40, 2**40), checks=VALUES),
        # There are places for all blocks: those of -inf and NaN are still not kept.
        Case("as_many_places_as_blocks", _call([64, 20], 64, 8, 8, fill="mixed")),
        Case("one_place_less_than_blocks", _call([64, 20], 64, 8, 7, fill="mixed"), checks=VALUES),
        Case(
            "more_places_than_blocks",
            _call([65, 20], 65, 32, 100, fill="mixed", pokes=[[0, 33, "nan"]]),
            checks=(*LAYOUT, "poison"),
        ),
        Case(
            "everything_blocks_of_1500",
            _call([4000, 1501, 1500, 0], 4000, 1500, 3, pokes=[[0, 1499, "nan"]]),
            checks=VALUES,
        ),
        Case("everything_bf16", _call([72, 9], 72, 8, 9, dtype="bf16"), checks=LAYOUT),
        Case("rows_5_strided", _call([5, 3, 1, 0, 4], 5, 2, 2, row_stride=8), checks=LAYOUT),
        Case("rows_aligned_apart", _call([32, 9], 32, 8, 2, row_stride=48), checks=LAYOUT),
        Case("rows_share_logits", _call([32, 9, 0], 32, 8, 2, row_stride=0), checks=VALUES),
        *(
            Case(
                f"rows_{rows}", _call([5 * at % 42 for at in range(rows)], 40, 8, 2), checks=VALUES
            )
            for rows in (6, 64, 300)
        ),
    ]


def _consumer_cases() -> list[Case]:
    return [
        Case("consumer_lengths", _call(_edges(64), 64, 8, 3, published="some")),
        Case("consumer_bf16", _call(_edges(64), 64, 8, 3, published="some", dtype="bf16")),
        Case("consumer_of_blocks", _call([64, 33], 64, 8, 3, published="blocks"), checks=VALUES),
        Case("consumer_of_all", _call([65, 30], 65, 32, 3, published="all"), checks=VALUES),
        Case("consumer_of_none", _call([65, 30], 65, 32, 3, published="none"), checks=VALUES),
        Case(
            "consumer_length_clamped",
            _call([66, -1, 2**31 - 1], 65, 32, 3, published="all"),
            checks=VALUES,
        ),
        Case(
            "consumer_mixed",
            _call([99, 200], 200, 8, 3, published="some", fill="mixed"),
            checks=(*VALUES, "repeat"),
        ),
        Case("consumer_no_rows", _call([], 16, 8, 1, published="all"), noop=True, checks=VALUES),
        *(
            Case(
                f"consumer_published_{layout}",
                _call([70, 33], 72, 8, 3, published="some", published_layout=layout),
                checks=LAYOUT,
            )
            for layout in ("apart", "columns", "shared")
        ),
        Case(
            "consumer_rows_5_strided",
            _call([5, 3, 1], 5, 2, 2, row_stride=8, published="some"),
            checks=LAYOUT,
        ),
    ]


def _large_cases() -> list[Case]:
    def case(
        name: str, width: int, block_size: int, topk_blocks: int, lens: Sequence[int] = ()
    ) -> Case:
        call = _call(lens or [width - 3], width, block_size, topk_blocks)
        return Case(name, call, checks=VALUES)

    cases = [
        Case("width_65_blocks_of_32", _call(_edges(65), 65, 32, 8), checks=VALUES),
        case("width_4096_blocks_of_128", 4096, 128, 8, lens=_edges(4096)),
        case("width_32768_blocks_of_2048", 32768, 2048, 8, lens=_edges(32768)),
        case("width_1m_blocks_of_2048", 1 << 20, 2048, 8),
        case("width_4096_blocks_of_8", 4096, 8, 2048, lens=_edges(4096)),
        case("width_1m_blocks_of_8", 1 << 20, 8, 2048),
        case("production", 32768, 8, TOPK_BLOCKS, lens=[32768, 20000]),
    ]
    for name, lens, width, more in (
        ("production_rows_6", [32768, 20000, 16385, 16384, 1, 0], 32768, {"fill": "coarse"}),
        ("production_rows_64", [512 * at for at in range(64)], 32768, {}),
        ("production_bf16", [32768, 20000], 32768, {"dtype": "bf16"}),
        ("width_1m_rows_6", [(1 << 20) >> at for at in range(6)], 1 << 20, {}),
        ("consumer_width_1m", [1 << 20, 70000], 1 << 20, {"published": "blocks"}),
        ("width_1m_of_zeros", [1 << 20], 1 << 20, {"fill": "0"}),
        ("width_1m_mixed", [1 << 20], 1 << 20, {"fill": "mixed"}),
    ):
        params = _call(lens, width, 8, TOPK_BLOCKS, **more)
        cases.append(Case(name, params, profile="full", checks=VALUES))
    cases += [
        # More rows than a grid has programs in its second dimension.
        Case(
            "seventy_thousand_rows",
            _call([at % 25 for at in range(70000)], 24, 8, 2),
            profile="full",
            checks=("eager",),
            device="cuda",
        ),
        # Row times stride passes 2^31 elements at the third row. Little of that memory is touched.
        Case(
            "logits_rows_past_2_31",
            _call([33, 20, 30], 33, 8, 2, row_stride=2**30 + 8),
            profile="full",
            checks=("eager",),
        ),
        Case(
            "consumer_logits_rows_past_2_31",
            _call([33, 20, 30], 33, 8, 2, row_stride=2**30 + 8, published="some"),
            profile="full",
            checks=("eager",),
        ),
        # The rows of what is returned pass 2^31 elements, and so do those of what was published.
        Case(
            "output_past_2_31",
            _call([40, 9, 1 << 20], (1 << 30) + 64, 1 << 16, 3, row_stride=0, fill="0"),
            profile="soak",
            checks=("eager",),
            device="cuda",
        ),
    ]
    return cases


# ---------------------------------------------------------------- fuzz


@st.composite
def strategy(draw: st.DrawFn) -> Params:
    """Params of small calls: geometry, lengths one by one, a few special logits."""
    width = draw(st.one_of(st.integers(1, 40), st.sampled_from((64, 65, 128))))
    rows = draw(st.integers(0, 3))
    length = st.one_of(st.integers(-1, width + 1), st.sampled_from((width, -(2**31), 2**31 - 1)))
    params = _call(
        [draw(length) for _ in range(rows)],
        width,
        draw(st.one_of(st.integers(1, 9), st.sampled_from((8, 32, 64, 70)))),
        draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(("fp32", "bf16"))),
        fill=draw(st.sampled_from(("normal", "coarse", "mixed", "0", "-inf"))),
        published=draw(st.sampled_from((None, None, "some", "blocks", "all"))),
        published_layout=draw(st.sampled_from(("rows", "apart", "columns"))),
    )
    if rows:
        poke = st.tuples(
            st.integers(0, rows - 1), st.integers(0, width - 1), st.sampled_from(list(SPECIALS))
        )
        params["pokes"] = [list(found) for found in draw(st.lists(poke, max_size=4))]
    return params


# ---------------------------------------------------------------- bad inputs

_SOURCE = _call([10, 7, 16], 16, 4, 2)
_CONSUMER = _call([10, 7, 16], 16, 4, 2, published="some")
_NO_ROWS = _call([], 16, 4, 2, published="some")


def _bad(
    name: str,
    names: str,
    edit: Callable[[Args], Mapping[str, Any]],
    params: Params | None = None,
) -> BadInput:
    return BadInput(name, lambda args: {**args, **edit(args)}, names, params=params)


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Args], Mapping[str, Any]]:
    return lambda args: {name: change(args[name])}


def _number(name: str, number: int) -> Callable[[Args], Mapping[str, Any]]:
    return lambda args: {name: number}


def _faults(
    name: str, params: Params, faults: Mapping[str, Callable[[Tensor], Tensor]]
) -> list[BadInput]:
    return [
        _bad(f"{name}_{fault}", name, _change(name, change), params)
        for fault, change in faults.items()
    ]


def _bad_inputs() -> list[BadInput]:
    numbers = [
        _bad(f"{name}_{fault}", name, _number(name, number), params)
        for name in ("topk_blocks", "block_size")
        for fault, number, params in (
            ("0", 0, _SOURCE),
            ("negative", -8, _SOURCE),
            ("0_in_a_consumer", 0, _CONSUMER),
            ("0_without_rows", 0, _NO_ROWS),
        )
    ]
    logits = {
        "1d": lambda t: t[0],
        "3d": lambda t: t[None],
        "width_0": lambda t: t[:, :0],
        "columns_two_apart": lambda t: t.new_zeros(t.shape[0], 2 * t.shape[1])[:, ::2],
        "transposed": lambda t: t.t().contiguous().t(),
        "of_float16": lambda t: t.half(),
        "of_float64": lambda t: t.double(),
        "of_int32": lambda t: t.int(),
        "on_another_device": lambda t: t.to("meta"),
    }
    seq_lens = {
        "2d": lambda t: t[:, None],
        "0d": lambda t: t[0],
        "one_row_less": lambda t: t[:-1],
        "one_row_more": lambda t: torch.cat([t, t[:1]]),
        "not_contiguous": lambda t: t.repeat_interleave(2)[::2],
        "of_int64": lambda t: t.long(),
        "of_int16": lambda t: t.short(),
        "of_float32": lambda t: t.float(),
        "on_another_device": lambda t: t.to("meta"),
    }
    published = {
        "1d": lambda t: t[0],
        "3d": lambda t: t[None],
        "one_row_less": lambda t: t[:-1],
        "one_column_less": lambda t: t[:, :-1],
        "one_column_more": lambda t: torch.cat([t, t[:, :1]], dim=1),
        # One flag a block is not one a position.
        "of_blocks": lambda t: t[:, ::4],
        "of_uint8": lambda t: t.to(torch.uint8),
        "of_float32": lambda t: t.float(),
        "of_int64": lambda t: t.long(),
        "on_another_device": lambda t: t.to("meta"),
    }
    return [
        *numbers,
        *_faults("logits", _SOURCE, logits),
        *_faults("seq_lens", _SOURCE, seq_lens),
        *_faults("published", _CONSUMER, published),
        _bad("width_0_without_rows", "logits", lambda a: {"logits": a["logits"][:, :0]}, _NO_ROWS),
        _bad(
            "published_of_uint8_without_rows",
            "published",
            lambda a: {"published": a["published"].to(torch.uint8)},
            _NO_ROWS,
        ),
    ]


# ---------------------------------------------------------------- benchmark

PUBLISHED_US = {
    (1, 1 << 20): 58.0,
    (6, 1 << 20): 87.0,
    (1, 32768): 29.0,
    (6, 32768): 31.0,
    (64, 32768): 38.0,
}
"""Graph replay of the published kernels on an H200, by rows and width: blocks of 8, 2048 kept."""


def _reach(published: float) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        return us["triton"] <= published, f"at most the published {published:g} us"

    return reach


def bench() -> list[BenchPoint]:
    """The published grid, as source and as consumer; every row at full length."""
    points = []
    for role, published in (("source", None), ("consumer", "blocks")):
        for (rows, width), published_us in PUBLISHED_US.items():
            # Logits in, masked logits out, and one byte a position out or in.
            points.append(
                BenchPoint(
                    f"{role}_rows_{rows}_width_{width}",
                    _call([width] * rows, width, BLOCK_SIZE, TOPK_BLOCKS, published=published),
                    bytes_moved=rows * width * (4 + 4 + 1),
                    published_us={"triton": published_us},
                    reach=_reach(published_us),
                )
            )
    return points


OPS = ("candidate_blocks",)

SPECS = [
    OpSpec(
        name="candidate_blocks",
        family="candidate_blocks",
        summary="mask the indexer's logits, and choose the blocks that later layers look at",
        build=build,
        effects=[
            Effect(
                "return[0]",
                rule="the logit where c < seq_lens[row] and, in a consumer, the position is "
                "published; else -inf",
            ),
            Effect(
                "return[1]",
                rule="all columns of the best min(topk_blocks, blocks) blocks whose score is above "
                "-inf, the newest scoring +inf; ties at the boundary fill just the places left",
                judge=TopKSet(
                    scores=_scores,
                    places=lambda before: before["topk_blocks"],
                    item_width=lambda before: before["block_size"],
                ),
            ),
        ],
        cases=[
            *_length_cases(),
            *_score_cases(),
            *_block_cases(),
            *_consumer_cases(),
            *_large_cases(),
        ],
        strategy=strategy,
        bad_inputs=_bad_inputs(),
        bad_input_params=_SOURCE,
        replays=replays,
        rescale=rescale,
        strides={"logits": "rows", "published": "any"},
        bench=bench,
    )
]
