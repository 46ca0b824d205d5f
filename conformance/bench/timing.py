"""Clocks and loops for benchmarks on a GPU: graph replays by device events, eager calls by host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

MODES = ("graph", "cold", "eager", "interpreted")
"""graph: calls inside one graph, time divided; cold: one replay at a time behind an L2 flush;
eager: host time of calls in a row; interpreted: no GPU, the numbers say nothing of speed."""

TARGET_SECONDS = 2e-3
"""Device time that one timed replay of a graph aims at: long against what a launch costs."""

MAX_CALLS = 500
"""Calls captured in one graph, at most."""

ROUNDS = {"graph": 15, "cold": 200, "eager": 15, "interpreted": 2}
"""Timed rounds of one arm."""

EAGER_SECONDS = 4e-3
"""Host time that the eager calls between two readings of the clock aim at."""

FLUSH_BYTES = 1 << 28
"""Written between cold replays: several times any L2 cache."""

COPY_BYTES = 1 << 31
"""Copied to measure the device's bandwidth."""


class DeviceClock:
    """A timer for pytest-benchmark that reads device events.

    Every second reading ends an interval. The first does not wait for the device: what was queued
    before it (a cache flush) keeps the device busy, so that launching costs no measured time.

    Parameters
    ----------
    calls : int
        Calls that one timed function makes; the clock runs slower by this factor.
    """

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self._total = 0.0
        self._open: Any = None

    def __call__(self) -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._open is None:
            self._open = event
        else:
            event.synchronize()
            self._total += self._open.elapsed_time(event) * 1e-3 / self.calls
            self._open = None
        return self._total


class HostClock:
    """A timer for pytest-benchmark: host time per call, the device idle at both ends."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() / self.calls


@triton.jit
def _nothing(a, b, c, d, e, f, g, h):
    """A kernel that does nothing, to see what a launch costs."""
    tl.program_id(0)


@triton.jit
def _nothing_long(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q):
    """The same with sixteen arguments."""
    tl.program_id(0)


def empty_launch(device: torch.device, arguments: int) -> Callable[[], None]:
    """A thunk that launches an empty kernel with 8 or 16 pointers (the next that is enough)."""
    kernel, count = (_nothing, 8) if arguments <= 8 else (_nothing_long, 16)
    pointer = torch.zeros(16, dtype=torch.int32, device=device)
    pointers = [pointer] * count

    def launch() -> None:
        kernel[(1,)](*pointers, num_warps=1, enable_fp_fusion=False)

    return launch


@dataclass
class Loop:
    """What pytest-benchmark is given for one arm in one mode."""

    function: Callable[[], object]
    setup: Callable[[], None] | None
    clock: DeviceClock | HostClock
    rounds: int


def graph_of(thunk: Callable[[], object], calls: int) -> Any:
    """Capture `calls` calls in one CUDA graph, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            thunk()
    return graph


def _calls_for(thunk: Callable[[], object]) -> int:
    """How many calls make one timed replay long enough."""
    graph = graph_of(thunk, 1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) * 1e-3 / 5
    return max(1, min(MAX_CALLS, round(TARGET_SECONDS / max(seconds, 1e-7))))


def loop_for(thunk: Callable[[], object], mode: str, flush: torch.Tensor | None) -> Loop:
    """Prepare an arm for timing in a mode of `MODES`."""
    if mode == "graph":
        calls = _calls_for(thunk)
        graph = graph_of(thunk, calls)
        assert flush is not None
        # The flush keeps the device busy while the replay is queued; it is not timed.
        return Loop(graph.replay, lambda: _flush(flush), DeviceClock(calls), ROUNDS[mode])
    if mode == "cold":
        graph = graph_of(thunk, 1)
        assert flush is not None
        return Loop(graph.replay, lambda: _flush(flush), DeviceClock(), ROUNDS[mode])
    calls = _eager_calls(thunk) if mode == "eager" else 1

    def several() -> None:
        for _ in range(calls):
            thunk()

    return Loop(several, None, HostClock(calls), ROUNDS[mode])


def _eager_calls(thunk: Callable[[], object]) -> int:
    for _ in range(3):
        thunk()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        thunk()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / 5
    return max(1, min(MAX_CALLS, round(EAGER_SECONDS / max(seconds, 1e-7))))


def _flush(memory: torch.Tensor) -> None:
    memory.fill_(1)


def copy_bytes_per_second(device: torch.device) -> float:
    """Bandwidth of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return 2 * COPY_BYTES / best
