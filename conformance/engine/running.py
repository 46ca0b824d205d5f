"""One run of an oracle or of the implementation under test, in memory of its own."""

from __future__ import annotations

import dataclasses
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine import memory
from draftproof.conformance.engine.calls import (
    POISONS,
    Placement,
    Poison,
    clone,
    geometry,
    leaves,
    walk,
)
from draftproof.conformance.engine.containment import Ended
from draftproof.conformance.engine.judges import same_bits
from draftproof.conformance.engine.seals import Replaced
from draftproof.conformance.engine.spec import OpSpec
from draftproof.conformance.interpreted import casts, interpreter, memcheck

HERE = Path(__file__).resolve().parent
"""The engine: where a fault of the implementation is not to be found."""

ON_DEVICE_BYTES = 1 << 24
"""Calls larger than this are compared on their own device, with the oracle run there."""


class Violation(Exception):
    """The implementation broke its contract; the message is the report's body.

    Parameters
    ----------
    message : str
    calls : sequence of mapping
        What the case file of it holds.
    places : sequence of dict
        Where the wrong elements lie, by leaf (`engine.places`).
    """

    def __init__(
        self,
        message: str,
        calls: Sequence[Mapping[str, Any]] = (),
        places: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.calls = list(calls)
        self.places = tuple(places)


class Skipped(Exception):
    """The check could not run; the message is the reason."""


class NotProvided(Exception):
    """The implementation lacks what the check calls; the message says what."""


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
    peers : callable
        `peers(op)`: the implementation's function for another op, or None; laws ask for it.
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
    peers: Callable[[str], Callable[..., Any] | None] = field(default=lambda op: None)


def peer_of(subject: Subject, op: str) -> Subject:
    """The same implementation's other op, to be called and not judged."""
    function = subject.function if op == subject.spec.name else subject.peers(op)
    if function is None:
        raise NotProvided(f"{subject.implementation} has no {op}")
    return dataclasses.replace(subject, function=function)


def case_seed(seed: int, name: str) -> int:
    """A seed for one case that depends on the run's seed and the case's name alone."""
    return zlib.crc32(f"{seed}:{name}".encode())


@dataclass(frozen=True)
class Wanted:
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


def wanted_of(subject: Subject, call: Mapping[str, Any]) -> Wanted:
    """Run the oracle on a copy of the call."""
    device = _oracle_device(subject, call)
    args = clone(call, device)
    returned = subject.spec.oracle(**args)
    return Wanted(dict(call), leaves(args), returned)


def changes_something(wanted: Wanted) -> bool:
    """Whether the oracle wrote or returned anything that was not there before."""
    if any(tensor.numel() for tensor in wanted.returned.values()):
        return True
    return not all(
        same_bits(before.to(wanted.after[path].device), wanted.after[path])
        for path, before in leaves(wanted.before).items()
    )


@dataclass
class Run:
    """One execution in guarded memory."""

    placement: Placement
    tree: Any
    """What the implementation returned."""
    faults: list[str]

    def returned(self, wanted: Wanted) -> dict[str, Tensor]:
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def invoke(subject: Subject, args: dict[str, Any], *calls: Mapping[str, Any]) -> Any:
    """Call the implementation; whatever it raises on a legal call is a violation.

    `calls` are what a case file of such a violation holds.
    """
    casts.repair()
    try:
        with interpreter.quicker():
            returned = framed(subject, args, *calls)
        synchronize(subject.device)
    except Violation:
        raise
    except (Exception, SystemExit) as error:
        raise Violation(raised(error), calls) from error
    return returned


def framed(subject: Subject, args: dict[str, Any], *calls: Mapping[str, Any]) -> Any:
    """Call the implementation; that it moved or replaced one of its arguments is a violation."""
    before = frame_of(args)
    returned = subject.function(**args)
    after = frame_of(args)
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        raise Violation(
            f"{changed[0]}: the caller's own object was changed: {before.get(changed[0])} became "
            f"{after.get(changed[0])} (address, shape, strides)",
            calls,
        )
    return returned


def frame_of(args: Mapping[str, Any]) -> dict[str, object]:
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


def raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if Path(frame.filename).parent != HERE]
    where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
    # Of a lack of memory the allocator tells pages.
    text = memory.lack(error) or str(error).strip() or "no message"
    if isinstance(error, Replaced):
        return f"a legal call {text}"
    kind = error.kind if isinstance(error, Ended) else type(error).__name__
    return f"a legal call raised {kind}: {text[:2000]}{where}"


def execute(
    subject: Subject,
    call: Mapping[str, Any],
    poison: Poison = POISONS[0],
    *,
    shifted: bool = False,
    heap_byte: int | None = None,
    heap_like: Mapping[str, Tensor] | None = None,
) -> Run:
    placement = Placement(call, subject.device, poison, shifted=shifted)
    if heap_byte is not None and heap_like:
        _poison_heap(heap_like, subject.device, heap_byte)
    with memcheck.watched(placement.extents()) as faults:
        returned = invoke(subject, placement.args, call)
    return Run(placement, returned, faults)


def _poison_heap(like: Mapping[str, Tensor], device: torch.device, byte: int) -> None:
    """Leave blocks full of `byte` on the allocator's free lists, as large as what is returned."""
    for tensor in like.values():
        size = max(1, tensor.numel() * tensor.element_size())
        blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for _ in range(4)]
        del blocks
