"""The eight checks: what is run, and what is held against the oracle, for one implementation."""

from __future__ import annotations

import dataclasses
import re
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.conformance import casefile, casts, interpreter, memcheck
from draftproof.conformance.calls import (
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
    walk,
)
from draftproof.conformance.judges import Anything, Bits, Judge, Look, differing, same_bits, show
from draftproof.conformance.spec import (
    CASE_CHECKS,
    PROFILES,
    BadInput,
    Case,
    Effect,
    OpSpec,
    Params,
)

SHOWN_ELEMENTS = 4
"""Wrong elements of one tensor that a report shows."""

SHOWN_TENSORS = 3
"""Tensors with wrong elements that a report shows."""

ON_DEVICE_BYTES = 1 << 24
"""Calls larger than this are compared on their own device, with the oracle run there."""

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

NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How torch says so; it has no type of its own for it."""


class Violation(Exception):
    """The implementation broke its contract; the message is the report's body."""

    def __init__(self, message: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.calls = list(calls)


class Skipped(Exception):
    """The check could not run; the message is the reason."""


class SuiteFault(Exception):
    """The suite itself is wrong: a vacuous case, an oracle that writes its inputs."""


@dataclass(frozen=True)
class Subject:
    """One op of one implementation, and how it is to be checked.

    Parameters
    ----------
    spec : OpSpec
    function : callable
        Called as `function(**args)`.
    implementation : str
        Name for reports and replay commands.
    device : torch.device
    profile : str
    seed : int
    failures : Path, optional
        Folder in which failing calls are written as case files; None: they are not.
    graph_reason : str, optional
        Why the function cannot be captured.
    named_errors : bool
        Whether a bad input's error must name the argument.
    note : callable
        `note(text)`: told what is about to run, so that a crash can be traced.
    """

    spec: OpSpec
    function: Callable[..., Any]
    implementation: str
    device: torch.device
    profile: str = "quick"
    seed: int = 0
    failures: Path | None = None
    graph_reason: str | None = None
    named_errors: bool = False
    note: Callable[[str], None] = field(default=lambda text: None)


@dataclass(frozen=True)
class Outcome:
    """What became of one check.

    Parameters
    ----------
    status : str
        "passed", "failed", "error" (the suite's own fault) or "skipped".
    detail : str
        Report or reason; empty when passed.
    seconds : float
    case_file : Path, optional
        The failing call on disk.
    """

    status: str
    detail: str = ""
    seconds: float = 0.0
    case_file: Path | None = None


@dataclass(frozen=True)
class Target:
    """One thing to run: a check of a subject on a case, a bad input, or the fuzzer."""

    check: str
    name: str
    run: Callable[[Subject], None]


# ---------------------------------------------------------------- calls and their outcome


def case_seed(seed: int, name: str) -> int:
    """A seed for one case that depends on the run's seed and the case's name alone."""
    return zlib.crc32(f"{seed}:{name}".encode())


@dataclass(frozen=True)
class _Wanted:
    """What the oracle makes of a call."""

    before: dict[str, Any]
    after: dict[str, Tensor]
    tree: Any
    """What it returned."""

    @property
    def returned(self) -> dict[str, Tensor]:
        return leaves(self.tree, "return")


def _oracle_device(subject: Subject, call: Mapping[str, Any]) -> torch.device:
    large = sum(storage.size for storage in geometry(call)) > ON_DEVICE_BYTES
    return subject.device if large else torch.device("cpu")


def _wanted(subject: Subject, call: Mapping[str, Any]) -> _Wanted:
    """Run the oracle on a copy of the call."""
    device = _oracle_device(subject, call)
    args = clone(call, device)
    returned = subject.spec.oracle(**args)
    return _Wanted(dict(call), leaves(args), returned)


def oracle_outputs(spec: OpSpec, call: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the oracle leaves in every tensor that an effect names, and returns, by leaf path."""
    args = clone(call)
    returned = spec.oracle(**args)
    found = {**leaves(args), **leaves(returned, "return")}
    return {path: tensor for path, tensor in found.items() if effect_of(spec, path) is not None}


def effect_of(spec: OpSpec, path: str) -> Effect | None:
    """The effect that names a leaf, or None."""
    for effect in spec.effects:
        if path_matches(path, effect.paths):
            return effect
    return None


def path_matches(path: str, pattern: str) -> bool:
    """Whether a leaf path fits a pattern, in which `*` matches anything."""
    # Only `*` is special: brackets are part of a path.
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), path) is not None


def changes_something(wanted: _Wanted) -> bool:
    """Whether the oracle wrote or returned anything that was not there before."""
    if any(tensor.numel() for tensor in wanted.returned.values()):
        return True
    return not all(
        same_bits(before.to(wanted.after[path].device), wanted.after[path])
        for path, before in leaves(wanted.before).items()
    )


@dataclass
class _Run:
    """One execution in guarded memory."""

    placement: Placement
    tree: Any
    """What the implementation returned."""
    faults: list[str]

    def returned(self, wanted: _Wanted) -> dict[str, Tensor]:
        """The returned tensors by path; a list serves where the oracle returns a tuple."""
        due, got = wanted.tree, self.tree
        if due is None:
            return {}
        if isinstance(due, tuple) and isinstance(got, (list, tuple)) and len(got) == len(due):
            got = type(due)(*got) if hasattr(due, "_fields") else tuple(got)
        try:
            returned = leaves(got, "return")
        except TypeError as error:
            raise Violation(f"returned something that holds no tensors: {error}") from error
        device = next(tensor.device for tensor in self.placement.views.values())
        for path, tensor in returned.items():
            if tensor.device != device or tensor.layout is not torch.strided:
                raise Violation(
                    f"{path}: a dense tensor on {device} is due, not a {tensor.layout} one on "
                    f"{tensor.device}"
                )
        return returned


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _invoke(subject: Subject, args: dict[str, Any], *calls: Mapping[str, Any]) -> Any:
    """Call the implementation; whatever it raises on a legal call is a violation.

    `calls` are what a case file of such a violation holds.
    """
    casts.repair()
    before = _frame(args)
    try:
        with interpreter.quicker():
            returned = subject.function(**args)
        _synchronize(subject.device)
    except (Exception, SystemExit) as error:
        raise Violation(_raised(error), calls) from error
    after = _frame(args)
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        raise Violation(
            f"{changed[0]}: the caller's own object was changed: {before.get(changed[0])} became "
            f"{after.get(changed[0])} (address, shape, strides)",
            calls,
        )
    return returned


def _frame(args: Mapping[str, Any]) -> dict[str, object]:
    """What a call is made of beside its bytes: where each tensor stands, and every scalar.

    A tensor that was moved to other memory (`x.data = ...`, `x.set_`), or replaced in its list,
    holds the right values where nobody who holds the old memory sees them.
    """
    return {
        path: (hex(value.data_ptr()), tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else value
        for path, value in walk(args)
    }


def _raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(__file__)]
    where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
    text = str(error).strip() or "no message"
    return f"a legal call raised {type(error).__name__}: {text[:2000]}{where}"


def _execute(
    subject: Subject,
    call: Mapping[str, Any],
    poison: Poison = POISONS[0],
    *,
    shifted: bool = False,
    heap_byte: int | None = None,
    heap_like: Mapping[str, Tensor] | None = None,
) -> _Run:
    placement = Placement(call, subject.device, poison, shifted=shifted)
    if heap_byte is not None and heap_like:
        _poison_heap(heap_like, subject.device, heap_byte)
    with memcheck.watched(placement.extents()) as faults:
        returned = _invoke(subject, placement.args, call)
    return _Run(placement, returned, faults)


def _poison_heap(like: Mapping[str, Tensor], device: torch.device, byte: int) -> None:
    """Leave blocks full of `byte` on the allocator's free lists, as large as what is returned."""
    for tensor in like.values():
        size = max(1, tensor.numel() * tensor.element_size())
        blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for _ in range(4)]
        del blocks


# ---------------------------------------------------------------- comparison and reports


def _mismatches(wanted: _Wanted, got: Mapping[str, Tensor], spec: OpSpec) -> list[str]:
    """One paragraph for every tensor that is not as the contract wants it."""
    everything = {**wanted.after, **wanted.returned}
    home = next((tensor.device for tensor in everything.values()), torch.device("cpu"))
    # An unexpected extra return value is no concern of the contract; a missing one is.
    got_all = {path: tensor.to(home) for path, tensor in got.items() if path in everything}
    problems = []
    for path, want in everything.items():
        have = got_all.get(path)
        if have is None:
            problems.append(f"{path}: nothing was returned where {_kind(want)} is due")
            continue
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(f"{path}: {_kind(have)} instead of {_kind(want)}")
            continue
        problem = _leaf_problem(spec, path, wanted, want, have, everything, got_all)
        if problem:
            problems.append(problem)
    if len(problems) > SHOWN_TENSORS:
        more = len(problems) - SHOWN_TENSORS
        problems = [*problems[:SHOWN_TENSORS], f"... and {more} more tensors are wrong"]
    return problems


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _leaf_problem(
    spec: OpSpec,
    path: str,
    wanted: _Wanted,
    want: Tensor,
    have: Tensor,
    wanted_all: Mapping[str, Tensor],
    got_all: Mapping[str, Tensor],
) -> str | None:
    effect = effect_of(spec, path)
    if isinstance(effect.judge if effect else Bits(), Bits) and same_bits(want, have):
        return None
    look = Look(wanted.before, path, want, have, wanted_all, got_all)
    exact = Bits(nan="payload")
    judge: Judge
    if effect is None:
        wrong = exact.wrong(look)
        judge, rule = exact, "the op does not write this tensor: every byte must stay"
    elif effect.region is None:
        judge, rule = effect.judge, effect.rule
        wrong = judge.wrong(look)
    else:
        region = effect.region(wanted.before, path).to(have.device)
        outside = exact.wrong(look) & ~region
        if bool(outside.any()):
            judge, wrong = exact, outside
            rule = f"nothing outside what the rule names may change ({effect.rule})"
        else:
            judge, rule = effect.judge, effect.rule
            wrong = judge.wrong(look) & region
    count = int(wrong.sum())
    if not count:
        return None
    lines = [f"{path}: {count} of {wrong.numel()} elements are wrong"]
    before = leaves(wanted.before).get(path)
    for index in _first_indices(wrong):
        line = f"  [{', '.join(map(str, index))}] expected {judge.wants(look, index)}"
        line += f", got {show(have[index])}"
        if before is not None:
            line += f", was {show(before[index])} before"
        lines.append(line)
    if count > SHOWN_ELEMENTS:
        lines.append(f"  ... and {count - SHOWN_ELEMENTS} more")
    lines.append(f"  rule: {rule}")
    return "\n".join(lines)


def _first_indices(wrong: Tensor) -> list[tuple[int, ...]]:
    if not wrong.dim():
        return [()]
    flat = wrong.reshape(-1)
    found: list[int] = []
    # topk over a byte view would scan everything; nonzero would list everything.
    step = 1 << 22
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].nonzero().flatten()[: SHOWN_ELEMENTS - len(found)]
        found += [start + int(position) for position in part]
        if len(found) == SHOWN_ELEMENTS:
            break
    indices = []
    for position in found:
        index = []
        for size in reversed(wrong.shape):
            index.append(position % size)
            position //= size
        indices.append(tuple(reversed(index)))
    return indices


