"""What `draft_argmax` must do, as data: vocabularies, shards, ties and NaN at their worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POSITION_DTYPES = {"int32": torch.int32, "int64": torch.int64}

SPECIALS: Mapping[str, Mapping[str, int]] = {
    name: dict(zip(("fp32", "bf16", "fp16"), patterns, strict=True))
    for name, patterns in {
        "0": (0x00000000, 0x0000, 0x0000),
        "-0": (0x80000000, 0x8000, 0x8000),
        "tiny": (0x00000001, 0x0001, 0x0001),
        "-tiny": (0x80000001, 0x8001, 0x8001),
        "subnormal_max": (0x007FFFFF, 0x007F, 0x03FF),
        "normal_min": (0x00800000, 0x0080, 0x0400),
        "1": (0x3F800000, 0x3F80, 0x3C00),
        "1_up": (0x3F800001, 0x3F81, 0x3C01),
        "-1": (0xBF800000, 0xBF80, 0xBC00),
        "-1_down": (0xBF800001, 0xBF81, 0xBC01),
        "100": (0x42C80000, 0x42C8, 0x5640),
        "max": (0x7F7FFFFF, 0x7F7F, 0x7BFF),
        "-max": (0xFF7FFFFF, 0xFF7F, 0xFBFF),
        "inf": (0x7F800000, 0x7F80, 0x7C00),
        "-inf": (0xFF800000, 0xFF80, 0xFC00),
        # fl32(-1e30), to which a NaN sinks, and what each type has next to it.
        "-1e30": (0xF149F2CA, 0xF14A, 0xFC00),
        "-1e30_up": (0xF149F2C9, 0xF149, 0xFBFF),
        "-1e30_down": (0xF149F2CB, 0xF14A, 0xFC00),
        "-2e30": (0xF1C9F2CA, 0xF1CA, 0xFC00),
        "nan": (0x7FC00000, 0x7FC0, 0x7E00),
        "-nan": (0xFFC00000, 0xFFC0, 0xFE00),
        "signalling_nan": (0x7F800001, 0x7F81, 0x7C01),
        "-signalling_nan": (0xFF800001, 0xFF81, 0xFC01),
        "full_nan": (0x7FFFFFFF, 0x7FFF, 0x7FFF),
    }.items()
}
"""Bit pattern by name and type."""

TIES_PER_ROW = 4


def build(params: Params, seed: int) -> Args:
    """Make one call.

    Parameters
    ----------
    params : mapping
        `rows`, `widths` (one a rank) and `vocab`; optional: `dtype`, `fill` ("normal", "coarse",
        "negative", "ties", "mixed" or the name of a special that fills everything), `padding`
        (the special in the columns past the vocabulary), `pokes` ([row, global column, special];
        row None: all), `row_strides` (one a rank), `sliced` (the shards are views of one tensor),
        `positions` (type), `draft` ([n, column] or None), `column` (where there is no draft),
        `draft_stride`, `nan_policy`, and `defaults` (leave out every argument that has a default).
    seed : int
    """
    generator = torch.Generator().manual_seed(seed)
    kind = params.get("dtype", "bf16")
    rows, widths, vocab = params["rows"], params["widths"], params["vocab"]
    scores = _scores(params.get("fill", "normal"), rows, sum(widths), vocab, kind, generator)
    patterns = scores.view(_pattern_type(kind))
    patterns[:, vocab:] = _signed(params.get("padding", "inf"), kind)
    for row, column, special in params.get("pokes", ()):
        patterns[slice(None) if row is None else row, column] = _signed(special, kind)

    shards = list(scores.split(widths, dim=1))
    if not params.get("sliced"):
        strides = params.get("row_strides") or [None] * len(widths)
        shards = [_laid(shard, stride) for shard, stride in zip(shards, strides, strict=True)]
    args: Args = {
        "logits_shards": shards,
        "vocab_size": vocab,
        "positions": _positions(params.get("positions", "int64"), rows, generator),
    }
    if params.get("defaults"):
        return args
    draft = params.get("draft", [3, 1])
    args["draft_tokens"] = None
    if draft is not None:
        tokens = torch.randint(-(2**62), 2**62, (rows, draft[0]), generator=generator)
        args["draft_tokens"] = _laid(tokens, params.get("draft_stride"))
    args["draft_token_column"] = params.get("column", 0) if draft is None else draft[1]
    args["nan_policy"] = params.get("nan_policy", "sink")
    return args


def _pattern_type(kind: str) -> torch.dtype:
    return torch.int32 if kind == "fp32" else torch.int16


def _signed(special: str, kind: str) -> int:
    pattern = SPECIALS[special][kind]
    bits = 32 if kind == "fp32" else 16
    return pattern - (1 << bits) if pattern >> (bits - 1) else pattern


def _scores(
    fill: str, rows: int, total: int, vocab: int, kind: str, generator: torch.Generator
) -> Tensor:
    shape = (rows, total)
    if fill in SPECIALS:
        patterns = torch.full(shape, _signed(fill, kind), dtype=_pattern_type(kind))
        return patterns.view(DTYPES[kind])
    if fill == "mixed":
        table = torch.tensor([_signed(name, kind) for name in SPECIALS], dtype=_pattern_type(kind))
        chosen = torch.randint(len(SPECIALS), shape, generator=generator)
        return table[chosen].view(DTYPES[kind])
    if fill == "coarse":
        scores = torch.randint(-4, 5, shape, generator=generator).float()
    elif fill == "normal":
        scores = torch.randn(shape, generator=generator) * 3
    else:
        scores = -1 - torch.rand(shape, generator=generator)
        if fill == "ties":
            tied = torch.randint(vocab, (rows, TIES_PER_ROW), generator=generator)
            scores.scatter_(1, tied, 2.0)
    return scores.to(DTYPES[kind])


def _laid(tensor: Tensor, stride: int | None) -> Tensor:
    """Copy a matrix into memory of its own, with rows `stride` elements apart."""
    rows, width = tensor.shape
    if stride is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    # Left unwritten between the rows, so that huge strides touch little memory.
    memory = torch.empty(max(0, rows - 1) * stride + width, dtype=tensor.dtype)
    laid = memory.as_strided((rows, width), (stride, 1))
    # Rows that share their memory all hold the first one's scores.
    laid[: 1 if stride == 0 else rows].copy_(tensor[: 1 if stride == 0 else rows])
    return laid


def _positions(kind: str, rows: int, generator: torch.Generator) -> Tensor:
    # The first row stands where an advance carries into the upper half, or just fits.
    highest = {"int32": 2**31 - 2, "int64": 2**32 - 1}[kind]
    positions = torch.randint(highest, (rows,), generator=generator)
    positions[:1] = highest
    # The next two: what float64 cannot count on from, and a position before the first.
    positions[1:2] = highest if kind == "int32" else 2**53
    positions[2:3] = -1
    # A first position is no mark of an unused row.
    positions[3:4] = 0
    return positions.to(POSITION_DTYPES[kind])


def replays(params: Params) -> list[Params]:
    """Give calls of the same geometry with other winners: sparse ties, specials, plain scores."""
    plain = {**params, "pokes": []}
    return [{**plain, "fill": fill} for fill in ("ties", "mixed", "normal")]


def rescale(args: Args) -> Args:
    """The same tensors: a smaller vocabulary, the next draft column.

    The policy "first" becomes "sink", and never the other way: it has cases of its own.
    """
    other = {**args, "vocab_size": max(1, args["vocab_size"] // 2)}
    if args.get("draft_tokens") is not None:
        columns = args["draft_tokens"].shape[1]
        other["draft_token_column"] = (args["draft_token_column"] + 1) % columns
    if "nan_policy" in args:
        other["nan_policy"] = "sink"
    return other


def _written_column(before: Args, path: str) -> Tensor:
    region = torch.zeros(before["draft_tokens"].shape, dtype=torch.bool)
    region[:, before["draft_token_column"]] = True
    return region


# ---------------------------------------------------------------- cases

VALUES = ("eager", "graph")
"""For cases that only differ in what the scores are."""

LARGE = ("eager", "guards", "graph")
"""For cases whose point is where the scores lie."""


def _rows_of_pokes(*rows: Mapping[int, str]) -> list[list[Any]]:
    return [[row, column, name] for row, pokes in enumerate(rows) for column, name in pokes.items()]


def _winners(columns: tuple[int, ...]) -> list[list[Any]]:
    return [[row, column, "1"] for row, column in enumerate(columns)]


def _geometry_cases() -> list[Case]:
    return [
        Case("one_row_of_one_token", {"rows": 1, "widths": [1], "vocab": 1}),
        Case("no_rows", {"rows": 0, "widths": [5, 3], "vocab": 7}, noop=True),
        Case("five_tokens_over_three_ranks", {"rows": 2, "widths": [2, 2, 1], "vocab": 5}),
        Case(
            "eight_ranks_of_other_widths",
            {
                "rows": 3,
                "widths": [3, 1, 4, 1, 5, 9, 2, 6],
                "vocab": 30,
                "fill": "ties",
                "pokes": [[0, 29, "100"]],
            },
            checks=LARGE,
        ),
        # More ranks than a node has GPUs; the candidates of half a warp are not enough.
        Case(
            "eighteen_ranks",
            {
                "rows": 1,
                "widths": [1] * 18,
                "vocab": 17,
                "dtype": "fp32",
                "fill": "negative",
                "padding": "-nan",
                "nan_policy": "first",
                "pokes": [[0, 16, "0"]],
            },
            checks=VALUES,
        ),
        # Five, six and seven ranks: candidates are no power of two. The last one must count.
        Case(
            "winner_in_each_of_five_ranks",
            {
                "rows": 5,
                "widths": [7, 2, 16, 1, 8],
                "vocab": 33,
                "fill": "negative",
                "pokes": _winners((6, 8, 9, 25, 32)),
            },
            checks=VALUES,
        ),
        Case(
            "seven_ranks_fp16",
            {
                "rows": 2,
                "widths": [5] * 7,
                "vocab": 34,
                "dtype": "fp16",
                "fill": "coarse",
                "pokes": [[0, 33, "100"]],
            },
            checks=VALUES,
        ),
        Case(
            "six_ranks",
            {
                "rows": 1,
                "widths": [2] * 6,
                "vocab": 11,
                "dtype": "fp32",
                "fill": "-inf",
                "padding": "nan",
                "pokes": [[0, 10, "-max"]],
            },
            checks=VALUES,
        ),
        # A rank's first id is the sum of the widths before it, not its number times a width.
        Case(
            "shards_without_columns",
            {"rows": 3, "widths": [0, 5, 0, 7, 0], "vocab": 12, "fill": "ties"},
            checks=LARGE,
        ),
        Case(
            "shards_are_slices_of_one_tensor",
            {"rows": 3, "widths": [17, 6, 26], "vocab": 47, "dtype": "fp32", "sliced": True},
            checks=LARGE,
        ),
        Case(
            "all_rows_are_one_row_in_memory",
            {
                "rows": 3,
                "widths": [9, 8],
                "vocab": 17,
                "row_strides": [0, 0],
                "pokes": [[0, 11, "100"]],
            },
            checks=VALUES,
        ),
        Case(
            "rows_are_further_apart_than_their_width",
            {
                "rows": 3,
                "widths": [32, 33],
                "vocab": 64,
                "row_strides": [48, 39],
                "draft_stride": 5,
            },
            checks=LARGE,
        ),
        Case(
            "sixteen_rows",
            {"rows": 16, "widths": [11], "vocab": 11, "positions": "int32", "draft": [1, 0]},
            checks=VALUES,
        ),
        Case(
            "sixty_four_rows",
            {"rows": 64, "widths": [25], "vocab": 25, "draft": [8, 7]},
            checks=VALUES,
        ),
        Case(
            "a_hundred_and_thirty_rows",
            {"rows": 130, "widths": [5], "vocab": 5, "fill": "coarse", "draft": [2, 1]},
            checks=("eager", "graph"),
        ),
        # More rows than a grid has blocks in its second dimension.
        Case(
            "seventy_thousand_rows",
            {"rows": 70000, "widths": [3, 4], "vocab": 7, "fill": "coarse"},
            profile="full",
            checks=("eager",),
            device="cuda",
        ),
        Case(
            "first_draft_column",
            {"rows": 2, "widths": [6], "vocab": 6, "draft": [4, 0], "positions": "int32"},
            checks=("eager", "poison", "strided", "graph"),
        ),
        Case(
            "last_draft_column",
            {"rows": 2, "widths": [6], "vocab": 6, "draft": [4, 3]},
            checks=("eager", "poison", "strided", "graph"),
        ),
        Case(
            "no_draft_tokens",
            # The column is not looked at then.
            {
                "rows": 2,
                "widths": [6, 2],
                "vocab": 8,
                "draft": None,
                "column": -1,
                "positions": "int32",
            },
            checks=LARGE,
        ),
        Case(
            "arguments_with_defaults_left_out",
            {
                "rows": 2,
                "widths": [4, 4],
                "vocab": 8,
                "defaults": True,
                "pokes": [[0, 1, "nan"], [1, 6, "nan"]],
            },
            checks=VALUES,
        ),
    ]


def _vocabulary_cases() -> list[Case]:
    around = (1023, 1024, 1025, 2048, 4095, 4096, 8191, 8192)
    cases = [
        # The scores are all negative: padding of 0 or more would win if it were looked at.
        Case(
            f"padding_of_{name}_over_{label}",
            {
                "rows": 2,
                "widths": [8, 8],
                "vocab": 11,
                "fill": fill,
                "padding": padding,
                "nan_policy": policy,
                "dtype": kind,
            },
            checks=VALUES,
        )
        for name, padding, fill, label, policy, kind in (
            ("inf", "inf", "negative", "negative_scores", "sink", "bf16"),
            ("zero", "0", "negative", "negative_scores", "sink", "fp32"),
            ("nan", "nan", "normal", "scores_nan_first", "first", "bf16"),
            ("nan", "-nan", "-inf", "minus_inf", "sink", "fp16"),
            ("inf", "inf", "-inf", "minus_inf", "first", "fp32"),
        )
    ]
    cases += [
        Case(
            "vocabulary_ends_inside_a_split",
            {
                "rows": 4,
                "widths": [1500, 1500],
                "vocab": 2603,
                "fill": "negative",
                "pokes": _winners((2602, 2600, 1500, 1499)),
            },
            checks=LARGE,
        ),
        Case(
            "vocabulary_ends_where_a_shard_does",
            {"rows": 3, "widths": [8, 8, 8, 8], "vocab": 16, "fill": "negative"},
            checks=VALUES,
        ),
        Case(
            "one_real_column_in_the_last_shards",
            {
                "rows": 3,
                "widths": [8, 8, 8, 8],
                "vocab": 9,
                "fill": "negative",
                "pokes": [[0, 8, "0"], [1, 7, "0"]],
            },
            checks=VALUES,
        ),
        Case(
            "one_real_column_in_all",
            {"rows": 2, "widths": [3, 3], "vocab": 1, "fill": "-inf"},
            checks=VALUES,
        ),
        Case(
            "vocabulary_of_8191_with_padding",
            {
                "rows": 2,
                "widths": [8192],
                "vocab": 8191,
                "fill": "negative",
                "pokes": _winners((8190, 8176)),
            },
            checks=VALUES,
        ),
        Case(
            "vocabulary_of_8192",
            {"rows": 2, "widths": [8192], "vocab": 8192, "dtype": "fp16", "fill": "ties"},
            checks=("eager", "strided", "graph"),
        ),
        # One winner a row, on either side of every size that a split may have.
        Case(
            "vocabulary_of_8193",
            {
                "rows": len(around),
                "widths": [8193],
                "vocab": 8193,
                "fill": "negative",
                "pokes": _winners(around),
                "dtype": "fp32",
            },
            checks=VALUES,
        ),
        Case(
            "ids_around_65536",
            {
                "rows": 4,
                # One shard holds most: a column, too, may pass 65536.
                "widths": [69997, 3],
                "vocab": 70000,
                "fill": "-1",
                "pokes": [
                    *_winners((65536, 65535)),
                    # Ties further apart than any block is wide.
                    *_rows_of_pokes(
                        {}, {}, {5: "1", 65535: "1"}, {20000: "1", 40000: "1", 66000: "1"}
                    ),
                ],
            },
            checks=VALUES,
        ),
        # 2^24 + 1 is the first id that fp32 does not hold. Both neighbours tie with it, above it
        # or past the vocabulary.
        Case(
            "id_beyond_2_24",
            {
                "rows": 1,
                "widths": [2**24, 8],
                "vocab": 2**24 + 2,
                "fill": "-1",
                "pokes": [[0, 2**24 + 1, "1"]],
            },
            checks=("eager",),
            seconds=300.0,
        ),
        Case(
            "id_beyond_2_24_in_a_wide_shard",
            {
                "rows": 1,
                "widths": [3, 2**24 + 100],
                "vocab": 2**24 + 50,
                "fill": "-1",
                "pokes": [[0, 2**24 + 35, "1"], [0, 2**24 + 36, "1"], [0, 2**24 + 37, "1"]],
            },
            profile="full",
            checks=("eager",),
        ),
        # The vocabulary of a large model over eight ranks; the tie is decided across ranks.
        Case(
            "production_154880_over_8",
            {
                "rows": 1,
                "widths": [19360] * 8,
                "vocab": 154880,
                "fill": "ties",
                "pokes": [[0, 131071, "100"], [0, 131072, "100"], [0, 154879, "100"]],
            },
            checks=VALUES,
        ),
    ]
    cases.append(
        Case(
            "production_129280_over_4",
            {
                "rows": 1,
                "widths": [32320] * 4,
                "vocab": 129280,
                "dtype": "fp32",
                "fill": "negative",
                "pokes": [[0, 129279, "0"]],
            },
            checks=VALUES,
        )
    )
    for rows, dtype in ((1, "fp32"), (2, "bf16"), (16, "bf16"), (64, "fp16")):
        for vocab, ranks in ((129280, 4), (154880, 4), (154880, 8), (154880, 1)):
            width = vocab // ranks
            cases.append(
                Case(
                    f"rows_{rows}_of_{vocab}_over_{ranks}_{dtype}",
                    {
                        "rows": rows,
                        "widths": [width] * (ranks - 1) + [width + 64],
                        "vocab": vocab,
                        "dtype": dtype,
                        "fill": "ties",
                    },
                    profile="full" if rows < 16 else "soak",
                    checks=LARGE,
                )
            )
    cases += [
        Case(
            f"rows_16_of_154880_over_4_{policy}",
            {
                "rows": 16,
                "widths": [38720] * 4,
                "vocab": 154877,
                "fill": "mixed",
                "padding": "nan",
                "nan_policy": policy,
            },
            profile="full",
            checks=LARGE,
            device="cuda",
        )
        for policy in ("sink", "first")
    ]
    # Row times stride passes 2^31 elements at the third row. Little of that memory is touched.
    cases += [
        Case(
            "logits_rows_past_2_31",
            {
                "rows": 3,
                "widths": [33],
                "vocab": 33,
                "row_strides": [2**30 + 8],
                "pokes": [[2, 32, "100"]],
            },
            checks=("eager",),
        ),
        Case(
            "draft_rows_past_2_31",
            {"rows": 3, "widths": [33], "vocab": 33, "draft": [2, 1], "draft_stride": 2**30 + 8},
            checks=("eager",),
        ),
    ]
    return cases


def _order_cases() -> list[Case]:
    def case(name: str, width: int, *rows: Mapping[int, str], **params: Any) -> Case:
        return Case(
            name,
            {
                "rows": len(rows),
                "widths": [width // 2, width - width // 2],
                "vocab": width,
                "fill": "negative",
                "pokes": _rows_of_pokes(*rows),
                **params,
            },
            checks=VALUES,
        )

    cases = [
        case(
            "ties_across_ranks_and_within",
            12,
            {2: "1", 9: "1"},
            {0: "1", 11: "1"},
            {5: "1", 6: "1"},
            {7: "1", 10: "1"},
            {1: "1", 3: "1"},
            {11: "1"},
        ),
        # Lower ids that stand later in a warp, in a vector or in a tree of comparisons.
        case(
            "ties_across_splits",
            8194,
            {1023: "1", 1024: "1"},
            {127: "1", 128: "1", 1152: "1"},
            {517: "1", 1032: "1", 2048: "1", 4096: "1"},
            {4095: "1", 4097: "1", 8193: "1"},
            widths=[8194],
        ),
        case("ties_of_plus_inf", 10, {3: "inf", 8: "inf"}, {9: "inf"}, {4: "max", 7: "inf"}),
        case(
            "ties_made_by_rounding",
            700,
            {},
            {},
            {},
            fill="normal",
            widths=[300, 400],
        ),
        Case(
            "row_of_minus_inf",
            {"rows": 2, "widths": [3, 4, 5, 1, 0, 2], "vocab": 14, "fill": "-inf"},
            checks=VALUES,
        ),
        case(
            "one_finite_score_over_minus_inf",
            9,
            {8: "-max"},
            {3: "-max"},
            {4: "-1e30_down", 6: "-2e30"},
            fill="-inf",
            dtype="fp32",
        ),
    ]
    for kind in DTYPES:
        cases += [
            # Either zero may stand first, in one shard or in two: the lower id wins.
            case(
                f"zeros_of_both_signs_{kind}",
                10,
                {1: "-0", 8: "0"},
                {2: "0", 7: "-0"},
                {0: "-0", 3: "0"},
                {6: "-0", 9: "0"},
                dtype=kind,
            ),
            # Flushing subnormals to zero would make ties.
            case(
                f"subnormals_{kind}",
                10,
                {1: "0", 8: "tiny"},
                {2: "-tiny", 7: "-0"},
                {0: "tiny", 4: "subnormal_max", 6: "tiny"},
                {3: "subnormal_max", 5: "normal_min"},
                dtype=kind,
            ),
            # Neighbours differ in the last bit, which coarser types and half a key do not see.
            case(
                f"neighbours_{kind}",
                10,
                {1: "1", 8: "1_up"},
                {2: "1_up", 7: "1"},
                {0: "1", 4: "1_up"},
                {6: "-1", 3: "-1_down"},
                # The ends of the finite scores are no infinities.
                {2: "max", 7: "inf"},
                {0: "-inf"},
                dtype=kind,
                fill="-max",
            ),
            case(
                f"nan_sinks_{kind}",
                10,
                # It loses to any score above fl32(-1e30), and to nothing below.
                {2: "nan", 6: "-1e30_up"},
                {3: "nan", 1: "-1e30_down", 8: "-1e30_down"},
                {9: "-nan", 0: "-2e30"},
                {5: "signalling_nan"},
                {4: "full_nan"},
                {7: "-nan", 3: "-signalling_nan"},
                {0: "nan", 5: "inf"},
                dtype=kind,
                fill="-inf",
            ),
            case(
                f"nan_sinks_below_scores_{kind}",
                10,
                {0: "nan", 9: "nan"},
                {3: "-nan", 4: "full_nan", 5: "signalling_nan", 6: "-signalling_nan"},
                dtype=kind,
            ),
            # A single rank may have a path of its own, and keeps the same order.
            case(
                f"one_rank_{kind}",
                10,
                {1: "-0", 8: "0"},
                {2: "0", 7: "-0"},
                {0: "-tiny", 5: "0", 6: "tiny"},
                {3: "1", 9: "1_up"},
                {3: "nan", 5: "-nan", 7: "-2e30"},
                {4: "inf", 6: "nan", 9: "inf"},
                dtype=kind,
                widths=[10],
                fill="-inf",
            ),
            # The first NaN wins, whatever its sign and payload, over +inf too.
            case(
                f"nan_first_{kind}",
                10,
                {2: "signalling_nan", 7: "full_nan"},
                {0: "inf", 9: "-nan"},
                {4: "-nan", 5: "nan"},
                {1: "inf", 6: "signalling_nan", 8: "inf"},
                {2: "inf", 5: "-signalling_nan", 9: "nan"},
                {9: "full_nan"},
                {3: "max"},
                dtype=kind,
                nan_policy="first",
            ),
        ]
    cases += [
        case(
            "one_rank_nan_first",
            6,
            {1: "inf", 3: "nan", 4: "-nan"},
            widths=[6],
            nan_policy="first",
        ),
        # An equal score ties with a sunk NaN, and the lower id wins: fp32 holds fl32(-1e30).
        case(
            "nan_ties_with_its_score",
            8,
            {1: "nan", 6: "-1e30"},
            {2: "-1e30", 5: "nan"},
            {0: "-1e30", 3: "-nan"},
            {4: "signalling_nan", 7: "-1e30"},
            dtype="fp32",
            fill="-inf",
        ),
        Case(
            "zeros_of_both_signs_over_nan_first_ranks",
            {
                "rows": 2,
                "widths": [4, 4, 4],
                "vocab": 12,
                "fill": "-inf",
                "nan_policy": "first",
                "pokes": _rows_of_pokes({3: "-0", 4: "0"}, {3: "0", 4: "-0", 11: "0"}),
            },
            checks=VALUES,
        ),
    ]
    cases += [
        Case(
            f"rows_of_{name}_{policy}",
            {
                "rows": 2,
                "widths": [4, 5, 3],
                "vocab": 10,
                "fill": name.replace("minus_", "-"),
                "dtype": kind,
                "nan_policy": policy,
            },
            checks=VALUES,
        )
        for name, kind in (("nan", "bf16"), ("minus_nan", "fp32"))
        for policy in ("sink", "first")
    ]
    cases += [
        Case(
            f"specials_mixed_{kind}_{policy}",
            {
                "rows": 6,
                "widths": [5, 3, 4],
                "vocab": 11,
                "fill": "mixed",
                "dtype": kind,
                "nan_policy": policy,
            },
            checks=VALUES,
        )
        for kind in DTYPES
        for policy in ("sink", "first")
    ]
    return cases


# ---------------------------------------------------------------- fuzz


@st.composite
def _params(draw: st.DrawFn) -> Params:
    widths = draw(
        st.lists(st.one_of(st.integers(0, 9), st.sampled_from([16, 33])), min_size=1, max_size=5)
    )
    if draw(st.integers(0, 4)) == 4:
        widths[draw(st.integers(0, len(widths) - 1))] = draw(st.integers(1020, 2060))
    if not sum(widths):
        widths[-1] = 1
    total = sum(widths)
    rows = draw(st.integers(0, 3))
    pokes = []
    if rows:
        poke = st.tuples(
            st.integers(0, rows - 1), st.integers(0, total - 1), st.sampled_from(list(SPECIALS))
        )
        pokes = [list(found) for found in draw(st.lists(poke, max_size=4))]
    columns = draw(st.integers(1, 4))
    return {
        "rows": rows,
        "widths": widths,
        "vocab": draw(st.integers(1, total)),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "fill": draw(st.sampled_from(["coarse", "normal", "ties", "mixed", "-inf", "nan"])),
        "padding": draw(st.sampled_from(["inf", "nan", "0"])),
        "pokes": pokes,
        "sliced": draw(st.booleans()),
        "positions": draw(st.sampled_from(list(POSITION_DTYPES))),
        "draft": draw(
            st.none() | st.tuples(st.just(columns), st.integers(0, columns - 1)).map(list)
        ),
        "nan_policy": draw(st.sampled_from(["sink", "first"])),
    }


# ---------------------------------------------------------------- bad inputs


def _bad(name: str, names: str, edit: Callable[[Args], Mapping[str, Any]]) -> BadInput:
    return BadInput(name, lambda args: {**args, **edit(args)}, names)


def _second(change: Callable[[Tensor], Tensor]) -> Callable[[Args], Mapping[str, Any]]:
    """Spoil the second of two shards."""
    return lambda a: {"logits_shards": [a["logits_shards"][0], change(a["logits_shards"][1])]}


def _both(change: Callable[[Tensor], Tensor]) -> Callable[[Args], Mapping[str, Any]]:
    return lambda a: {"logits_shards": [change(shard) for shard in a["logits_shards"]]}


def _column_strided(matrix: Tensor) -> Tensor:
    return matrix.new_ones(matrix.shape[0], 2 * matrix.shape[1])[:, ::2]


def _2_31_tokens(args: Args) -> Mapping[str, Any]:
    # Without data: an implementation that takes them is found out without the memory for them.
    shard = args["logits_shards"][0]
    return {
        "logits_shards": [shard.new_empty(shard.shape[0], 2**31, device="meta")],
        "vocab_size": 2**31,
        "positions": args["positions"].to("meta"),
        "draft_tokens": args["draft_tokens"].to("meta"),
    }


BAD_INPUTS = [
    _bad("no_shards", "logits_shards", lambda a: {"logits_shards": []}),
    _bad("one_dimensional_shard", "logits_shards", _second(lambda t: t[0])),
    _bad("three_dimensional_shards", "logits_shards", _both(lambda t: t[None])),
    _bad("rows_differ", "logits_shards", _second(lambda t: t[:-1])),
    _bad("shards_of_float64", "logits_shards", _both(lambda t: t.double())),
    _bad("shards_of_int32", "logits_shards", _both(lambda t: t.int())),
    _bad("types_differ", "logits_shards", _second(lambda t: t.float())),
    _bad("columns_two_apart", "logits_shards", _second(_column_strided)),
    _bad("shards_transposed", "logits_shards", _both(lambda t: t.t().contiguous().t())),
    _bad("shards_on_two_devices", "logits_shards", _second(lambda t: t.to("meta"))),
    _bad("vocabulary_of_zero", "vocab_size", lambda a: {"vocab_size": 0}),
    _bad("vocabulary_negative", "vocab_size", lambda a: {"vocab_size": -1}),
    _bad("vocabulary_wider_than_shards", "vocab_size", lambda a: {"vocab_size": 13}),
    _bad("vocabulary_of_2_31", "vocab_size", _2_31_tokens),
    _bad("positions_2d", "positions", lambda a: {"positions": a["positions"][:, None]}),
    _bad("positions_too_short", "positions", lambda a: {"positions": a["positions"][:-1]}),
    _bad(
        "positions_too_long",
        "positions",
        lambda a: {"positions": a["positions"].new_zeros(a["positions"].numel() + 1)},
    ),
    _bad("positions_of_float32", "positions", lambda a: {"positions": a["positions"].float()}),
    _bad("positions_of_int16", "positions", lambda a: {"positions": a["positions"].short()}),
    _bad(
        "positions_two_apart",
        "positions",
        lambda a: {"positions": a["positions"].new_zeros(2 * a["positions"].numel())[::2]},
    ),
    _bad(
        "positions_on_another_device",
        "positions",
        lambda a: {"positions": a["positions"].to("meta")},
    ),
    _bad("draft_of_int32", "draft_tokens", lambda a: {"draft_tokens": a["draft_tokens"].int()}),
    _bad("draft_1d", "draft_tokens", lambda a: {"draft_tokens": a["draft_tokens"][:, 0]}),
    _bad("draft_rows_differ", "draft_tokens", lambda a: {"draft_tokens": a["draft_tokens"][:-1]}),
    _bad(
        "draft_columns_two_apart",
        "draft_tokens",
        lambda a: {"draft_tokens": _column_strided(a["draft_tokens"])},
    ),
    _bad(
        "draft_on_another_device",
        "draft_tokens",
        lambda a: {"draft_tokens": a["draft_tokens"].to("meta")},
    ),
    _bad("draft_column_past_the_end", "draft_token_column", lambda a: {"draft_token_column": 3}),
    _bad("draft_column_negative", "draft_token_column", lambda a: {"draft_token_column": -1}),
    _bad("nan_policy_unknown", "nan_policy", lambda a: {"nan_policy": "last"}),
    # Without rows there is nothing to do, but the arguments are no better for it.
    *(
        BadInput(
            f"{name}_without_rows", edit, names, params={"rows": 0, "widths": [8, 4], "vocab": 12}
        )
        for name, names, edit in (
            ("vocabulary_of_zero", "vocab_size", lambda a: {**a, "vocab_size": 0}),
            ("types_differ", "logits_shards", lambda a: {**a, **_second(lambda t: t.float())(a)}),
            (
                "draft_of_int32",
                "draft_tokens",
                lambda a: {**a, "draft_tokens": a["draft_tokens"].int()},
            ),
            ("nan_policy_unknown", "nan_policy", lambda a: {**a, "nan_policy": "last"}),
        )
    ),
]


# ---------------------------------------------------------------- benchmarks

BENCH_ROWS = (1, 2, 4, 8, 16, 32, 64)
BENCH_SHARDS = (19360, 38720, 154880)
BENCH_VOCAB = 154880
BENCH_HIDDEN = 6144
"""Width of the hidden state that the LM head multiplies."""

PUBLISHED_PAIR_US = {
    (19360, 1): 3.5,
    (19360, 16): 3.8,
    (38720, 1): 3.6,
    (38720, 16): 4.1,
    (154880, 1): 3.6,
    (154880, 16): 5.5,
}
"""Published partials and finalize of one rank on an H200, by (shard, rows)."""

PUBLISHED_STEP_US = {
    4: {1: (91.4, 82.1), 2: (92.0, 82.1), 4: (93.4, 83.0), 8: (96.4, 83.5), 16: (103.9, 83.8)},
    8: {1: (87.2, 65.7), 2: (95.8, 63.3), 4: (89.1, 60.5), 8: (95.9, 59.0), 16: (112.3, 59.6)},
}
"""Published LM head and step on GB300s, communication included: ranks, rows, (gather, exchange)."""

ARGMAX_SHARE = 0.6
"""Partials and finalize are to take at most this part of torch.argmax's time."""


