"""Lane-by-lane address checks of Triton kernels under the interpreter."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

MAX_REPORTS = 4
"""Distinct faults kept for one call."""


class _Watch:
    """Stands in front of the interpreter's memory functions and looks at every active lane."""

    def __init__(self, inner: Any, extents: Sequence[tuple[int, int, int, int, str]]) -> None:
        self._inner = inner
        ordered = sorted(extents)
        self._low, self._high, self._first, self._end = (
            np.array([extent[column] for extent in ordered], dtype=np.uint64) for column in range(4)
        )
        self._extents = ordered
        self._starts = [extent[0] for extent in ordered]
        self.faults: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._look("read", pointers, mask, np.dtype(dtype).itemsize)
        return self._inner.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._look("written", pointers, mask, value.dtype.itemsize)
        return self._inner.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._look("updated", pointers, mask, value.dtype.itemsize)
        return self._inner.atomic_rmw(operation, pointers, value, mask, order)

    def _is_plain(self, begin: int, end: int) -> bool:
        """Whether the bytes from `begin` to `end` are all in one tensor, or all in none of ours.

        Nearly every access is, and then need not be looked at lane by lane.
        """
        at = bisect.bisect_right(self._starts, begin) - 1
        if at >= 0 and begin < self._extents[at][1]:
            return self._extents[at][2] <= begin and end <= self._extents[at][3]
        return at + 1 == len(self._starts) or end <= self._starts[at + 1]

    def _look(self, verb: str, pointers: Any, mask: Any, size: int) -> None:
        lanes = np.asarray(pointers, dtype=np.uint64)
        mask = np.asarray(mask, dtype=bool)
        if not mask.all():
            lanes = lanes[np.broadcast_to(mask, lanes.shape)]
        if not lanes.size or len(self.faults) >= MAX_REPORTS:
            return
        if self._is_plain(int(lanes.min()), int(lanes.max()) + size):
            return
        lanes = lanes.ravel()
        at = np.searchsorted(self._low, lanes, side="right").astype(np.int64) - 1
        ours = (at >= 0) & (lanes < self._high[at])
        outside = ours & ((lanes < self._first[at]) | (lanes + np.uint64(size) > self._end[at]))
        for lane in np.flatnonzero(outside)[:1]:
            storage = at[lane]
            behind = int(lanes[lane]) + size - int(self._end[storage])
            before = int(self._first[storage]) - int(lanes[lane])
            where = f"{behind} bytes past its end" if behind > 0 else f"{before} bytes before it"
            fault = (
                f"{int(outside.sum())} lanes of one access {verb} outside "
                f"{self._extents[storage][4]}, the first {where}"
            )
            if fault not in self.faults:
                self.faults.append(fault)


@contextmanager
def watched(extents: Sequence[tuple[int, int, int, int, str]]) -> Iterator[list[str]]:
    """Report loads and stores of interpreted kernels that leave the tensors.

    Parameters
    ----------
    extents : sequence
        As `Placement.extents` gives them. Addresses in none of the allocations (an
        implementation's own workspace) are not judged.

    Yields
    ------
    list of str
        Filled while the block runs. Stays empty where Triton is not loaded or not interpreting.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_interpreter"):
        yield []
        return
    inner = interpreter._interpreter
    watch = _Watch(inner, extents)
    interpreter._interpreter = watch  # type: ignore[attr-defined]
    try:
        yield watch.faults
    finally:
        interpreter._interpreter = inner  # type: ignore[attr-defined]
