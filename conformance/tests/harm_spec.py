"""An op whose cases name a harm: what an implementation does to its process (harm_kernel.py)."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.spec import Args, BadInput, Case, Effect, OpSpec, Params

TIMEOUTS = ("hangs", "swallows", "blocks")
CRASHES = ("writes", "exits", "execs")
RAISES = ("skips", "xfails", "ends", "interrupts", "base", "mute", "deep")
HARMLESS = ("handlers", "streams", "defaults", "modes", "process", "faulthandler", "forks")
"""These harm what comes after them in the process, and give the right result themselves."""


def doubled(x: Tensor, out: Tensor, *, harm: str) -> None:
    """out = 2 * x."""
    if x.shape != out.shape:
        raise ValueError(f"out: shape {tuple(x.shape)} is due, got {tuple(out.shape)}")
    out.copy_(2 * x)


def build(params: Params, seed: int) -> Args:
    """x is [4] float32, with bits that depend on the seed; out is like it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, generator=generator)
    return {"x": x, "out": torch.zeros(4), "harm": params["harm"]}


SPECS = [
    OpSpec(
        name="doubled",
        summary="twice a vector",
        build=build,
        effects=[Effect("out", rule="out[i] is 2 * x[i]")],
        cases=[
            *(
                Case(harm, {"harm": harm}, checks=("eager",))
                for harm in ("fine", "hangs", *RAISES, *HARMLESS, *CRASHES)
            ),
            Case("fine_after_all", {"harm": "fine"}, checks=("eager",)),
            # In other checks what happened in the first does not count.
            *(Case(harm, {"harm": harm}, checks=("guards",)) for harm in TIMEOUTS[1:]),
            *(
                Case(f"sleeps_{number}", {"harm": "sleeps"}, checks=("poison",))
                for number in range(4)
            ),
        ],
        strategy=lambda: st.fixed_dictionaries({"harm": st.just("fine")}),
        bad_inputs=[
            BadInput("too_short", lambda args: {**args, "out": args["out"][1:]}, names="out")
        ],
        bad_input_params={"harm": "fine"},
    )
]
