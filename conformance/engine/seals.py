"""What judges a result is what it was before the call: what a call replaces is put back and told.

Code under test can reach everything in its process: the oracles, the judges, the functions of torch
with which they compare. Where one of these is another function after a call than before, nothing
that is found of its result proves anything.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

SUITE = ("draftproof.oracles", "draftproof.conformance")
"""Packages whose functions and classes are not a call's to replace."""

UNSEALED = ("draftproof.conformance.mutants", "draftproof.conformance.tests")
"""Packages in them that are themselves under test, or test."""

COMPARING = (
    *("all", "any", "arange", "empty", "eq", "equal", "full", "isnan", "isneginf", "maximum"),
    *("minimum", "ne", "ones_like", "view_as_real", "where", "zeros", "zeros_like"),
)
"""Functions of torch with which results are compared. Others are left alone: what a call imports
may replace them in good faith."""


class Replaced(Exception):
    """Code under test replaced what judges it; the message names it."""


@contextlib.contextmanager
def unbroken(*, importing: bool = False) -> Iterator[None]:
    """Put back, at the end, what was replaced in between.

    Parameters
    ----------
    importing : bool
        Whether code is imported in between: then the methods of tensors are left alone. Packages
        for other devices bring their own.

    Raises
    ------
    Replaced
        If anything was, and nothing else is raised.
    """
    before = _look(tensors=not importing)
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    if replaced := _put_back(before):
        raise Replaced(f"replaced {', '.join(replaced)}, with which results are judged")


def _look(*, tensors: bool) -> list[tuple[Any, dict[str, Any]]]:
    """The modules and classes that hold what judges, and what they hold now."""
    found = [(torch, {name: getattr(torch, name) for name in COMPARING})]
    owners = _suite(len(sys.modules))
    return found + [(o, dict(vars(o))) for o in ((torch.Tensor, *owners) if tensors else owners)]


@functools.lru_cache(maxsize=1)
def _suite(modules: int) -> tuple[Any, ...]:
    """The suite's modules, classes and specs.

    `modules` is how many are loaded: with a new one they are looked up anew.
    """
    found: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(SUITE) and not name.startswith(UNSEALED):
            found.append(module)
            found += [
                value
                for value in vars(module).values()
                if isinstance(value, type) and value.__module__ == name
            ]
    registry = sys.modules.get("draftproof.conformance.engine.registry")
    if registry is not None and registry.load_specs.cache_info().currsize:
        found += registry.load_specs().values()
    return tuple(found)


def _put_back(before: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    replaced = []
    for owner, was in before:
        now = vars(owner)
        # Nearly always all are the same: that is found out without a loop of Python's.
        if any(map(operator.is_not, map(now.get, was), was.values())):
            for name, value in was.items():
                if now.get(name) is not value and _works(value):
                    replaced.append(_name(owner, name))
                    _set(owner, name, value)
        for name in _shadows(owner, was, now):
            replaced.append(_name(owner, name))
            delattr(owner, name)
    return replaced


def _works(value: Any) -> bool:
    """Whether it is a function, a class or a descriptor; all else may change as the suite runs."""
    return callable(value) or hasattr(type(value), "__get__")


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        # A spec is frozen.
        vars(owner)[name] = value


def _shadows(owner: Any, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was put into a class before what it inherits."""
    if not isinstance(owner, type) or len(now) == len(was):
        return []
    added = [name for name in now if name not in was]
    return [name for name in added if any(name in vars(base) for base in owner.__mro__[1:])]


def _name(owner: Any, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__name__}.{name}"
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{name}"
    return f"the {name} of {owner.name}"