def _exchange_arm(args: Args) -> Callable[[], object]:
    from draftproof.kernels.draft_argmax import draft_argmax

    return lambda: draft_argmax(**args)


def _split_argmax_arm(args: Args) -> Callable[[], object]:
    from draftproof.kernels.draft_argmax import draft_argmax_baseline

    return lambda: draft_argmax_baseline(**args)


def _torch_argmax_arm(args: Args) -> Callable[[], object]:
    (shard,) = args["logits_shards"]
    return lambda: torch.argmax(shard, dim=1)


def _reach(published: float | None) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        limit = ARGMAX_SHARE * us["torch_argmax"]
        within = f"at most {ARGMAX_SHARE} x torch.argmax ({limit:.2f} us)"
        if published is not None:
            limit = min(limit, published)
            within += f" and the published {published:.1f} us"
        return us["exchange"] <= limit, f"{us['exchange']:.2f} us, {within}"

    return reach


def _head(args: Args) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Give the LM head of one rank, and the logits of all: the first shard is that rank's."""
    shards = args["logits_shards"]
    rows, width = shards[0].shape
    device = shards[0].device
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(
        rows, BENCH_HIDDEN, dtype=torch.bfloat16, device=device, generator=generator
    )
    weight = torch.randn(
        width, BENCH_HIDDEN, dtype=torch.bfloat16, device=device, generator=generator
    )
    return lambda: torch.mm(hidden, weight.t()), shards[1:]


