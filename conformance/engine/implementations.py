"""What can be put under test: the project's own code, a file, a module, or one function."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from draftproof.conformance.names import Refused

PROJECT = ("triton", "baseline", "oracle")
"""Implementations that come with the project."""

PUBLISHED = ("sglang",)
"""Packages whose kernels are put under test where they are installed: each has adapters in
`conformance/published/<name>.py`."""

PROBE_SECONDS = 120
"""How long importing a file from outside may take before the run is refused."""


class BadImplementation(Refused, ValueError):
    """An implementation that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Implementation:
    """Functions named after ops.

    Parameters
    ----------
    name : str
        As the user gave it.
    outside : bool
        Whether the code is not the project's own: then it runs in workers with a time limit, and
        its errors need not name arguments.
    lookup : callable
        `lookup(op) -> function or None`.
    not_capturable : mapping of str to str
        Reason by op for which a CUDA graph cannot be captured; "*" for all.
    lacking : mapping of str to str
        Why there is no function for an op, where more can be said than that.
    about : mapping
        What a record should say of it beside its name: versions, digests.
    """

    name: str
    outside: bool
    lookup: Callable[[str], Callable[..., Any] | None]
    not_capturable: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def get(self, op: str) -> Callable[..., Any] | None:
        """The function for an op, or None where the implementation has none."""
        return self.lookup(op)

    def graph_reason(self, op: str) -> str | None:
        """Why the op cannot be captured in a CUDA graph, or None."""
        return self.not_capturable.get(op, self.not_capturable.get("*"))


def is_outside(name: str) -> bool:
    """Whether a name given to `--impl` means code from outside the project."""
    return name not in PROJECT


def resolve(name: str) -> Implementation:
    """Load an implementation into this process.

    Parameters
    ----------
    name : str
        "triton", "baseline", "oracle", "sglang", a path to a `.py` file, or `module[:attr]`.

    Raises
    ------
    BadImplementation
        If there is no such file or module, it cannot be imported, or the attribute is missing.
    """
    if name in PROJECT:
        reasons = {"*": "the oracle is not made for capture"} if name == "oracle" else {}
        return Implementation(name, False, lambda op: _own(name, op), reasons)
    if name in PUBLISHED:
        module = importlib.import_module(f"draftproof.conformance.published.{name}")
        with _sealed(name):
            found: Implementation = module.implementation()
        return found
    with _sealed(name):
        holder = _load(name)

    def lookup(op: str) -> Callable[..., Any] | None:
        if isinstance(holder, Mapping):
            function = holder.get(op)
        elif getattr(holder, "__name__", None) == op and callable(holder):
            function = holder
        else:
            function = getattr(holder, op, None)
        if function is not None and not callable(function):
            raise BadImplementation(
                f"--impl {name}: {op} is a {type(function).__name__}, not a function"
            )
        return function

    return Implementation(name, True, lookup)


@contextlib.contextmanager
def _sealed(name: str) -> Iterator[None]:
    """Refuse code that replaces, while it is imported, what would judge it."""
    from draftproof.conformance.engine import seals

    try:
        with seals.unbroken(importing=True):
            yield
    except seals.Replaced as error:
        raise BadImplementation(f"--impl {name}: importing it {error}") from None


def _own(name: str, op: str) -> Callable[..., Any] | None:
    from draftproof.conformance.engine.registry import load_specs

    return load_specs()[op].function(name)


def _load(name: str) -> Any:
    if name.endswith(".py"):
        return load_file(name, "--impl", BadImplementation)
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        # A module is also looked up where the user stands, after everything installed.
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise BadImplementation(f"--impl {name}: importing it failed: {error}") from error
        hint = (
            ""
            if "." in module_name or ":" in name
            else (
                f" (known: {', '.join((*PROJECT, *PUBLISHED))}, a path ending in .py, "
                "or module[:attr])"
            )
        )
        raise BadImplementation(f"--impl {name}: no module named {error.name!r}{hint}") from error
    except Exception as error:
        raise BadImplementation(
            f"--impl {name}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    for part in filter(None, attribute.split(".")):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BadImplementation(
                f"--impl {name}: {module_name} has no attribute {attribute!r}"
            ) from None
    return found


