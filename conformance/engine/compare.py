"""Holding the outputs of a run against what the oracle wants, and saying what is wrong."""

from __future__ import annotations

import dataclasses
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
from draftproof.conformance.engine.running import Run, Subject, SuiteFault, Violation, Wanted
from draftproof.conformance.engine.spec import Effect, OpSpec, Part

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
        problems += _leaf_problems(spec, path, wanted, want, have, everything, got_all)
    return problems


def kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


UNTOUCHED = Part("the op does not write this tensor: every byte must stay", Bits(nan="payload"))


def viewed(tensor: Tensor, view: torch.dtype | None) -> Tensor:
    """A copy of a leaf with the bytes of each row read as another type; the leaf itself for None.

    Bytes at a row's end that do not fill an element are left out.
    """
    if view is None:
        return tensor
    if not tensor.dim():
        raise SuiteFault(f"a tensor without dimensions has no rows to be read as {view}")
    raw = tensor.contiguous().clone().view(torch.uint8)
    whole = raw.shape[-1] // view.itemsize * view.itemsize
    return raw[..., :whole].contiguous().view(view)


def regions_of(
    effect: Effect, before: dict[str, Any], path: str, leaf: Tensor
) -> list[Tensor | None]:
    """Where each part of an effect decides, in the shape of its view; None: everywhere.

    Raises
    ------
    SuiteFault
        If a region has another shape or type, or two parts cover one byte.
    """
    found: list[Tensor | None] = []
    for part in effect.all_parts:
        if part.region is None:
            found.append(None)
            continue
        region = part.region(before, path).to(leaf.device)
        shape = viewed(leaf, part.view).shape
        if region.dtype is not torch.bool or region.shape != shape:
            raise SuiteFault(
                f"{path}: the region of {part.rule!r} is {kind_of(region)}, not bool{list(shape)}"
            )
        found.append(region)
    if len(found) > 1:
        _covered(effect, path, leaf, found)
    return found


def _covered(effect: Effect, path: str, leaf: Tensor, regions: Sequence[Tensor | None]) -> Tensor:
    """Which bytes of a leaf's rows some part decides; no byte belongs to two."""
    taken = torch.zeros_like(viewed(leaf, torch.uint8), dtype=torch.bool)
    owners: list[str] = []
    for part, region in zip(effect.all_parts, regions, strict=True):
        size = part.view.itemsize if part.view else leaf.element_size()
        if region is None:
            region = torch.ones_like(viewed(leaf, part.view), dtype=torch.bool)
        own = torch.zeros_like(taken)
        own[..., : region.shape[-1] * size] = region.repeat_interleave(size, dim=-1)
        if bool((taken & own).any()):
            at = first_indices(taken & own)[0]
            raise SuiteFault(
                f"{path}: byte [{', '.join(map(str, at))}] belongs to {part.rule!r} and to "
                f"another of its parts: {owners}"
            )
        taken |= own
        owners.append(part.rule)
    return taken


def _leaf_problems(
    spec: OpSpec,
    path: str,
    wanted: Wanted,
    want: Tensor,
    have: Tensor,
    wanted_all: Mapping[str, Tensor],
    got_all: Mapping[str, Tensor],
) -> list[Problem]:
    effect = effect_of(spec, path) or Effect(path, parts=(UNTOUCHED,))
    parts = effect.all_parts
    # Parts that overlap are a fault of the spec, whatever the bits are.
    regions = regions_of(effect, wanted.before, path, have) if len(parts) > 1 else None
    if all(isinstance(part.judge, Bits) for part in parts) and same_bits(want, have):
        return []
    if regions is None:
        regions = regions_of(effect, wanted.before, path, have)
    before = leaves(wanted.before).get(path)
    exact = Bits(nan="payload")

    def problem(part: Part, judge: Judge, region: Tensor | None) -> Problem | None:
        one, other = viewed(want, part.view), viewed(have, part.view)
        look = Look(wanted.before, path, one, other, wanted_all, got_all)
        wrong = judge.wrong(look)
        if region is not None:
            wrong = wrong & region
        if not bool(wrong.any()):
            return None
        was = None if before is None else viewed(before, part.view)
        return _described(path, part, judge, look, wrong, was)

    outside = None
    if len(parts) > 1 or parts[0].view is not None:
        free = ~_covered(effect, path, have, regions)
        if bool(free.any()):
            rules = "; ".join(part.rule for part in parts)
            rest = Part(f"nothing outside what the rules name may change ({rules})")
            outside = problem(dataclasses.replace(rest, view=torch.uint8), exact, free)
    elif regions[0] is not None:
        rest = Part(f"nothing outside what the rule names may change ({parts[0].rule})")
        outside = problem(rest, exact, ~regions[0])
    if outside is not None:
        return [outside]
    found = (problem(part, part.judge, at) for part, at in zip(parts, regions, strict=True))
    return [each for each in found if each is not None]


def _described(
    path: str, part: Part, judge: Judge, look: Look, wrong: Tensor, was: Tensor | None
) -> Problem:
    label = f"{path} as {str(part.view).removeprefix('torch.')}" if part.view else path
    count = int(wrong.sum())
    lines = [f"{label}: {count} of {wrong.numel()} elements are wrong"]
    for index in first_indices(wrong):
        line = f"  [{', '.join(map(str, index))}] expected {judge.wants(look, index)}"
        line += f", got {show(look.got[index])}"
        if was is not None:
            line += f", was {show(was[index])} before"
        lines.append(line)
    if count > SHOWN_ELEMENTS:
        lines.append(f"  ... and {count - SHOWN_ELEMENTS} more")
    lines.append(f"  rule: {part.rule}")
    return Problem("\n".join(lines), places(label, wrong, part.rule))


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
        effect = effect_of(subject.spec, path) or Effect(path, parts=(UNTOUCHED,))
        if all(
            isinstance(part.judge, Anything) and part.region is None for part in effect.all_parts
        ):
            continue
        other = second.get(path)
        if other is None or other.shape != one.shape or other.dtype != one.dtype:
            raise Violation(f"{path}: {meaning}: {kind_of(one)} and then another kind", [call])
        if same_bits(one, other):
            continue
        regions = regions_of(effect, wanted.before, path, one)
        for part, region in zip(effect.all_parts, regions, strict=True):
            if isinstance(part.judge, Anything):
                continue
            left, right = viewed(one, part.view), viewed(other, part.view)
            unequal = differing(left, right)
            if region is not None:
                unequal &= region
            if not bool(unequal.any()):
                continue
            index = first_indices(unequal)[0]
            label = f"{path} as {str(part.view).removeprefix('torch.')}" if part.view else path
            raise Violation(
                f"{label}: {meaning}: {int(unequal.sum())} of {unequal.numel()} elements differ\n"
                f"  [{', '.join(map(str, index))}] {show(left[index])} and {show(right[index])}",
                [call],
                [places(label, unequal, meaning)],
            )
