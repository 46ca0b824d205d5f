"""Compile every kernel for GPUs that are not here, and fail where the machine code spills.

`python -P -m draftproof.conformance.gate --op NAME` prints what each kernel needs on each target.
The work is done in a child process in which Triton compiles, whatever mode it is in here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftproof.conformance.engine.implementations import is_outside

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950")
"""Architectures that every kernel must compile for."""

SHARED_BYTES = {
    "cuda:80": 166_912,
    "cuda:90": 232_448,
    "cuda:100": 232_448,
    "cuda:120": 101_376,
    "hip:gfx942": 65_536,
    "hip:gfx950": 163_840,
}
"""Most shared memory of a program, in bytes."""

VARIANTS = 3
"""Launches of a kernel that are compiled, of all that differ in constants, dtypes or alignment."""

OWN = ("triton", "baseline")
"""The project's implementations that hold kernels."""

HOPPER = 90
"""The compute capability from which launchers overlap launches."""

TIMEOUT_SECONDS = 900
"""Limit of the child process."""


@dataclass
class Compiled:
    """One kernel compiled for one target.

    Parameters
    ----------
    op, implementation, case : str
        The launch it was first met in.
    aligned : bool
        Whether that call's tensors stood at multiples of 16 bytes.
    kernel : str
    constants : str
        The compile-time constants, as `name=value`.
    target : str
        "cuda:90" or "hip:gfx942".
    warps : int
    registers : int
        Per thread; vector registers on AMD.
    stack : int
        Bytes of local memory per thread.
    spills : int
        Instructions that touch local memory on NVIDIA, spilled registers on AMD.
    shared : int
        Bytes of shared memory.
    unstated : list of str
        Launch options that the launch should have stated.
    error : str
        Why it could not be compiled, or "".
    """

    op: str
    implementation: str
    case: str
    aligned: bool
    kernel: str = ""
    constants: str = ""
    target: str = ""
    warps: int = 0
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    unstated: list[str] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Report:
    """What one run of the gate found.

    Parameters
    ----------
    triton : str
        Version.
    kernels : list of Compiled
    uncompiled : list of str
        Kernels of the project that no case launches.
    """

    triton: str
    kernels: list[Compiled]
    uncompiled: list[str]


def compile_kernels(
    ops: Sequence[str],
    implementations: Sequence[str] = OWN,
    *,
    targets: Sequence[str] = TARGETS,
    variants: int = VARIANTS,
) -> Report:
    """Compile what implementations of ops launch, without a GPU.

    Parameters
    ----------
    ops : sequence of str
        Names of ops; their quick cases are run.
    implementations : sequence of str
        As for `--impl`: "triton", "baseline", a path to a `.py` file, or `module[:attr]`.
    targets : sequence of str
        `cuda:` and a compute capability times ten, or `hip:` and an architecture.
    variants : int
        Most launches of one kernel that are compiled, the largest first.

    Returns
    -------
    Report

    Raises
    ------
    ValueError
        If a target is of another kind.
    RuntimeError
        If the child process fails, with the end of what it said.
    """
    for target in targets:
        if not re.fullmatch(r"cuda:\d+|hip:gfx\w+", target):
            raise ValueError(f"targets holds {target!r}, which is not like cuda:90 or hip:gfx942")
    # Launchers may ask the device what it can do: Hopper and later are shown to them as such.
    late = [t for t in targets if t.startswith("cuda:") and int(t.partition(":")[2]) >= HOPPER]
    groups = [([8, 0], [t for t in targets if t not in late]), ([9, 0], late)]
    answers = [
        _ask_child(
            {
                "ops": list(ops),
                "implementations": list(implementations),
                "targets": group,
                "capability": capability,
                "variants": variants,
                "own": not any(map(is_outside, implementations)),
            }
        )
        for capability, group in groups
        if group
    ]
    kernels = [Compiled(**kernel) for answer in answers for kernel in answer["kernels"]]
    uncompiled = [
        name
        for name in answers[0]["uncompiled"]
        if all(name in answer["uncompiled"] for answer in answers)
    ]
    return Report(answers[0]["triton"], kernels, uncompiled)


