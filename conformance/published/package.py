"""Functions of an installed package, also where importing the whole package fails."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Unavailable(Exception):
    """A function that the installed package does not give; the message is the reason."""


class Package:
    """One installed package of kernels.

    A package of kernels asks for dozens of others in its `__init__` files, of which a kernel's own
    file may need none. So an `__init__` that raises is passed over, and the modules below it are
    loaded from their files.

    Parameters
    ----------
    name : str
        The import name, and that of the distribution.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.passed_over: dict[str, Exception] = {}
        """What the `__init__` of a package raised, by module path."""
        self._used: dict[str, Any] = {}

    @property
    def installed(self) -> bool:
        """Whether there is such a package; it is not imported."""
        return self.name in sys.modules or importlib.util.find_spec(self.name) is not None

    @property
    def version(self) -> str:
        """As the distribution says, "unknown" where only the files are there."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def function(self, place: str) -> Callable[..., Any]:
        """A function by `module.path:name`.

        Raises
        ------
        Unavailable
            If there is no such module or function, or the module cannot be loaded.
        """
        path, _, name = place.partition(":")
        module = self._module(path)
        found = getattr(module, name, None)
        if not callable(found):
            raise Unavailable(f"{self.name} {self.version}: {path} has no function {name}")
        self._used[place] = {
            "loaded": "file"
            if any(f"{path}.".startswith(f"{name}.") for name in self.passed_over)
            else "package",
            "sha256": _digest(module),
        }
        return found

    def optional(self, place: str) -> Callable[..., Any] | None:
        """As `function`; None where it is not there."""
        try:
            return self.function(place)
        except Unavailable:
            return None

    def describe(self) -> dict[str, Any]:
        """What a record should say: the version, and each function that was found.

        Of a function, `loaded` is "package", or "file" where a package above it was passed over,
        and `sha256` is that of its module's file.
        """
        return {"package": self.name, "version": self.version, "functions": dict(self._used)}

    def _module(self, path: str) -> ModuleType:
        try:
            with _tolerant(self.name, self.passed_over):
                return importlib.import_module(path)
        except Exception as error:
            said = f"{path}: {type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
                said = f"there is no module {error.name}"
            elif isinstance(error, ImportError) and error.name in self.passed_over:
                # A name that a package lacks because its own import ended early.
                first = self.passed_over[error.name]
                said = f"{path} needs {error.name}: {type(first).__name__}: {first}"
            raise Unavailable(f"{self.name} {self.version}: {said.splitlines()[0]}") from error


def _digest(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


class _PassingOver(Loader):
    """A package's loader that keeps the package where its `__init__` raises."""

    def __init__(self, inner: Loader, passed_over: dict[str, Exception]) -> None:
        self._inner = inner
        self._passed_over = passed_over

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._inner.exec_module(module)
        except Exception as error:
            self._passed_over[module.__name__] = error


class _Finder(MetaPathFinder):
    """Finds one package and what lies in it, where the other finders do."""

    def __init__(self, name: str, passed_over: dict[str, Exception]) -> None:
        self._name = name
        self._passed_over = passed_over

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.submodule_search_locations is not None and spec.loader is not None:
                    spec.loader = _PassingOver(spec.loader, self._passed_over)
                return spec
        return None


@contextlib.contextmanager
def _tolerant(name: str, passed_over: dict[str, Exception]) -> Iterator[None]:
    finder = _Finder(name, passed_over)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