def _head_and_exchange_arm(args: Args) -> Callable[[], object]:
    from draftproof.kernels import draft_argmax as kernels

    head, others = _head(args)
    rows, ranks = args["positions"].shape[0], 1 + len(others)
    width = args["logits_shards"][0].shape[1]
    splits = kernels.exchange_splits(rows, width)

    def step() -> object:
        # One rank's part of a step; the all-reduce between the two launches is not there.
        buffer = kernels.exchange_buffer(rows, ranks, splits, args["positions"].device)
        kernels.argmax_partials(
            head(), buffer, rank=0, first_id=0, vocab_size=args["vocab_size"], clear_others=True
        )
        return kernels.finalize_argmax(buffer, positions=args["positions"])

    return step


def _head_and_gather_arm(args: Args) -> Callable[[], object]:
    from draftproof.kernels.draft_argmax import draft_argmax_baseline

    head, others = _head(args)
    rest = {name: value for name, value in args.items() if name != "logits_shards"}
    # The others' logits stand ready, as an all-gather leaves them: putting them side by side is
    # timed, the communication is not.
    return lambda: draft_argmax_baseline([head(), *others], **rest)


def bench() -> list[BenchPoint]:
    """One rank's kernels alone, then the LM head with one rank's part of the whole step."""
    points = []
    for kind in ("bf16", "fp32"):
        for width in BENCH_SHARDS:
            for rows in BENCH_ROWS:
                published = PUBLISHED_PAIR_US.get((width, rows))
                points.append(
                    BenchPoint(
                        f"shard_{width}_{kind}_rows_{rows}",
                        {
                            "rows": rows,
                            "widths": [width],
                            "vocab": width,
                            "dtype": kind,
                            "draft": None,
                        },
                        arms={
                            "exchange": _exchange_arm,
                            "split_argmax": _split_argmax_arm,
                            "torch_argmax": _torch_argmax_arm,
                        },
                        baseline="torch_argmax",
                        bytes_moved=rows * width * DTYPES[kind].itemsize,
                        published_us={} if published is None else {"exchange": published},
                        reach=_reach(published),
                    )
                )
    for ranks, by_rows in PUBLISHED_STEP_US.items():
        for rows, (gather, exchange) in by_rows.items():
            width = BENCH_VOCAB // ranks
            points.append(
                BenchPoint(
                    f"lm_head_and_step_tp{ranks}_rows_{rows}",
                    {
                        "rows": rows,
                        "widths": [width] * ranks,
                        "vocab": BENCH_VOCAB,
                        "draft": None,
                    },
                    arms={
                        "head_and_exchange": _head_and_exchange_arm,
                        "head_and_gather": _head_and_gather_arm,
                    },
                    baseline="head_and_gather",
                    bytes_moved=2 * BENCH_HIDDEN * (width + rows) + 2 * rows * width,
                    published_us={"head_and_exchange": exchange, "head_and_gather": gather},
                )
            )
    return points


SPECS = [
    OpSpec(
        name="draft_argmax",
        family="draft_argmax",
        summary="greedy draft token of a vocabulary split over ranks, without gathering logits",
        build=build,
        effects=[
            Effect("return[0]", rule="topk_p is 1.0 in every row"),
            Effect(
                "return[1]",
                rule="topk_index is the lowest id among the row's best scores: -0 equals +0, a NaN "
                "counts as fl32(-1e30) or comes first, ids >= vocab_size never win",
            ),
            Effect("positions", rule="every position is advanced by one", reads=True),
            Effect(
                "draft_tokens",
                rule="the named column holds the tokens, the others what they held",
                region=_written_column,
            ),
        ],
        cases=[*_geometry_cases(), *_vocabulary_cases(), *_order_cases()],
        strategy=_params,
        bad_inputs=BAD_INPUTS,
        bad_input_params={"rows": 3, "widths": [8, 4], "vocab": 12},
        replays=replays,
        rescale=rescale,
        strides={"logits_shards*": "rows", "draft_tokens": "rows"},
        bench=bench,
    )
]
