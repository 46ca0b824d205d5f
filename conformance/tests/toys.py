"""A small op with every kind of leaf, a correct implementation, and one for every fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.spec import Args, BadInput, Case, Effect, OpSpec, Params


def double_live(x: Tensor, lens: Tensor, out: Tensor, counter: Tensor, *, scale: float) -> Tensor:
    """out[r, c] = scale * x[r, c] for c < lens[r]; counter += 1; returns the row sums of lens."""
    if x.dim() != 2:
        raise ValueError(f"x: 2 dimensions are due, got {x.dim()}")
    if out.shape != x.shape:
        raise ValueError(f"out: shape {tuple(x.shape)} is due, got {tuple(out.shape)}")
    live = torch.arange(x.shape[1], device=x.device) < lens[:, None]
    out.copy_(torch.where(live, x * scale, out))
    counter += 1
    return lens.clone()


@dataclass(frozen=True)
class ToySpec(OpSpec):
    """An op whose oracle stands in the tests."""

    @property
    def oracle(self) -> Callable[..., Any]:  # type: ignore[override]
        return double_live


def build(params: Params, seed: int) -> Args:
    generator = torch.Generator().manual_seed(seed)
    rows, width = params["rows"], params["width"]
    x = torch.randn(rows, width, generator=generator)
    if params.get("zero"):
        x[:, 0] = 0.0
    if params.get("nan"):
        x[0, 0] = float("nan")
    lens = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
    if rows:
        lens[0] = width
    room = torch.randn(rows, width + params.get("gap", 0), generator=generator)
    return {
        "x": x,
        "lens": lens,
        "out": room[:, :width],
        "counter": torch.randint(0, 9, (rows,), generator=generator),
        "scale": 2.0,
    }


SPEC = ToySpec(
    name="double_live",
    family="double_live",
    summary="a toy",
    build=build,
    effects=[
        Effect("out", rule="out[r, c] = scale * x[r, c] for c < lens[r]"),
        Effect("counter", rule="counter += 1", reads=True),
        Effect("return", rule="the lengths are returned"),
    ],
    cases=[
        Case("three_rows", {"rows": 3, "width": 5}),
        Case("zeros", {"rows": 2, "width": 4, "zero": True}),
        Case("a_nan", {"rows": 2, "width": 4, "nan": True}),
        Case("rows_apart", {"rows": 3, "width": 4, "gap": 2}),
    ],
    strategy=lambda: st.fixed_dictionaries(
        {"rows": st.integers(1, 4), "width": st.integers(1, 9), "zero": st.booleans()}
    ),
    bad_inputs=[
        BadInput("x_one_dimension", lambda args: {**args, "x": args["x"][0]}, names="x"),
        BadInput("out_narrower", lambda args: {**args, "out": args["out"][:, 1:]}, names="out"),
    ],
    bad_input_params={"rows": 3, "width": 5},
    strides={"x": "any", "out": "rows", "lens": "any", "counter": "any"},
)