def _hold(
    subject: Subject, call: Mapping[str, Any], wanted: _Wanted, run: _Run, label: str = ""
) -> None:
    """Raise a violation if the outcome of a run is not what the contract wants."""
    problems = _mismatches(wanted, {**run.placement.views, **run.returned(wanted)}, subject.spec)
    if problems:
        raise Violation("\n".join(([f"({label})"] if label else []) + problems), [call])


def _hold_alike(
    subject: Subject,
    call: Mapping[str, Any],
    wanted: _Wanted,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    meaning: str,
) -> None:
    """Raise a violation if two runs of one call gave other bits in anything that is specified."""
    for path, one in first.items():
        effect = effect_of(subject.spec, path)
        if effect is not None and isinstance(effect.judge, Anything):
            continue
        other = second.get(path)
        if other is None or other.shape != one.shape or other.dtype != one.dtype:
            raise Violation(f"{path}: {meaning}: {_kind(one)} and then another kind", [call])
        if same_bits(one, other):
            continue
        unequal = differing(one, other)
        if effect is not None and effect.region is not None:
            unequal &= effect.region(wanted.before, path).to(unequal.device)
        if bool(unequal.any()):
            index = _first_indices(unequal)[0]
            raise Violation(
                f"{path}: {meaning}: {int(unequal.sum())} of {unequal.numel()} elements differ\n"
                f"  [{', '.join(map(str, index))}] {show(one[index])} and {show(other[index])}",
                [call],
            )


