"""What a command line may name and how it is refused, without loading torch: that takes seconds."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

CHECKS = ("eager", "guards", "poison", "strided", "graph", "repeat", "invalid", "fuzz")
"""Every check of the suite, in the order in which they run and are reported."""

_SPEC_FILES = Path(__file__).resolve().parent / "ops"


class Refused(Exception):
    """Bad usage or input: one clear line, exit 2."""


@functools.cache
def op_names() -> tuple[str, ...]:
    """Every op, in the order in which they run and are reported.

    They are the `OPS` of the spec files; where one has none, all specs are loaded instead.
    """
    names: list[str] = []
    for path in sorted(_SPEC_FILES.glob("*.py")):
        if path.stem == "__init__":
            continue
        declared = _declared(path)
        if declared is None:
            from draftproof.conformance.spec import load_specs

            return tuple(load_specs())
        names += declared
    return tuple(names)


def _declared(path: Path) -> tuple[str, ...] | None:
    """The literal value of a module's `OPS`, or None."""
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "OPS":
            try:
                return tuple(ast.literal_eval(statement.value))
            except ValueError:
                return None
    return None
