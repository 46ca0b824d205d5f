"""Run a case file on an implementation: what `draftproof replay` does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftproof.conformance import casefile
from draftproof.conformance.checks import Subject, replay_target, run_target
from draftproof.conformance.implementations import BadImplementation, resolve
from draftproof.conformance.spec import load_specs


def replay_file(path: Path, implementation: str, device: str) -> int:
    """Run the check that a case file came from on its calls.

    Parameters
    ----------
    path : Path
        A case file, or a golden vector.
    implementation : str
        As for `--impl`.
    device : str
        "cpu" or "cuda".

    Returns
    -------
    int
        0 if the implementation keeps the contract, 1 if it breaks it or nothing could be compared,
        3 on a fault of the suite.

    Raises
    ------
    BadCaseFile, BadImplementation
        One line each.
    """
    content = casefile.read(path)
    specs = load_specs()
    if content.op not in specs:
        raise casefile.BadCaseFile(f"{path}: no op {content.op!r} (known: {', '.join(specs)})")
    found = resolve(implementation)
    function = found.get(content.op)
    if function is None:
        raise BadImplementation(f"--impl {implementation}: has no {content.op}")
    spec = specs[content.op]
    subject = Subject(
        spec=spec,
        function=function,
        implementation=implementation,
        device=torch.device(device),
        graph_reason=found.graph_reason(content.op),
        named_errors=not found.outside,
    )
    outcome = run_target(subject, replay_target(content, spec))
    what = f"{content.op} / {content.check} / {content.case}, implementation {implementation}"
    if outcome.status == "passed":
        print(f"{what} on {device}: passed")
        return 0
    print(outcome.detail if outcome.status != "skipped" else f"{what}: skipped: {outcome.detail}")
    sys.stdout.flush()
    return 3 if outcome.status == "error" else 1