# ---------------------------------------------------------------- the checks


def _call(subject: Subject, params: Params, name: str) -> dict[str, Any]:
    return subject.spec.build(params, case_seed(subject.seed, name))


def _checked_oracle(subject: Subject, case: Case, call: Mapping[str, Any]) -> _Wanted:
    wanted = _wanted(subject, call)
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
    _hold(subject, call, wanted, _execute(subject, call))


def check_guards(subject: Subject, case: Case) -> None:
    """Nothing before, behind or between rows changes, and nothing outside is read."""
    call = _call(subject, case.params, case.name)
    wanted = _checked_oracle(subject, case, call)
    outcomes = []
    for poison in POISONS:
        run = _execute(subject, call, poison)
        strays = run.placement.strays() + run.faults
        if strays:
            raise Violation("\n".join(strays), [call])
        _hold(subject, call, wanted, run, f"red zones hold {poison.name}")
        outcomes.append(_copies({**run.placement.views, **run.returned(wanted)}))
    _hold_alike(
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
    written = _only_written(subject.spec, call)
    if not written and not wanted.returned:
        raise Skipped("everything that the op writes is also read")
    outcomes = []
    for byte in FILLS:
        poisoned = filled(call, written, byte)
        due = _wanted(subject, poisoned)
        run = _execute(subject, poisoned, heap_byte=byte, heap_like=wanted.returned)
        _hold(subject, poisoned, due, run, f"outputs held 0x{byte:02x} bytes before the call")
        outcomes.append(_copies(run.returned(wanted)))
    _hold_alike(
        subject,
        call,
        wanted,
        outcomes[0],
        outcomes[1],
        "the result depends on what memory held before the call",
    )


def _only_written(spec: OpSpec, call: Mapping[str, Any]) -> set[str]:
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
        run = _execute(subject, laid, POISONS[1], shifted=shifted)
        strays = run.placement.strays() + run.faults
        if strays:
            raise Violation("\n".join([f"({label})", *strays]), [laid])
        _hold(subject, laid, wanted, run, label)


def _allowed_strides(spec: OpSpec, call: Mapping[str, Any]) -> dict[str, Literal["rows", "any"]]:
    allowed: dict[str, Literal["rows", "any"]] = {}
    for path in leaves(call):
        for pattern, kind in spec.strides.items():
            if path_matches(path, pattern):
                allowed[path] = kind
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
    _graph(subject, [call, *calls])


def _graph(subject: Subject, calls: Sequence[Mapping[str, Any]]) -> None:
    device = subject.device
    placement = Placement(calls[0], device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            placement.load(calls[0])
            _invoke(subject, placement.args, calls[0])
    torch.cuda.current_stream(device).wait_stream(side)
    placement.load(calls[0])
    _synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            returned = subject.function(**placement.args)
    except Exception as error:
        raise Violation(f"capture failed: {_raised(error)}", [calls[0]]) from error
    order = [*calls[1:], calls[0]]
    proved = False
    for number, call in enumerate(order):
        wanted = _wanted(subject, call)
        placement.load(call)
        run = _Run(placement, returned, [])
        for tensor in run.returned(wanted).values():
            byte_fill(tensor, FILLS[1])
        _synchronize(device)
        try:
            graph.replay()
            _synchronize(device)
        except Exception as error:
            raise Violation(f"replay {number} failed: {_raised(error)}", list(calls)) from error
        # The memory was reset before this replay: only captured work can have written this.
        proved |= changes_something(wanted)
        try:
            _hold(subject, call, wanted, run, f"replay {number} of {len(order)}")
            if strays := placement.strays():
                raise Violation("\n".join([f"(replay {number})", *strays]))
        except Violation as violation:
            raise Violation(str(violation), list(calls)) from None
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
        run = _Run(placement, _invoke(subject, placement.args, call), [])
        _hold(subject, call, wanted, run, f"call {number + 1} on the same inputs")
        returned = run.returned(wanted)
        got = _copies({**placement.views, **returned})
        if first is None:
            first, kept = got, {path: returned[path] for path in wanted.returned}
        _hold_alike(subject, call, wanted, first, got, f"calls 1 and {number + 1} differ")
    # At once after calls that hold the same content: what one of those left behind would win now.
    if subject.spec.rescale:
        other = subject.spec.rescale(call)
        placement.load(other)
        run = _Run(placement, _invoke(subject, placement.laid(other), call, other), [])
        due = _wanted(subject, other)
        _repeat_hold(subject, [call, other], due, run, "other numbers, same memory")
    others = replays_of(subject, case, call)[:changed]
    for number, other in enumerate(others):
        placement.load(other)
        run = _Run(placement, _invoke(subject, placement.args, call), [])
        due = _wanted(subject, other)
        _repeat_hold(subject, [call, other], due, run, f"changed inputs {number}, same memory")
    _hold_earlier(placement, kept, first or {}, [call, *others])
    if subject.device.type == "cuda":
        placement.load(call)
        stream = torch.cuda.Stream(subject.device)
        stream.wait_stream(torch.cuda.current_stream(subject.device))
        with torch.cuda.stream(stream):
            run = _Run(placement, _invoke(subject, placement.args, call), [])
        torch.cuda.current_stream(subject.device).wait_stream(stream)
        _hold(subject, call, wanted, run, "on another stream")


def _repeat_hold(
    subject: Subject, calls: list[dict[str, Any]], wanted: _Wanted, run: _Run, label: str
) -> None:
    try:
        _hold(subject, calls[-1], wanted, run, label)
    except Violation as violation:
        raise Violation(str(violation), calls) from None


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
        _synchronize(subject.device)
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
            _fuzz_once(subject, call, shifted=bool(seed & 1), poison=POISONS[seed >> 1 & 1])
            compared += 1
        except Violation as violation:
            if deadline is None:
                deadline = time.monotonic() + SHRINK_SECONDS[subject.profile]
            body = f"{violation}\n  params: {params!r}, data seed {seed}"
            failures[key] = last = Violation(body, violation.calls or [call])
            raise last from None

    try:
        run()
    except Violation as violation:
        raise (last or violation) from None
    if not compared:
        raise SuiteFault("the strategy gave no call to compare")


def _fuzz_once(subject: Subject, call: Mapping[str, Any], *, shifted: bool, poison: Poison) -> None:
    wanted = _wanted(subject, call)
    run = _execute(subject, call, poison, shifted=shifted)
    if strays := run.placement.strays() + run.faults:
        raise Violation("\n".join(strays), [call])
    _hold(subject, call, wanted, run)


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
    found += [Target("invalid", bad.name, _on_bad_input(bad)) for bad in spec.bad_inputs]
    return found


def _no_graphs(subject: Subject) -> None:
    raise Skipped("CUDA graphs need a CUDA device")


def _on_case(check: str, case: Case) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        if case.device == "cuda" and subject.device.type != "cuda":
            raise Skipped("this case needs a CUDA device")
        _BY_CASE[check](subject, case)

    return run


def _on_bad_input(bad: BadInput) -> Callable[[Subject], None]:
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
    except SuiteFault as fault:
        outcome = Outcome("error", f"{_title(subject, target)}\n{fault}")
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        outcome = Outcome("skipped", f"not enough device memory: {str(error).splitlines()[0]}")
    except Exception as error:
        if NO_HOST_MEMORY in str(error):
            # Rows that lie far apart span more memory than they touch: some machines refuse that.
            outcome = Outcome("skipped", f"not enough memory: {str(error).splitlines()[0]}")
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
    return Outcome("failed", "\n".join(lines), case_file=path)


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


def replay_target(content: casefile.CaseFile, spec: OpSpec) -> Target:
    """What `draftproof replay` runs for a case file: the check it came from, on its calls."""
    if content.check == "invalid":
        for bad in spec.bad_inputs:
            if bad.name == content.case:
                return Target("invalid", bad.name, _on_bad_input(bad))
        raise casefile.BadCaseFile(f"op {spec.name} has no bad input {content.case!r}")

    def run(subject: Subject) -> None:
        calls = content.calls
        if content.check == "graph" and subject.device.type == "cuda":
            if subject.graph_reason:
                raise Skipped(subject.graph_reason)
            _graph(subject, [*calls, *calls[:1], *calls[:1]])
            return
        placement = Placement(calls[0], subject.device)
        for call in calls:
            # The same memory for all of them, as in the check that found it.
            placement.load(call)
            wanted = _wanted(subject, call)
            run = _Run(placement, _invoke(subject, placement.laid(call), call), [])
            _hold(subject, call, wanted, run)
        for call in calls:
            for shifted in (False, True):
                for poison in POISONS:
                    _fuzz_once(subject, call, shifted=shifted, poison=poison)
        written = _only_written(spec, calls[0])
        for call in calls:
            for byte in FILLS:
                _fuzz_once(subject, filled(call, written, byte), shifted=False, poison=POISONS[0])

    return Target(content.check, content.case, run)
