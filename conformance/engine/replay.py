"""Run a case file on an implementation: what `draftproof replay` does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.calls import FILLS, POISONS, Placement, filled
from draftproof.conformance.engine.checks import (
    Target,
    hold_graph,
    hold_once,
    on_bad_input,
    on_law,
    only_written,
    run_target,
)
from draftproof.conformance.engine.compare import hold
from draftproof.conformance.engine.implementations import BadImplementation, resolve
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import Run, Skipped, Subject, invoke, wanted_of
from draftproof.conformance.engine.spec import OpSpec


def replay_file(path: Path, implementation: str | None, device: str) -> int:
    """Run the check that a case file came from on its calls.

    Parameters
    ----------
    path : Path
        A case file, or a golden vector.
    implementation : str, optional
        As for `--impl`. None: "triton", or "oracle" for an op from outside that has none.
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
    spec = specs[content.op]
    if implementation is None:
        implementation = "triton" if spec.function("triton") is not None else "oracle"
    found = resolve(implementation)
    function = found.get(content.op)
    if function is None:
        why = found.lacking.get(content.op)
        raise BadImplementation(
            f"--impl {implementation}: has no {content.op}" + (f": {why}" if why else "")
        )
    subject = Subject(
        peers=found.get,
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
    said = {"skipped": f"{what}: skipped: ", "not_provided": f"{what}: not provided: "}
    print(f"{said.get(outcome.status, '')}{outcome.detail}")
    sys.stdout.flush()
    return 3 if outcome.status == "error" else 1


def replay_target(content: casefile.CaseFile, spec: OpSpec) -> Target:
    """What `draftproof replay` runs for a case file: the check it came from, on its calls."""
    if content.check == "invalid":
        for bad in spec.bad_inputs:
            if bad.name == content.case:
                return Target("invalid", bad.name, on_bad_input(bad))
        raise casefile.BadCaseFile(f"op {spec.name} has no bad input {content.case!r}")

    if content.check == "laws":
        for law in spec.laws:
            for case in law.cases:
                if f"{law.name}.{case.name}" == content.case:
                    return Target("laws", content.case, on_law(law, case, content.calls[0]))
        raise casefile.BadCaseFile(f"op {spec.name} has no law and case {content.case!r}")

    def run(subject: Subject) -> None:
        calls = content.calls
        if content.check == "graph" and subject.device.type == "cuda":
            if subject.graph_reason:
                raise Skipped(subject.graph_reason)
            hold_graph(subject, [*calls, *calls[:1], *calls[:1]])
            return
        placement = Placement(calls[0], subject.device)
        for call in calls:
            # The same memory for all of them, as in the check that found it.
            placement.load(call)
            wanted = wanted_of(subject, call)
            run = Run(placement, invoke(subject, placement.laid(call), call), [])
            hold(subject, call, wanted, run)
        for call in calls:
            for shifted in (False, True):
                for poison in POISONS:
                    hold_once(subject, call, shifted=shifted, poison=poison)
        written = only_written(spec, calls[0])
        for call in calls:
            for byte in FILLS:
                hold_once(subject, filled(call, written, byte), shifted=False, poison=POISONS[0])

    return Target(content.check, content.case, run)
