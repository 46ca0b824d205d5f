"""Makes Triton's interpreter quicker while the suite calls kernels, without changing a result."""

from __future__ import annotations

import dataclasses
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
    "interpreter_builder",
    "TritonSemantic",
)
"""What is used or replaced here; where one is missing, the interpreter is built otherwise."""

_builtins: dict[Any, list[str]] = {}
_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


@contextmanager
def quicker() -> Iterator[None]:
    """Spare the interpreter what takes more of its time than the kernels themselves.

    At every call of a device function in every program it patches `triton.language`: here once a
    launch and set of modules, because the end of a launch takes its patches back. Each time it
    looks through all members of those modules: here only through those that were builtins. At
    every operation it builds a table of dtypes, the types of its blocks and the shapes of its
    values: here the answers are kept. And it broadcasts blocks of one shape to that shape: here
    they are left as they are.

    It also asserts that no sum or product of 32-bit integers overflows, which takes a fifth of
    its time. A compiled kernel does not: there they wrap, which a masked lane may do by right. So
    that is off.

    Does nothing where Triton is not loaded, or its interpreter is built otherwise.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if any(not hasattr(interpreter, name) for name in _PATCHED):
        yield
        return
    core = sys.modules["triton.language.core"]
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    call, launch = function.__call__, executor.__call__
    patch_builtin, np_dtype = interpreter._patch_builtin, interpreter._get_np_dtype
    builder, semantic = interpreter.interpreter_builder, interpreter.TritonSemantic
    options, broadcast = builder.options, semantic.broadcast_impl_value
    describe, construct = core.block_type.__init__, core.tensor.__init__
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

    def without_widening(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def of_known_extents(self: Any, element_ty: Any, shape: Any) -> None:
        extents = (
            extent.value if type(extent) is core.constexpr else extent
            for extent in (shape.values if type(shape) is core.tuple else shape)
        )
        # A pointer's type is made anew at every launch: its name tells it from others.
        kind = element_ty.name, getattr(element_ty, "address_space", None), *extents
        if (found := _blocks.get(kind)) is None:
            describe(self, element_ty, shape)
            found = _blocks[kind] = dict(self.__dict__)
        self.__dict__.update(found)

    def of_known_shape(self: Any, handle: Any, type: Any) -> None:
        extents = tuple(type.shape.values) if type.is_block() else ()
        if (found := _shapes.get(extents)) is None:
            construct(self, handle, type)
            if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
                _shapes[extents] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    function.__call__, executor.__call__ = call_once_patched, launch_afresh
    semantic.broadcast_impl_value = without_widening
    core.block_type.__init__, core.tensor.__init__ = of_known_extents, of_known_shape
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._patch_builtin, interpreter._get_np_dtype = patch_known_builtins, known_dtype
    try:
        yield
    finally:
        function.__call__, executor.__call__ = call, launch
        interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, np_dtype
        semantic.broadcast_impl_value, builder.options = broadcast, options
        core.block_type.__init__, core.tensor.__init__ = describe, construct
