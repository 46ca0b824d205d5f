"""What one op is, as data: its oracle, effects, cases, bad inputs, replays and bench grid."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from draftproof.conformance.engine.judges import Bits, Judge

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from torch import Tensor

Params = Mapping[str, Any]
"""Everything that a builder needs to make one call, JSON-serialisable: geometry, values, pokes."""

Args = dict[str, Any]
"""A call's arguments by name: tensors, scalars, and lists, tuples or dataclasses of them."""

PROFILES = ("quick", "full", "soak")
"""How much is run: each profile includes the cases of those before it."""

CASE_CHECKS = ("eager", "guards", "poison", "strided", "graph", "repeat")
"""The checks that run once for every case; `invalid` runs per bad input, `fuzz` once per op."""


@dataclass(frozen=True)
class Effect:
    """One thing that an op writes.

    Parameters
    ----------
    paths : str
        Pattern of leaf paths, `*` matching anything: `"states[*]"`, `"steps[*].page_table_1"`,
        `"return[0]"`. A leaf that no effect names must keep every byte.
    rule : str
        The rule that a wrong element breaks, in one sentence; failure reports quote it.
    judge : Judge
        How got is held against wanted. `Bits()` compares bit patterns.
    region : callable, optional
        `region(before, path) -> bool Tensor` of the leaf's shape: where the judge decides. Outside
        it every byte must be what the oracle left there. None: the judge decides everywhere.
    reads : bool
        Whether the op reads the leaf's old content (`positions += 1` does). The old content of a
        leaf that is only written is replaced by two different fills in the check *poison*.
    """

    paths: str
    rule: str
    judge: Judge = field(default_factory=Bits)
    region: Callable[[Args, str], Tensor] | None = None
    reads: bool = False


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
        Pattern of leaf paths to what the op allows: "rows" (unit stride in the last dimension
        only), "any" (every dimension). Leaves not named are contiguous; their base may still
        stand at any element.
    bench : callable, optional
        `bench() -> list of BenchPoint`.
    functions : mapping of str to callable
        The op's own implementations where they do not stand in the rooms of `family`: of an op
        from outside, "oracle" and, if there are any, "triton" and "baseline".
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
    strides: Mapping[str, Literal["rows", "any"]] = field(default_factory=dict)
    bench: Callable[[], list[BenchPoint]] | None = None

    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"op {self.name!r}: a Python identifier is due")
        for kind, names in (
            ("case", [case.name for case in self.cases]),
            ("bad input", [bad.name for bad in self.bad_inputs]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{self.name}: {kind} {twice[0]!r} is defined twice")
            if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]+", name)]:
                raise ValueError(f"{self.name}: {kind} {odd[0]!r}: letters, digits and _ are due")
        for case in self.cases:
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