def _ask_child(request: dict[str, Any]) -> dict[str, Any]:
    """Compile in a process without the interpreter; what it found."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gate.json")
        file.write_text(json.dumps(request))
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if child.returncode:
            raise RuntimeError(
                f"the compiling process ended with {child.returncode}:\n{child.stderr[-4000:]}"
            )
        return json.loads(file.read_text())


_CHILD = """
import sys
if sys.path and sys.path[0] in ("", "."):
    del sys.path[0]
from draftproof.conformance.gate.compile_child import main
main(sys.argv[1])
"""


def faults(report: Report) -> list[str]:
    """Say what is wrong with what was compiled, one line each.

    A fault is a launcher that raised, a kernel that does not compile, uses local memory, spills
    registers or needs more shared memory than the target has; and, of the project's own kernels,
    one that no case launches or whose launch leaves an option to Triton's default.
    """
    found = [f"{name}: no case launches it" for name in report.uncompiled]
    if not report.kernels:
        found.append("nothing was launched, so nothing was compiled")
    for kernel in report.kernels:
        where = f"{kernel.op} ({kernel.implementation}), case {kernel.case}"
        if not kernel.aligned:
            where += " off alignment"
        if kernel.kernel:
            where += f": {kernel.kernel}[{kernel.constants}] for {kernel.target}"
        if kernel.error:
            found.append(f"{where}: {kernel.error}")
        if kernel.stack or kernel.spills:
            found.append(
                f"{where}: spills: {kernel.stack} bytes of local memory a thread, "
                f"{kernel.spills} {'accesses' if kernel.target[:4] == 'cuda' else 'registers'}"
            )
        if kernel.shared > SHARED_BYTES.get(kernel.target, kernel.shared):
            found.append(
                f"{where}: needs {kernel.shared} bytes of shared memory, "
                f"the target has {SHARED_BYTES[kernel.target]}"
            )
        if not is_outside(kernel.implementation):
            found += [f"{where}: the launch does not state {name}" for name in kernel.unstated]
    return found


def _print(report: Report) -> None:
    """Print a numbered list of what was compiled, and a table of what it needs on each target."""
    console = Console(highlight=False)
    targets = list(dict.fromkeys(kernel.target for kernel in report.kernels))
    table = Table(title="registers/stack bytes/spills/shared bytes")
    table.add_column("", justify="right")
    for target in targets:
        table.add_column(target, justify="right", overflow="fold")
    rows: dict[str, dict[str, str]] = {}
    for kernel in report.kernels:
        name = f"{kernel.kernel}[{kernel.constants}], num_warps={kernel.warps}"
        name += "" if kernel.aligned else ", off alignment"
        needs = (kernel.registers, kernel.stack, kernel.spills, kernel.shared)
        cell = "fails" if kernel.error else "/".join(map(str, needs))
        rows.setdefault(name, {})[kernel.target] = cell
    print(f"compiled by Triton {report.triton}:")
    for number, (name, cells) in enumerate(rows.items(), 1):
        print(f"{number:3} {name}")
        table.add_row(str(number), *(cells.get(target, "") for target in targets))
    console.print(table)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    op: Annotated[list[str], typer.Option(help="an op whose kernels are compiled")] = [],  # noqa: B006
    impl: Annotated[list[str], typer.Option(help="implementation; default: the project's")] = [],  # noqa: B006
    target: Annotated[list[str], typer.Option(help="such as cuda:90")] = list(TARGETS),  # noqa: B006
    variants: Annotated[int, typer.Option(help="most launches of a kernel")] = VARIANTS,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results")] = None,
) -> None:
    """Compile kernels for GPUs that are not here, and print what they need."""
    from draftproof.conformance.engine.registry import load_specs

    known = list(load_specs())
    for name in op:
        if name not in known:
            raise typer.BadParameter(f"--op {name}: no such op (known: {', '.join(known)})")
    try:
        report = compile_kernels(op or known, impl or OWN, targets=target, variants=variants)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    _print(report)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=1))
    wrong = faults(report)
    for line in wrong:
        print(line)
    raise typer.Exit(bool(wrong))
