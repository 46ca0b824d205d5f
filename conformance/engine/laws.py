"""Laws: one implementation held against itself, over one op or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.conformance.engine.calls import clone, leaves
from draftproof.conformance.engine.compare import first_indices, kind_of
from draftproof.conformance.engine.judges import differing, show
from draftproof.conformance.engine.places import places
from draftproof.conformance.engine.running import (
    NotProvided,
    Subject,
    SuiteFault,
    Violation,
    execute,
    peer_of,
)
from draftproof.conformance.engine.spec import Args, Law


@dataclass(frozen=True)
class Left:
    """What a call left.

    Parameters
    ----------
    args : dict
        The call's arguments after it, on the device, in memory that no later call writes.
    returned : Any
        What the implementation returned.
    """

    args: Args
    returned: Any


class LawRun:
    """What a law may do with the implementation under test.

    Parameters
    ----------
    subject : Subject
    law : Law
    call : mapping
        The call that the law is held on; the case file of a failure holds it.
    """

    def __init__(self, subject: Subject, law: Law, call: Mapping[str, Any]) -> None:
        self._subject = subject
        self._law = law
        self._call = call
        self._calls = 0

    def call(self, op: str, args: Args) -> Left:
        """Call an op of the implementation on a copy of `args`, in guarded memory.

        Parameters
        ----------
        op : str
            The law's own op, or one of its `ops`.
        args : dict
            A legal call, of tensors on any device; it is left as it is.

        Returns
        -------
        Left
        """
        spec = self._subject.spec
        if op != spec.name and op not in self._law.ops:
            raise SuiteFault(f"law {self._law.name} calls {op}, which is not among its ops")
        self._calls += 1
        peer = peer_of(self._subject, op)
        try:
            run = execute(peer, args)
        except Violation as violation:
            raise self._violation(f"call {self._calls}, of {op}: {violation}") from violation
        if strays := run.placement.strays() + run.faults:
            raise self._violation("\n".join([f"(call {self._calls}, of {op})", *strays]))
        return Left(clone(run.placement.args), run.tree)

    def same(
        self,
        label: str,
        one: Tensor,
        other: Tensor,
        nan: Literal["any", "payload"] = "payload",
    ) -> None:
        """Say that two tensors must be equal bit for bit.

        Parameters
        ----------
        label : str
            What they are, for the report.
        one, other : Tensor
        nan : "any" or "payload"
            Whether a NaN equals any other.
        """
        other = other.to(one.device)
        if one.shape != other.shape or one.dtype != other.dtype:
            raise self._violation(f"{label}: {kind_of(one)} and {kind_of(other)}")
        wrong = differing(one, other, any_nan=nan == "any")
        if not bool(wrong.any()):
            return
        lines = [f"{label}: {int(wrong.sum())} of {wrong.numel()} elements differ"]
        lines += [
            f"  [{', '.join(map(str, index))}] {show(one[index])} and {show(other[index])}"
            for index in first_indices(wrong)
        ]
        raise self._violation("\n".join(lines), places(label, wrong, self._law.rule))

    def wrong(self, text: str) -> None:
        """Say that the law is broken, in one sentence with the values."""
        raise self._violation(text)

    def _violation(self, text: str, *where: dict[str, Any]) -> Violation:
        return Violation(f"{text}\n  law: {self._law.rule}", [self._call], where)


def hold_law(subject: Subject, law: Law, call: Mapping[str, Any]) -> None:
    """Hold a law on one call.

    Raises
    ------
    NotProvided
        If the implementation lacks an op that the law calls.
    Violation
        If it breaks the law.
    SuiteFault
        If the law calls nothing, or writes into its call.
    """
    for op in law.ops:
        if subject.peers(op) is None:
            raise NotProvided(f"{subject.implementation} has no {op}, which the law calls")
    run = LawRun(subject, law, call)
    before = clone(call, torch.device("cpu"))
    law.holds(run, dict(call))
    if not run._calls:
        raise SuiteFault(f"law {law.name} calls nothing")
    now = leaves(call)
    for path, tensor in leaves(before).items():
        if bool(differing(tensor, now[path].cpu()).any()):
            raise SuiteFault(f"law {law.name} writes into {path} of its call")
