"""A first spec file for an op of one's own: what `draftproof new` writes."""

from __future__ import annotations

import keyword
from pathlib import Path

from draftproof.conformance.names import Refused, surely_an_op

TEMPLATE = '''\
"""The op `{op}`: its oracle, and how any implementation of it is held against the oracle.

    draftproof verify  --spec {op}.py                        # the oracle against itself
    draftproof verify  --spec {op}.py --impl my_kernel.py    # your kernel: a function {op}
    draftproof mutants --spec {op}.py                        # does the suite catch faults?

Change the rule, then everything that follows from it. As it stands every check passes.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.judges import Bits
from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    Case,
    Effect,
    Mutant,
    OpSpec,
    Params,
    Variant,
)


def {op}(x: Tensor, lens: Tensor, out: Tensor) -> None:
    """The oracle: out[r] is the sum of the first lens[r] entries of row r of x.

    Plain PyTorch, no speed needed, right on any device. x is [rows, width] int64, lens [rows]
    int32, out [rows] int64; out is written, nothing else.
    """
    if x.dim() != 2:
        raise ValueError(f"x: 2 dimensions are due, got shape {{tuple(x.shape)}}")
    for name, tensor in (("lens", lens), ("out", out)):
        if tensor.shape != x.shape[:1]:
            raise ValueError(f"{{name}}: {{x.shape[0]}} entries are due, got {{len(tensor)}}")
    live = torch.arange(x.shape[1], device=x.device) < lens[:, None]
    out.copy_(torch.where(live, x, 0).sum(dim=1))


# An implementation of your own may stand here too: {op}_triton is what `--impl triton` means for
# this op, and {op}_baseline is what `draftproof bench` compares it with.


def build(params: Params, seed: int) -> Args:
    """The arguments of one call, as CPU tensors in the order of the signature."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = params["rows"], params["width"]
    lens = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
    if rows:
        lens[0] = width
    return {{
        "x": torch.randint(1, 9, (rows, width), generator=generator),
        "lens": lens,
        # What stood in an output before must not matter: fill it with something.
        "out": torch.randint(-9, -1, (rows,), generator=generator),
    }}


SPECS = [
    OpSpec(
        name="{op}",
        summary="sum of the live part of each row",
        build=build,
        effects=[
            Effect("out", rule="out[r] is the sum of x[r, :lens[r]]", judge=Bits()),
        ],
        cases=[
            Case("one_row", {{"rows": 1, "width": 5}}),
            Case("several_rows", {{"rows": 7, "width": 33}}),
            Case("no_rows", {{"rows": 0, "width": 5}}, noop=True),
        ],
        strategy=lambda: st.fixed_dictionaries(
            {{"rows": st.integers(0, 4), "width": st.integers(1, 9)}}
        ),
        bad_inputs=[
            BadInput("x_one_dimension", lambda args: {{**args, "x": args["x"][0]}}, names="x"),
            BadInput("out_too_short", lambda args: {{**args, "out": args["out"][1:]}}, names="out"),
        ],
        bad_input_params={{"rows": 3, "width": 5}},
        strides={{"x": "any"}},
    )
]


def sums_the_dead_part_too(x: Tensor, lens: Tensor, out: Tensor) -> None:
    """A wrong implementation, which the suite must catch."""
    out.copy_(x.sum(dim=1))


def sums_backwards(x: Tensor, lens: Tensor, out: Tensor) -> None:
    """A right implementation, written differently, which must pass."""
    {op}(x, lens, out)
    live = torch.arange(x.shape[1] - 1, -1, -1, device=x.device) < lens[:, None]
    out.copy_(torch.where(live, x.flip(1), 0).sum(dim=1))


MUTANTS = [
    Mutant(
        "sums_the_dead_part_too",
        "{op}",
        fault="entries behind lens[r] are summed too",
        killed_by=("eager", "fuzz"),
        function=sums_the_dead_part_too,
    )
]
VARIANTS = [
    Variant("sums_backwards", "{op}", difference="last entry first", function=sums_backwards)
]
'''


def write(name: str, folder: Path) -> Path:
    """Write `<name>.py`, a spec file that passes as it stands.

    Parameters
    ----------
    name : str
        The op: a Python identifier, not the name of an op of ours.
    folder : Path
        Where to write it.

    Raises
    ------
    Refused
        If the name cannot be an op's, or the file exists or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Refused(f"new {name}: an op is named by a Python identifier")
    if surely_an_op(name):
        raise Refused(f"new {name}: an op of draftproof has this name")
    path = folder / f"{name}.py"
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.format(op=name))
    except FileExistsError:
        raise Refused(f"new {name}: {path} exists") from None
    except OSError as error:
        raise Refused(f"new {name}: {path}: cannot be written ({error.strerror})") from error
    return path
