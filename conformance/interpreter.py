"""Makes Triton's interpreter quicker while the suite calls kernels, without changing a result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quicker() -> Iterator[None]:
    """Let the interpreter patch `triton.language` once per launch and device function.

    It does so at every call of a device function in every program, which takes more time than
    the kernels themselves. A launch patches anew, because the end of the last one took its patches
    back. Does nothing where Triton is not loaded, or its interpreter is built otherwise.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    function = getattr(interpreter, "InterpretedFunction", None)
    executor = getattr(interpreter, "GridExecutor", None)
    patch = getattr(interpreter, "_patch_lang", None)
    if function is None or executor is None or patch is None:
        yield
        return
    patched: set[Any] = set()
    call, launch = function.__call__, executor.__call__

    def call_once_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            patched.add(self.fn)
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    function.__call__, executor.__call__ = call_once_patched, launch_afresh
    try:
        yield
    finally:
        function.__call__, executor.__call__ = call, launch
