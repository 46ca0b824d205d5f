"""Holding the outputs of a run against what the oracle wants, and saying what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine.calls import clone, leaves
from draftproof.conformance.engine.judges import (
    Anything,
    Bits,
    Judge,
    Look,
    differing,
    same_bits,
    show,
)
from draftproof.conformance.engine.places import places
from draftproof.conformance.engine.running import Run, Subject, Violation, Wanted
from draftproof.conformance.engine.spec import Effect, OpSpec

SHOWN_ELEMENTS = 4
"""Wrong elements of one tensor that a report shows."""

SHOWN_TENSORS = 3
"""Tensors with wrong elements that a report shows."""


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


@dataclass(frozen=True)
class Problem:
    """What is wrong with one tensor: a paragraph, and where its wrong elements lie."""

    text: str
    places: dict[str, Any] | None = None


def violation_of(
    problems: Sequence[Problem], calls: Sequence[Mapping[str, Any]], label: str = ""
) -> Violation:
    """The violation that says what is wrong with a call; only the first few tensors are shown."""
    shown = problems[:SHOWN_TENSORS]
    lines = [f"({label})"] if label else []
    lines += [problem.text for problem in shown]
    if more := len(problems) - len(shown):
        lines.append(f"... and {more} more tensors are wrong")
    places = [problem.places for problem in shown if problem.places is not None]
    return Violation("\n".join(lines), calls, places)


def mismatches(wanted: Wanted, got: Mapping[str, Tensor], spec: OpSpec) -> list[Problem]:
    """One problem for every tensor that is not as the contract wants it."""
    everything = {**wanted.after, **wanted.returned}
    home = next((tensor.device for tensor in everything.values()), torch.device("cpu"))
    # An unexpected extra return value is no concern of the contract; a missing one is.
    got_all = {path: tensor.to(home) for path, tensor in got.items() if path in everything}
    problems = []
    for path, want in everything.items():
        have = got_all.get(path)
        if have is None:
            text = f"{path}: nothing was returned where {kind_of(want)} is due"
            problems.append(Problem(text))
            continue
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(Problem(f"{path}: {kind_of(have)} instead of {kind_of(want)}"))
            continue
        problem = _leaf_problem(spec, path, wanted, want, have, everything, got_all)
        if problem is not None:
            problems.append(problem)
    return problems


def kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _leaf_problem(
    spec: OpSpec,
    path: str,
    wanted: Wanted,
    want: Tensor,
    have: Tensor,
    wanted_all: Mapping[str, Tensor],
    got_all: Mapping[str, Tensor],
) -> Problem | None:
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
    for index in first_indices(wrong):
        line = f"  [{', '.join(map(str, index))}] expected {judge.wants(look, index)}"
        line += f", got {show(have[index])}"
        if before is not None:
            line += f", was {show(before[index])} before"
        lines.append(line)
    if count > SHOWN_ELEMENTS:
        lines.append(f"  ... and {count - SHOWN_ELEMENTS} more")
    lines.append(f"  rule: {rule}")
    return Problem("\n".join(lines), places(path, wrong, rule))


def first_indices(wrong: Tensor) -> list[tuple[int, ...]]:
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


def hold(
    subject: Subject, call: Mapping[str, Any], wanted: Wanted, run: Run, label: str = ""
) -> None:
    """Raise a violation if the outcome of a run is not what the contract wants."""
    problems = mismatches(wanted, {**run.placement.views, **run.returned(wanted)}, subject.spec)
    if problems:
        raise violation_of(problems, [call], label)


def hold_alike(
    subject: Subject,
    call: Mapping[str, Any],
    wanted: Wanted,
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
            raise Violation(f"{path}: {meaning}: {kind_of(one)} and then another kind", [call])
        if same_bits(one, other):
            continue
        unequal = differing(one, other)
        if effect is not None and effect.region is not None:
            unequal &= effect.region(wanted.before, path).to(unequal.device)
        if bool(unequal.any()):
            index = first_indices(unequal)[0]
            raise Violation(
                f"{path}: {meaning}: {int(unequal.sum())} of {unequal.numel()} elements differ\n"
                f"  [{', '.join(map(str, index))}] {show(one[index])} and {show(other[index])}",
                [call],
                [places(path, unequal, meaning)],
            )
