"""The checks of one implementation, and everything that a profile runs of them."""

from __future__ import annotations

import dataclasses
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine import casefile, memory
from draftproof.conformance.engine.calls import (
    FILLS,
    POISONS,
    Placement,
    Poison,
    byte_fill,
    clone,
    filled,
    geometry,
    leaves,
    restride,
    scalars,
)
from draftproof.conformance.engine.compare import effect_of, hold, hold_alike, path_matches
from draftproof.conformance.engine.judges import same_bits
from draftproof.conformance.engine.laws import hold_law
from draftproof.conformance.engine.running import (
    NotProvided,
    Run,
    Skipped,
    Subject,
    SuiteFault,
    Violation,
    Wanted,
    case_seed,
    changes_something,
    execute,
    framed,
    invoke,
    raised,
    synchronize,
    wanted_of,
)
from draftproof.conformance.engine.spec import (
    CASE_CHECKS,
    PROFILES,
    BadInput,
    Case,
    Law,
    OpSpec,
    Params,
    Strides,
)

REPEATS = {"quick": (2, 2), "full": (5, 3), "soak": (20, 3)}
"""Calls on the same inputs, and on changed ones, in the check *repeat*."""

FUZZ_EXAMPLES = {"quick": 25, "full": 100, "soak": 3000}
"""Hypothesis examples per op."""

SHRINK_SECONDS = {"quick": 5.0, "full": 20.0, "soak": 60.0}
"""How long a failing fuzz call is made smaller."""

PADS = ((3, 2), (16, 0))
"""Elements added to each row where the op allows strides, and how many more from tensor to tensor:
odd ones, which break 16-byte alignment of the next row and let no tensor pass with the strides of
its neighbour, and one that keeps it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check.

    Parameters
    ----------
    status : str
        "passed", "failed", "error" (the suite's own fault), "skipped" or "not_provided".
    detail : str
        Report or reason; empty when passed.
    seconds : float
    case_file : Path, optional
        The failing call on disk.
    places : tuple of dict
        Where the wrong elements lie, by leaf (`engine.places`).
    """

    status: str
    detail: str = ""
    seconds: float = 0.0
    case_file: Path | None = None
    places: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Target:
    """One thing to run: a check of a subject on a case, a bad input, or the fuzzer."""

    check: str
    name: str
    run: Callable[[Subject], None]


def _call(subject: Subject, params: Params, name: str) -> dict[str, Any]:
    return subject.spec.build(params, case_seed(subject.seed, name))


def _checked_oracle(subject: Subject, case: Case, call: Mapping[str, Any]) -> Wanted:
    wanted = wanted_of(subject, call)
    changed = changes_something(wanted)
    if changed == case.noop:
        raise SuiteFault(
            "the oracle changes something in a case marked noop"
            if changed
            else "the oracle changes nothing: the case proves nothing"
        )
    return wanted


def check_eager(subject: Subject, case: Case) -> None:
    """The outputs meet their contracts, and nothing else changes."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    hold(subject, call, wanted, execute(subject, call))


def check_guards(subject: Subject, case: Case) -> None:
    """Nothing before, behind or between rows changes, and nothing outside is read."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    outcomes = []
    for poison in POISONS:
        run = execute(subject, call, poison)
        strays = run.placement.strays() + run.faults
        if strays:
            raise Violation("\n".join(strays), [call])
        hold(subject, call, wanted, run, f"red zones hold {poison.name}")
        outcomes.append(_copies({**run.placement.views, **run.returned(wanted)}))
    hold_alike(
        subject,
        call,
        wanted,
        outcomes[0],
        outcomes[1],
        "the result depends on memory outside the tensors",
    )


def check_poison(subject: Subject, case: Case) -> None:
    """What is written and never read may hold anything before: the result is the same."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    written = only_written(subject.spec, call)
    if not written and not wanted.returned:
        raise Skipped("everything that the op writes is also read")
    outcomes = []
    for byte in FILLS:
        poisoned = filled(call, written, byte)
        due = wanted_of(subject, poisoned)
        run = execute(subject, poisoned, heap_byte=byte, heap_like=wanted.returned)
        hold(subject, poisoned, due, run, f"outputs held 0x{byte:02x} bytes before the call")
        outcomes.append(_copies(run.returned(wanted)))
    hold_alike(
        subject,
        call,
        wanted,
        outcomes[0],
        outcomes[1],
        "the result depends on what memory held before the call",
    )


def only_written(spec: OpSpec, call: Mapping[str, Any]) -> set[str]:
    """Tensors whose old content the op never reads, and which share memory with no other kind."""
    written = {
        path
        for path in leaves(call)
        if (effect := effect_of(spec, path)) is not None and not effect.reads
    }
    for storage in geometry(call):
        members = {leaf.path for leaf in storage.leaves}
        if not members <= written:
            written -= members
    return written


def check_strided(subject: Subject, case: Case) -> None:
    """Bases at any element, and every stride that the op allows."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    layouts = [("bases shifted by one element", call, True)]
    for pad, growth in PADS:
        spread = restride(call, _allowed_strides(subject.spec, call), pad, growth)
        if geometry(spread) != geometry(call):
            label = f"rows spread by {pad} elements{' and more' if growth else ''}"
            layouts.append((label, spread, False))
            layouts.append((f"{label}, bases shifted", spread, True))
    for label, laid, shifted in layouts:
        run = execute(subject, laid, POISONS[1], shifted=shifted)
        strays = run.placement.strays() + run.faults
        if strays:
            raise Violation("\n".join([f"({label})", *strays]), [laid])
        hold(subject, laid, wanted, run, label)