def load_file(name: str, option: str, refusal: type[Exception]) -> ModuleType:
    """Import a user's file under a name of its own.

    Parameters
    ----------
    name : str
        Path to a `.py` file.
    option : str
        The option that named it, for messages.
    refusal : type
        The exception to raise, with one line, if there is no such file or it cannot be imported.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise refusal(f"{option} {name}: no such file")
    if path.suffix != ".py":
        raise refusal(f"{option} {name}: a file ending in .py is due")
    path = path.resolve()
    # A name of its own, so that a file called torch.py or two of one name do no harm.
    unique = f"draftproof_impl_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise refusal(f"{option} {name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    # Its neighbours are importable, as they are for a script.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[unique]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise refusal(
            f"{option} {name}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        # At the end from now on, for what is imported inside a call.
        sys.path.remove(str(path.parent))
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
    return module


@dataclass(frozen=True)
class Provided:
    """What a probe of code from outside found.

    Parameters
    ----------
    known : tuple of str
        Every op, ours and those of the spec files.
    specified : tuple of str
        The ops of the spec files.
    implementation : str
        The implementation to test: as asked, or chosen where nothing was asked.
    ops : tuple of str
        The ops that it defines.
    mutated : tuple of str
        The ops that have mutants or variants, if there are spec files.
    lacking, about : dict
        As of `Implementation`.
    problem : str, optional
        Why the run is refused.
    """

    known: tuple[str, ...] = ()
    specified: tuple[str, ...] = ()
    implementation: str = ""
    ops: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()
    lacking: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def probe(
    name: str | None, specs: Sequence[str] = (), *, seconds: float = PROBE_SECONDS
) -> Provided:
    """Import an implementation and spec files in a child process and list the ops there.

    The parent stays clean of code that may hang, crash, or import Triton in the wrong mode.

    Parameters
    ----------
    name : str, optional
        As for `resolve`. None: "triton" if every op of the spec files has one, else "oracle".
    specs : sequence of str
        Spec files.
    seconds : float
        Time limit.
    """
    # What is imported first is what a hang or a crash is blamed on.
    blamed = f"--spec {', '.join(specs)}" if specs else f"--impl {name}"
    command = [sys.executable, "-c", _PROBE, json.dumps([name, list(specs)])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Provided(problem=f"{blamed}: importing it took longer than {seconds:g} s")
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK) :])
            return Provided(
                tuple(found["known"]),
                tuple(found["specified"]),
                found["implementation"],
                tuple(found["ops"]),
                tuple(found["mutated"]),
                found["lacking"],
                found["about"],
                found["problem"],
            )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Provided(problem=f"{blamed}: importing it ended the process ({done.returncode}): {last}")


_MARK = "draftproof-probe:"
_PROBE = """
import json, os, sys
if sys.path and sys.path[0] in ("", "."):
    del sys.path[0]
from draftproof.conformance.engine import implementations
found = implementations.probe_here(*json.loads(sys.argv[1]))
# On a line of its own, whatever the import printed; and at once, whatever threads it started.
print("\\n" + found, flush=True)
os._exit(0)
"""


def probe_here(name: str | None, specs: Sequence[str]) -> str:
    """The child's half of `probe`: one marked line of JSON."""
    return _MARK + json.dumps(dataclasses.asdict(_probed(name, specs)))


def _probed(name: str | None, specs: Sequence[str]) -> Provided:
    from draftproof.conformance.engine import registry

    try:
        specified = registry.use(specs)
        known = registry.op_names()
        if name is None:
            own = [registry.load_specs()[op].function("triton") for op in specified]
            name = "triton" if None not in own else "oracle"
        found = resolve(name)
        ops = tuple(op for op in known if found.get(op) is not None)
    except Refused as error:
        return Provided(problem=str(error))
    if not set(ops) & set(specified or known):
        names = ", ".join(specified or known)
        return Provided(problem=f"--impl {name}: defines none of the ops {names}")
    mutated: set[str] = set()
    if specs:
        mutated = {subject.op for subjects in registry.load_mutants() for subject in subjects}
    lacking, about = dict(found.lacking), dict(found.about)
    return Provided(known, specified, name, ops, tuple(sorted(mutated)), lacking, about)
