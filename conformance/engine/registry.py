"""The only place where ops are found: ours in `conformance/ops`, and those of spec files."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from draftproof.conformance.engine.implementations import load_file
from draftproof.conformance.engine.spec import Mutant, OpSpec, Variant
from draftproof.conformance.names import Refused

OPS_PACKAGE = "draftproof.conformance.ops"
MUTANTS_PACKAGE = "draftproof.conformance.mutants"

SUFFIXES = {"oracle": "", "triton": "_triton", "baseline": "_baseline"}
"""How the functions of a spec file are called after its op: `row_sum` is the oracle,
`row_sum_triton` and `row_sum_baseline`, where they stand, implementations of those names."""

_outside: dict[str, ModuleType] = {}
"""Spec files in use in this process, by their absolute path."""


class BadSpec(Refused, ValueError):
    """A spec file that cannot be used; the message is one line for the user."""


def use(files: Sequence[str]) -> tuple[str, ...]:
    """Load spec files into this process, beside the ops that it knows.

    Parameters
    ----------
    files : sequence of str
        Paths to `.py` files, each with an oracle for every op of its `SPECS`; `MUTANTS` and
        `VARIANTS` are optional.

    Returns
    -------
    tuple of str
        Their ops.

    Raises
    ------
    BadSpec
        If a file is missing, raises, holds no usable spec, or an op is defined twice.
    """
    found: list[str] = []
    for name in files:
        # Neighbours of one name are told apart by their path; a file named twice is one file.
        path = str(Path(name).expanduser().resolve())
        if path not in _outside:
            module = load_file(name, "--spec", BadSpec)
            for op in (spec.name for spec in _specs_of(name, module)):
                if op in _own_specs():
                    raise BadSpec(f"--spec {name}: {op} is an op of draftproof: name yours anew")
                if op in load_specs():
                    raise BadSpec(f"--spec {name}: {op} is defined by another spec file too")
            _subjects_of(name, module)
            _outside[path] = module
            load_specs.cache_clear()
            load_mutants.cache_clear()
        found += [spec.name for spec in _specs_of(name, _outside[path])]
    return tuple(dict.fromkeys(found))


@functools.cache
def load_specs() -> dict[str, OpSpec]:
    """Every op spec, by name: ours, in the order of their files, and those of spec files in use."""
    found = dict(_own_specs())
    for path, module in _outside.items():
        found |= {spec.name: spec for spec in _specs_of(path, module)}
    return found


def op_names() -> tuple[str, ...]:
    """Every op that this process knows, in the order in which they run and are reported."""
    return tuple(load_specs())


@functools.cache
def load_mutants() -> tuple[tuple[Mutant, ...], tuple[Variant, ...]]:
    """Every mutant and variant: `MUTANTS` and `VARIANTS` of the modules that hold them."""
    modules = [*_modules(MUTANTS_PACKAGE), *_outside.values()]
    return (
        tuple(mutant for module in modules for mutant in getattr(module, "MUTANTS", ())),
        tuple(variant for module in modules for variant in getattr(module, "VARIANTS", ())),
    )


@functools.cache
def _own_specs() -> dict[str, OpSpec]:
    return {spec.name: spec for module in _modules(OPS_PACKAGE) for spec in module.SPECS}


def _specs_of(name: str, module: ModuleType) -> Iterator[OpSpec]:
    """The specs of a file, each with the functions that the file names after its op."""
    specs = getattr(module, "SPECS", None)
    if not isinstance(specs, (list, tuple)) or not specs:
        raise BadSpec(f"--spec {name}: a list SPECS of OpSpec is due")
    for spec in specs:
        if not isinstance(spec, OpSpec):
            raise BadSpec(f"--spec {name}: SPECS holds a {type(spec).__name__}, not an OpSpec")
        own: dict[str, Any] = {}
        for implementation, suffix in SUFFIXES.items():
            function = getattr(module, spec.name + suffix, None)
            if function is not None and not callable(function):
                raise BadSpec(f"--spec {name}: {spec.name}{suffix} is not a function")
            if function is not None:
                own[implementation] = function
        functions = {**own, **spec.functions}
        if "oracle" not in functions:
            raise BadSpec(f"--spec {name}: no function {spec.name}, which is the op's oracle")
        if not spec.cases:
            raise BadSpec(f"--spec {name}: {spec.name} has no cases")
        if not spec.effects:
            raise BadSpec(f"--spec {name}: {spec.name} has no effects")
        yield dataclasses.replace(spec, functions=functions)


def _subjects_of(name: str, module: ModuleType) -> None:
    """Refuse mutants and variants that are none, or of ops that the file does not define."""
    ops = {spec.name for spec in module.SPECS}
    for attribute, kind in (("MUTANTS", Mutant), ("VARIANTS", Variant)):
        for subject in getattr(module, attribute, ()):
            if not isinstance(subject, kind):
                raise BadSpec(
                    f"--spec {name}: {attribute} holds a {type(subject).__name__}, "
                    f"not a {kind.__name__}"
                )
            if subject.op not in ops:
                raise BadSpec(f"--spec {name}: {attribute}: {subject.name} is of {subject.op!r}")


def _modules(package: str) -> list[Any]:
    path = importlib.import_module(package).__path__
    names = sorted(info.name for info in pkgutil.iter_modules(path))
    return [importlib.import_module(f"{package}.{name}") for name in names]
