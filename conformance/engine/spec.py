"""What one op is, as data: its oracle, effects, cases, bad inputs, replays and bench grid."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from draftproof.conformance.engine.judges import Bits, Judge
from draftproof.conformance.names import CHECKS

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy
    from torch import Tensor

    from draftproof.conformance.engine.laws import LawRun

Params = Mapping[str, Any]
"""Everything that a builder needs to make one call, JSON-serialisable: geometry, values, pokes."""

Args = dict[str, Any]
"""A call's arguments by name: tensors, scalars, and lists, tuples or dataclasses of them."""

Strides = Literal["outer", "rows", "any"]
"""Which dimensions of a tensor may have any stride: the first, all but the last, all."""

STRIDES = ("outer", "rows", "any")

PROFILES = ("quick", "full", "soak")
"""How much is run: each profile includes the cases of those before it."""

CASE_CHECKS = ("eager", "guards", "poison", "strided", "graph", "repeat")
"""The checks that run once for every case; `invalid` runs per bad input, `fuzz` once per op, `laws`
per law and its cases."""

Region = Callable[[Args, str], "Tensor"]
"""`region(before, path) -> bool Tensor`: where a judge decides, in the shape of the leaf, or of its
view."""


@dataclass(frozen=True)
class Part:
    """Some elements of a leaf, and how they are judged.

    Parameters
    ----------
    rule : str
        The rule that a wrong element breaks, in one sentence; failure reports quote it.
    judge : Judge
        How got is held against wanted. `Bits()` compares bit patterns.
    region : callable, optional
        `region(before, path) -> bool Tensor` of the leaf's shape, or of its view's: where the
        judge decides. None: everywhere.
    view : torch.dtype, optional
        The type as which the bytes of each row (the last dimension, taken as contiguous) are read;
        bytes at a row's end that do not fill an element belong to no element. None: the leaf's own.
    """

    rule: str
    judge: Judge = field(default_factory=Bits)
    region: Region | None = None
    view: torch.dtype | None = None