def _allowed_strides(spec: OpSpec, call: Mapping[str, Any]) -> dict[str, Strides]:
    allowed: dict[str, Strides] = {}
    for path in leaves(call):
        kinds = [kind for pattern, kind in spec.strides.items() if path_matches(path, pattern)]
        if kinds:
            allowed[path] = kinds[0]
    return allowed


def replays_of(subject: Subject, case: Case, call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls of the same geometry with other content."""
    spec = subject.spec
    several = spec.replays(case.params) if spec.replays else [case.params] * 3
    if len(several) < 3:
        raise SuiteFault(f"{len(several)} replays: at least 3 are due")
    calls = []
    for index, params in enumerate(several):
        other = _call(subject, params, f"{case.name}:replay{index}")
        if geometry(other) != geometry(call) or scalars(other) != scalars(call):
            raise SuiteFault(f"replay {index} is not a call of the same geometry and scalars")
        calls.append(other)
    return calls


def check_graph(subject: Subject, case: Case) -> None:
    """Captured once in a CUDA graph; every replay sees what the memory holds then."""
    if subject.device.type != "cuda":
        raise Skipped("CUDA graphs need a CUDA device")
    if subject.graph_reason:
        raise Skipped(subject.graph_reason)
    call = _call(subject, case.params, case.name)
    _checked_oracle(subject, case, call)
    calls = replays_of(subject, case, call)
    hold_graph(subject, [call, *calls])


def hold_graph(subject: Subject, calls: Sequence[Mapping[str, Any]]) -> None:
    device = subject.device
    placement = Placement(calls[0], device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            placement.load(calls[0])
            invoke(subject, placement.args, calls[0])
    torch.cuda.current_stream(device).wait_stream(side)
    placement.load(calls[0])
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            returned = framed(subject, placement.args, calls[0])
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"capture failed: {raised(error)}", [calls[0]]) from error
    order = [*calls[1:], calls[0]]
    proved = False
    for number, call in enumerate(order):
        wanted = wanted_of(subject, call)
        placement.load(call)
        run = Run(placement, returned, [])
        for tensor in run.returned(wanted).values():
            byte_fill(tensor, FILLS[1])
        synchronize(device)
        try:
            graph.replay()
            synchronize(device)
        except Exception as error:
            raise Violation(f"replay {number} failed: {raised(error)}", list(calls)) from error
        # The memory was reset before this replay: only captured work can have written this.
        proved |= changes_something(wanted)
        try:
            hold(subject, call, wanted, run, f"replay {number} of {len(order)}")
            if strays := placement.strays():
                raise Violation("\n".join([f"(replay {number})", *strays]))
        except Violation as violation:
            raise Violation(str(violation), calls, violation.places) from None
    if not proved:
        raise Skipped("no replay changes anything: nothing would prove that work was captured")


def check_repeat(subject: Subject, case: Case) -> None:
    """The same inputs give the same bits, changed inputs in the same memory the new result."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    placement = Placement(call, subject.device)
    first: dict[str, Tensor] | None = None
    kept: dict[str, Tensor] = {}
    same, changed = REPEATS[subject.profile]
    for number in range(same):
        placement.load(call)
        run = Run(placement, invoke(subject, placement.args, call), [])
        hold(subject, call, wanted, run, f"call {number + 1} on the same inputs")
        returned = run.returned(wanted)
        got = _copies({**placement.views, **returned})
        if first is None:
            first, kept = got, {path: returned[path] for path in wanted.returned}
        hold_alike(subject, call, wanted, first, got, f"calls 1 and {number + 1} differ")
    # At once after calls that hold the same content: what one of those left behind would win now.
    if subject.spec.rescale:
        other = subject.spec.rescale(call)
        placement.load(other)
        run = Run(placement, invoke(subject, placement.laid(other), call, other), [])
        due = wanted_of(subject, other)
        _repeat_hold(subject, [call, other], due, run, "other numbers, same memory")
    others = replays_of(subject, case, call)[:changed]
    for number, other in enumerate(others):
        placement.load(other)
        run = Run(placement, invoke(subject, placement.args, call), [])
        due = wanted_of(subject, other)
        _repeat_hold(subject, [call, other], due, run, f"changed inputs {number}, same memory")
    _hold_earlier(placement, kept, first or {}, [call, *others])
    if subject.device.type == "cuda":
        placement.load(call)
        stream = torch.cuda.Stream(subject.device)
        stream.wait_stream(torch.cuda.current_stream(subject.device))
        with torch.cuda.stream(stream):
            run = Run(placement, invoke(subject, placement.args, call), [])
        torch.cuda.current_stream(subject.device).wait_stream(stream)
        hold(subject, call, wanted, run, "on another stream")


def _repeat_hold(
    subject: Subject, calls: list[dict[str, Any]], wanted: Wanted, run: Run, label: str
) -> None:
    try:
        hold(subject, calls[-1], wanted, run, label)
    except Violation as violation:
        raise Violation(str(violation), calls, violation.places) from None


def _hold_earlier(
    placement: Placement,
    kept: Mapping[str, Tensor],
    was: Mapping[str, Tensor],
    calls: list[dict[str, Any]],
) -> None:
    """What a call returned is its caller's: later calls must not write there.

    A result that is a view of an argument shares that argument's fate.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in placement.views.values()}
    for path, tensor in kept.items():
        if tensor.untyped_storage().data_ptr() in given:
            continue
        if not same_bits(was[path], tensor):
            raise Violation(f"{path}: a later call wrote into what an earlier one returned", calls)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {path: tensor.clone() for path, tensor in tensors.items()}


def check_invalid(subject: Subject, bad: BadInput) -> None:
    """A bad input raises the named error before anything is written."""
    params = subject.spec.bad_input_params if bad.params is None else bad.params
    call = _call(subject, params, bad.name)
    placement = Placement(call, subject.device)
    args = bad.edit(dict(placement.args))
    watched = {
        path: (tensor, tensor.clone())
        for path, tensor in {**leaves(placement.args), **leaves(args)}.items()
        if not tensor.is_meta
    }
    try:
        subject.function(**args)
        synchronize(subject.device)
    except bad.error as error:
        message = str(error)
    except Exception as error:
        raise Violation(
            f"raised {type(error).__name__} ({error}) instead of {bad.error.__name__}", [call]
        ) from error
    else:
        raise Violation(f"accepted, where {bad.error.__name__} is due", [call])
    for path, (tensor, was) in watched.items():
        if not same_bits(was, tensor):
            raise Violation(f"raised {bad.error.__name__}, but after writing {path}", [call])
    if strays := placement.strays():
        raise Violation("\n".join(["raised, but after writing", *strays]), [call])
    if subject.named_errors and bad.names not in message:
        raise Violation(f"the error does not name {bad.names!r}: {message}", [call])


def check_fuzz(subject: Subject) -> None:
    """Hypothesis looks for a call that breaks the contract, and makes it small."""
    import hypothesis
    from hypothesis import strategies as st

    deadline: float | None = None
    failures: dict[str, Violation] = {}
    last: Violation | None = None
    compared = 0

    @hypothesis.seed(subject.seed)
    @hypothesis.settings(
        max_examples=FUZZ_EXAMPLES[subject.profile],
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(params=subject.spec.strategy(), seed=st.integers(0, 0xFFFF))
    def run(params: Params, seed: int) -> None:
        nonlocal deadline, last, compared
        key = repr((params, seed))
        if known := failures.get(key):
            last = known
            raise known
        if deadline is not None and time.monotonic() > deadline:
            return
        subject.note(f"fuzz call: params={params!r} seed={seed}")
        call = subject.spec.build(params, seed)
        try:
            hold_once(subject, call, shifted=bool(seed & 1), poison=POISONS[seed >> 1 & 1])
            compared += 1
        except Violation as violation:
            if deadline is None:
                deadline = time.monotonic() + SHRINK_SECONDS[subject.profile]
            body = f"{violation}\n  params: {params!r}, data seed {seed}"
            failures[key] = last = Violation(body, violation.calls or [call], violation.places)
            raise last from None

    try:
        run()
    except Violation as violation:
        raise (last or violation) from None
    if not compared:
        raise SuiteFault("the strategy gave no call to compare")


def hold_once(subject: Subject, call: Mapping[str, Any], *, shifted: bool, poison: Poison) -> None:
    wanted = wanted_of(subject, call)
    run = execute(subject, call, poison, shifted=shifted)
    if strays := run.placement.strays() + run.faults:
        raise Violation("\n".join(strays), [call])
    hold(subject, call, wanted, run)


_BY_CASE: Mapping[str, Callable[[Subject, Case], None]] = {
    "eager": check_eager,
    "guards": check_guards,
    "poison": check_poison,
    "strided": check_strided,
    "graph": check_graph,
    "repeat": check_repeat,
}


def targets(spec: OpSpec, profile: str, *, cuda: bool) -> list[Target]:
    """Everything that is run for an op in a profile, in order.

    Parameters
    ----------
    spec : OpSpec
    profile : str
        "quick", "full" or "soak".
    cuda : bool
        Whether the device is CUDA; where it is not, *graph* is one skipped target, not one a case.
    """
    cases = [case for case in spec.cases if PROFILES.index(case.profile) <= PROFILES.index(profile)]
    # The fuzzer first: it is the longest, and must not be what a spread run waits for at its end.
    found = [Target("fuzz", "hypothesis", check_fuzz)]
    for check in CASE_CHECKS:
        if check == "graph" and not cuda:
            found.append(Target("graph", "every_case", _no_graphs))
            continue
        for case in cases:
            beyond = PROFILES.index(profile) > PROFILES.index(case.profile)
            if case.checks is None or check in case.checks or beyond:
                found.append(Target(check, case.name, _on_case(check, case)))
    found += [
        Target("laws", f"{law.name}.{case.name}", on_law(law, case))
        for law in spec.laws
        for case in law.cases
        if PROFILES.index(case.profile) <= PROFILES.index(profile)
    ]
    found += [Target("invalid", bad.name, on_bad_input(bad)) for bad in spec.bad_inputs]
    return found


def _no_graphs(subject: Subject) -> None:
    raise Skipped("CUDA graphs need a CUDA device")


def _on_case(check: str, case: Case) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        if case.device == "cuda" and subject.device.type != "cuda":
            raise Skipped("this case needs a CUDA device")
        _BY_CASE[check](subject, case)

    return run


def on_law(
    law: Law, case: Case, call: Mapping[str, Any] | None = None
) -> Callable[[Subject], None]:
    """What holds a law on a case; on `call` in place of the case's own, for a replay."""

    def run(subject: Subject) -> None:
        if case.device == "cuda" and subject.device.type != "cuda":
            raise Skipped("this case needs a CUDA device")
        own = _call(subject, case.params, f"{law.name}.{case.name}") if call is None else call
        hold_law(subject, law, own)

    return run


def on_bad_input(bad: BadInput) -> Callable[[Subject], None]:
    return lambda subject: check_invalid(subject, bad)


def run_target(subject: Subject, target: Target) -> Outcome:
    """Run one target and say what became of it; never raises for a fault of the subject."""
    subject.note("")
    started = time.perf_counter()
    try:
        target.run(subject)
    except Violation as violation:
        outcome = _failed(subject, target, violation)
    except Skipped as skipped:
        outcome = Outcome("skipped", str(skipped))
    except NotProvided as lacking:
        outcome = Outcome("not_provided", str(lacking))
    except SuiteFault as fault:
        outcome = Outcome("error", f"{_title(subject, target)}\n{fault}")
    except Exception as error:
        # Rows that lie far apart span more memory than they touch: some machines refuse that.
        if reason := memory.lack(error):
            outcome = Outcome("skipped", reason)
        else:
            outcome = Outcome("error", f"{_title(subject, target)}\n{traceback.format_exc()}")
    else:
        outcome = Outcome("passed")
    return dataclasses.replace(outcome, seconds=time.perf_counter() - started)


def _title(subject: Subject, target: Target) -> str:
    return (
        f"{subject.spec.name} / {target.check} / {target.name}, "
        f"implementation {subject.implementation}"
    )


def _failed(subject: Subject, target: Target, violation: Violation) -> Outcome:
    lines = [_title(subject, target), str(violation)]
    path = None
    if subject.failures is not None and violation.calls:
        size = sum(casefile.call_bytes(call) for call in violation.calls)
        if size <= casefile.MAX_BYTES:
            path = _save(subject, target, violation)
            lines.append(f"  replay: draftproof replay {path} --impl {subject.implementation}")
        else:
            lines.append(
                f"  no case file: the call holds {size >> 20} MiB; run again with: draftproof "
                f"verify --op {subject.spec.name} --impl {subject.implementation} "
                f"--profile {subject.profile} --seed {subject.seed}"
            )
    return Outcome("failed", "\n".join(lines), case_file=path, places=violation.places)


def _save(subject: Subject, target: Target, violation: Violation) -> Path:
    assert subject.failures is not None
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{subject.spec.name}-{target.check}-{target.name}")
    about = {"implementation": subject.implementation, "seed": subject.seed}
    return casefile.write(
        subject.failures / f"{stem}.json",
        casefile.CaseFile(
            op=subject.spec.name,
            check=target.check,
            case=target.name,
            calls=[clone(call, torch.device("cpu")) for call in violation.calls],
            about=about,
        ),
    )
