"""Second oracle of `wo_a_mxfp8` and its parts: scalar Python over exact fractions, for tests."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.conformance.crosscheck import mxfp8
from draftproof.conformance.crosscheck.numerics import FLOAT32, fma32, round_bf16, round_to

SPLITS = 8


class Mxfp8SwizzledInput(NamedTuple):
    """Data and swizzled scales."""

    data: Tensor
    scales: Tensor


def wo_a_mxfp8(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Do what the oracle of the same name does, for small valid inputs."""
    return quantize_partials(wo_a_partials(x, weight))


def wo_a(x: Tensor, weight: Tensor) -> Tensor:
    """Do what the oracle of the same name does, for small valid inputs."""
    return _filled(_rows(wo_a_partials(x, weight)), torch.bfloat16).reshape(
        x.shape[0], weight.shape[0], weight.shape[1]
    )


def wo_a_partials(x: Tensor, weight: Tensor) -> Tensor:
    """Do what the oracle of the same name does: every sum exact, then rounded once."""
    inputs, weights = x.tolist(), weight.tolist()
    length = x.shape[2] // SPLITS
    sums = [
        [
            [
                [_dot(row[g], column, split * length, length) for column in weights[g]]
                for g in range(len(weights))
            ]
            for row in inputs
        ]
        for split in range(SPLITS)
    ]
    return torch.tensor(sums, dtype=torch.float32)


def quantize_partials(partials: Tensor) -> Mxfp8SwizzledInput:
    """Do what the oracle of the same name does, block by block."""
    data: list[list[int]] = []
    codes: list[list[int]] = []
    for row in _rows(partials):
        blocks = [mxfp8.encode_block(row[at : at + 32]) for at in range(0, len(row), 32)]
        data.append([element for block, _ in blocks for element in block])
        codes.append([code for _, code in blocks])
    columns = partials.shape[2] * partials.shape[3]
    bytes_ = torch.tensor(data, dtype=torch.uint8).reshape(len(data), columns)
    scales = torch.tensor(list(mxfp8.swizzle(codes)), dtype=torch.uint8)
    return Mxfp8SwizzledInput(bytes_.view(torch.float8_e4m3fn), scales)


def mxfp8_linear(input: Mxfp8SwizzledInput, weight_q: Tensor, weight_scales: Tensor) -> Tensor:
    """Do what the oracle of the same name does, every sum exact."""
    activations = _decoded(input.data, _unswizzled(input.scales, *input.data.shape))
    weights = _decoded(weight_q, weight_scales.tolist())
    return torch.tensor(
        [[mxfp8.dot(row, column) for column in weights] for row in activations],
        dtype=torch.float64,
    )


def _dot(row: list[float], column: list[float], first: int, length: int) -> float:
    terms = [row[d] * column[d] for d in range(first, first + length)]
    if not all(map(math.isfinite, terms)):
        # The products of bf16 numbers are exact in float64, and of the others order is no matter.
        return math.fsum(terms) if not {math.inf, -math.inf} <= set(terms) else math.nan
    exact = sum((Fraction(term) for term in terms), Fraction(0))
    return round_to(exact, FLOAT32, 1.0)


def _rows(partials: Tensor) -> list[list[float]]:
    """Add up the splits in their order, and round to bf16: [M][G * R]."""
    splits = partials.flatten(2).tolist()
    rows = []
    for row in range(partials.shape[1]):
        line = []
        for column in range(len(splits[0][row])):
            total = splits[0][row][column]
            for split in splits[1:]:
                total = fma32(1.0, total, split[row][column])
            line.append(round_bf16(total))
        rows.append(line)
    return rows


def _filled(values: list[list[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def _unswizzled(scales: Tensor, rows: int, columns: int) -> list[list[int]]:
    """Look codes up where a swizzle of their own numbers puts them."""
    groups = columns // 32
    laid = scales.tolist()
    found = [[0] * groups for _ in range(rows)]
    for row in range(rows):
        for group in range(groups):
            marked = [[0] * groups for _ in range(rows)]
            marked[row][group] = 1
            found[row][group] = laid[mxfp8.swizzle(marked).index(1)]
    return found


def _decoded(data: Tensor, codes: list[list[int]]) -> list[list[Fraction | None]]:
    rows = data.view(torch.uint8).tolist()
    return [
        [mxfp8.decode_element(element, codes[r][c // 32]) for c, element in enumerate(row)]
        for r, row in enumerate(rows)
    ]
