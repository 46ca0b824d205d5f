"""Makes Triton's interpreter quicker while the suite calls kernels, without changing a result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_PATCHED = (
    "InterpretedFunction",
    "GridExecutor",
    "_patch_lang",
    "_patch_attr",
    "_patch_builtin",
    "_get_np_dtype",
)
"""What is used or replaced here; where one is missing, the interpreter is built otherwise."""

_builtins: dict[Any, list[str]] = {}
_dtypes: dict[str, Any] = {}


@contextmanager
def quicker() -> Iterator[None]:
    """Spare the interpreter what takes more of its time than the kernels themselves.

    At every call of a device function in every program it patches `triton.language`: here once a
    launch and set of modules, because the end of a launch takes its patches back. Each time it
    looks through all members of those modules: here only through those that were builtins. And
    at every operation it builds a table of dtypes: here the answers are kept. Does nothing where
    Triton is not loaded, or its interpreter is built otherwise.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if any(not hasattr(interpreter, name) for name in _PATCHED):
        yield
        return
    core = sys.modules["triton.language.core"]
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    call, launch = function.__call__, executor.__call__
    patch_builtin, np_dtype = interpreter._patch_builtin, interpreter._get_np_dtype
    patched: set[frozenset[int]] = set()
    languages: dict[Any, frozenset[int]] = {}

    def call_once_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (modules := languages.get(self.fn)) is None:
            modules = languages[self.fn] = frozenset(
                id(value) for value in self.fn.__globals__.values() if isinstance(value, ModuleType)
            ) & {id(core), id(sys.modules["triton.language"])}
        if modules not in patched:
            patched.add(modules)
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_known_builtins(package: Any, builder: Any, scope: Any) -> None:
        if (names := _builtins.get(package)) is None:
            names = _builtins[package] = [
                name for name, member in inspect.getmembers(package) if core.is_builtin(member)
            ]
        for name in names:
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def known_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if (found := _dtypes.get(scalar.name)) is None:
            found = _dtypes[scalar.name] = np_dtype(scalar)
        return found

    function.__call__, executor.__call__ = call_once_patched, launch_afresh
    interpreter._patch_builtin, interpreter._get_np_dtype = patch_known_builtins, known_dtype
    try:
        yield
    finally:
        function.__call__, executor.__call__ = call, launch
        interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, np_dtype