@dataclass(frozen=True)
class Effect:
    """One thing that an op writes: a leaf, or several parts of one that are judged each its way.

    Parameters
    ----------
    paths : str
        Pattern of leaf paths, `*` matching anything: `"states[*]"`, `"steps[*].page_table_1"`,
        `"return[0]"`. A leaf that no effect names must keep every byte. Of several effects that
        name a leaf the first counts.
    rule, judge, region, view
        As of `Part`, for an effect of one part.
    reads : bool
        Whether the op reads the leaf's old content (`positions += 1` does). The old content of a
        leaf that is only written is replaced by two different fills in the check *poison*.
    parts : sequence of Part
        In place of `rule`, `judge`, `region` and `view`. No two may cover one byte. What none of
        them covers must be, byte for byte, what the oracle left there.
    """

    paths: str
    rule: str = ""
    judge: Judge = field(default_factory=Bits)
    region: Region | None = None
    reads: bool = False
    view: torch.dtype | None = None
    parts: Sequence[Part] = ()

    def __post_init__(self) -> None:
        own = self.rule or self.region is not None or self.view is not None
        if self.parts and (own or self.judge != Bits()):
            raise ValueError(f"effect {self.paths!r}: either parts or a rule of its own is due")
        if not self.parts and not self.rule:
            raise ValueError(f"effect {self.paths!r}: a rule is due")

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Its parts; of an effect without any, the one that it is itself."""
        if self.parts:
            return tuple(self.parts)
        return (Part(self.rule, self.judge, self.region, self.view),)


@dataclass(frozen=True)
class Case:
    """One call to check, named by what makes it ugly.

    Parameters
    ----------
    name : str
        Unique within the op; letters, digits and `_`.
    params : mapping
        Handed to the op's builder.
    profile : str
        The smallest profile that runs it.
    checks : sequence of str, optional
        The checks to run in the case's own profile; None: every check of `CASE_CHECKS`. Large
        cases name a few. Larger profiles run them all.
    noop : bool
        The op must change nothing here. Where it is False, an oracle that changes nothing makes
        the case an error: a vacuous comparison proves nothing.
    device : str, optional
        "cuda" if the case can only run there (memory, grid size); skipped elsewhere, and said so.
    tags : tuple of str
        Labels: "nonfinite"; "beyond_range" for more of something than the op is meant for.
    seconds : float
        Time that one of its checks may take at least, where the profile's limit is shorter: for
        the few sizes that small blocks make slow under the interpreter.
    """

    name: str
    params: Params
    profile: str = "quick"
    checks: tuple[str, ...] | None = None
    noop: bool = False
    device: Literal["cuda"] | None = None
    tags: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class BadInput:
    """One bad argument, and the error that it must raise before anything is written.

    Parameters
    ----------
    name : str
        Unique within the op.
    edit : callable
        `edit(args) -> args`: takes the arguments of a good call (tensors on the device, inside
        guarded memory) and returns them with the fault. It must not write into the tensors.
    names : str
        The argument that the message must name (held only against this project's own code: a
        reader's kernel may word its errors as it likes).
    params : mapping, optional
        The good call to spoil; None: the op's `bad_input_params`.
    error : type
        The exception.
    """

    name: str
    edit: Callable[[Args], Args]
    names: str
    params: Params | None = None
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Law:
    """What one implementation must keep with itself, whichever legal result it chose.

    Parameters
    ----------
    name : str
        Unique within the op; letters, digits and `_`. The check *laws* runs it as `name.case`.
    rule : str
        The law in one sentence; failure reports quote it.
    holds : callable
        `holds(run, args) -> None`: `args` is a case's call. `run.call(op, args)` calls the
        implementation under test on a copy in guarded memory, `run.same(label, one, other)` and
        `run.wrong(text)` say what broke.
    cases : sequence of Case
        The calls that it is held on; their `profile`, `device` and `seconds` count.
    ops : sequence of str
        Other ops that it calls. An implementation that lacks one is *not provided* with the law.
    """

    name: str
    rule: str
    holds: Callable[[LawRun, Args], None]
    cases: Sequence[Case]
    ops: Sequence[str] = ()


@dataclass(frozen=True)
class BenchPoint:
    """One row of an op's benchmark table.

    Parameters
    ----------
    name : str
        Unique within the op.
    params : mapping
        Handed to the op's builder.
    arms : mapping of str to callable
        Name to `prepare(args) -> thunk`: what is timed is `thunk()`. An empty mapping times the
        op's `triton` and `baseline` implementations on the arguments. The first arm is the one
        whose speed is claimed. An arm named "empty" is added by the engine.
    baseline : str
        The arm that the ratio is taken against.
    cold : bool
        Flush the L2 cache before every replay; then each replay is timed on its own. Otherwise
        the time is that of many calls in one graph, divided.
    eager : bool
        Time eager calls (host time included) beside graph replays.
    bytes_moved : int
        Fewest bytes that the op must move through device memory, for the bandwidth limit.
    published_us : mapping of str to float
        Published times, by arm, in microseconds, shown beside the measured ones.
    reach : callable, optional
        `reach(us) -> (met, sentence)`: `us` maps arm (and "empty", "copy_limit") to the measured
        median in microseconds; in eager mode keys end in "/eager".
    empty_args : int
        How many pointer arguments the empty kernel takes.
    """

    name: str
    params: Params
    arms: Mapping[str, Callable[[Args], Callable[[], object]]] = field(default_factory=dict)
    baseline: str = "baseline"
    cold: bool = False
    eager: bool = False
    bytes_moved: int = 0
    published_us: Mapping[str, float] = field(default_factory=dict)
    reach: Callable[[Mapping[str, float]], tuple[bool, str]] | None = None
    empty_args: int = 6


@dataclass(frozen=True)
class OpSpec:
    """Everything the engine knows of one op.

    Parameters
    ----------
    name : str
        The op, and the name of the function in every implementation.
    summary : str
        One line for `draftproof list`.
    build : callable
        `build(params, seed) -> args`: makes the arguments of one call as CPU tensors. Views,
        strides, storage offsets and shared storage are kept: the engine lays the same geometry
        into guarded memory. Outputs are made too, with whatever they hold before the call. The
        same params and seed give the same bytes.
    effects : sequence of Effect
    cases : sequence of Case
    strategy : callable
        `strategy() -> SearchStrategy` of params, for the check *fuzz*.
    bad_inputs : sequence of BadInput
    bad_input_params : mapping
        The good call that bad inputs spoil.
    family : str
        For ops of ours, the file in each room: `oracles/<family>.py`, `kernels/<family>.py`, ...
    replays : callable, optional
        `replays(params) -> list of params`: calls of the same geometry with other content, for the
        checks *graph* and *repeat*; at least three. Python scalars must be equal in all (a graph
        captures them). None: the same params with other seeds.
    rescale : callable, optional
        `rescale(args) -> args`: the same tensors with other Python scalars, still a legal call, for
        the check *repeat*: what an implementation keeps by address or by shape must not outlive
        the numbers it was made from.
    strides : mapping of str to str
        Pattern of leaf paths to what the op allows: "outer" (dimension 0 alone is free), "rows"
        (all but the last, which has unit stride), "any" (every dimension). Of several patterns
        that fit, the first counts. Leaves not named are contiguous; their base may still stand at
        any element.
    bench : callable, optional
        `bench() -> list of BenchPoint`.
    functions : mapping of str to callable
        The op's own implementations where they do not stand in the rooms of `family`: of an op
        from outside, "oracle" and, if there are any, "triton" and "baseline".
    laws : sequence of Law
    """

    name: str
    summary: str
    build: Callable[[Params, int], Args]
    effects: Sequence[Effect]
    cases: Sequence[Case]
    strategy: Callable[[], SearchStrategy[Params]]
    bad_inputs: Sequence[BadInput]
    bad_input_params: Params
    family: str = ""
    replays: Callable[[Params], list[Params]] | None = None
    rescale: Callable[[Args], Args] | None = None
    strides: Mapping[str, Strides] = field(default_factory=dict)
    bench: Callable[[], list[BenchPoint]] | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    laws: Sequence[Law] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"op {self.name!r}: a Python identifier is due")
        for kind, names in (
            ("case", [case.name for case in self.cases]),
            ("bad input", [bad.name for bad in self.bad_inputs]),
            ("law", [law.name for law in self.laws]),
            *((f"law {law.name}: case", [case.name for case in law.cases]) for law in self.laws),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{self.name}: {kind} {twice[0]!r} is defined twice")
            if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]+", name)]:
                raise ValueError(f"{self.name}: {kind} {odd[0]!r}: letters, digits and _ are due")
        for law in self.laws:
            if not law.cases:
                raise ValueError(f"{self.name}: law {law.name} has no cases")
        for pattern, kind in self.strides.items():
            if kind not in STRIDES:
                raise ValueError(f"{self.name}: strides of {pattern}: {kind!r}")
        for case in [*self.cases, *(case for law in self.laws for case in law.cases)]:
            if case.profile not in PROFILES:
                raise ValueError(f"{self.name}: case {case.name}: profile {case.profile!r}")
            if unknown := set(case.checks or ()) - set(CASE_CHECKS):
                raise ValueError(f"{self.name}: case {case.name}: checks {sorted(unknown)}")

    @property
    def implementations(self) -> dict[str, str]:
        """The project's own implementations, as `module:function`; empty for ops from outside."""
        if not self.family:
            return {}
        return {
            "oracle": f"draftproof.oracles.{self.family}:{self.name}",
            "triton": f"draftproof.kernels.{self.family}:{self.name}",
            "baseline": f"draftproof.kernels.{self.family}:{self.name}_baseline",
        }

    def function(self, name: str) -> Callable[..., Any] | None:
        """The op's own implementation of a name ("oracle", "triton", "baseline"), or None."""
        if name in self.functions:
            return self.functions[name]
        if name not in self.implementations:
            return None
        module, attribute = self.implementations[name].split(":")
        return getattr(importlib.import_module(module), attribute)

    @functools.cached_property
    def oracle(self) -> Callable[..., Any]:
        """The oracle function."""
        found = self.function("oracle")
        if found is None:
            raise ValueError(f"{self.name}: no oracle")
        return found


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation with one fault.

    Parameters
    ----------
    name : str
        The fault: "ring_not_wrapped", "tie_takes_last".
    op : str
    fault : str
        What it does wrong, in one sentence.
    killed_by : tuple of str
        The checks that should kill it. If none of them can run here, the mutant is skipped.
    function : callable
        The op's signature.
    """

    name: str
    op: str
    fault: str
    killed_by: tuple[str, ...]
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not self.killed_by:
            raise ValueError(f"mutant {self.name}: killed_by names no check")
        if unknown := sorted(set(self.killed_by) - set(CHECKS)):
            raise ValueError(
                f"mutant {self.name}: killed_by names {unknown[0]!r}, which is no check "
                f"(checks: {', '.join(CHECKS)})"
            )


@dataclass(frozen=True)
class Variant:
    """A correct implementation, written differently from ours, which must pass every check.

    Parameters
    ----------
    name : str
    op : str
    difference : str
        How it differs, in one sentence.
    function : callable
        The op's signature.
    capturable : bool
        Whether it can be captured in a CUDA graph; where not, *graph* is skipped with this reason.
    """

    name: str
    op: str
    difference: str
    function: Callable[..., Any]
    capturable: bool = True
