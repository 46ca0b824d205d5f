"""Benchmarks: every arm of every point of every op, side by side in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftproof.conformance.bench.jobs import BenchJob
from draftproof.conformance.bench.timing import copy_bytes_per_second, empty_launch, loop_for
from draftproof.conformance.engine.calls import clone
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import case_seed
from draftproof.conformance.engine.spec import Args
from draftproof.conformance.plugin import BENCH_PROPERTY

EMPTY = "empty"


class _Bench:
    """The arguments of the point that is being timed, and what the device can do."""

    def __init__(self) -> None:
        self._point: tuple[str, str] | None = None
        self._args: Args | None = None
        self._flush: torch.Tensor | None = None
        self.copy_rate: float | None = None

    def args(self, job: BenchJob, device: torch.device) -> Args:
        """The point's call on the device; made once for all arms."""
        if self._point != (job.op, job.point.name):
            self._args = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            call = load_specs()[job.op].build(job.point.params, case_seed(0, job.point.name))
            self._args = clone(call, device)
            self._point = (job.op, job.point.name)
        assert self._args is not None
        return self._args

    def flush(self, device: torch.device) -> torch.Tensor | None:
        """Memory to write between replays."""
        from draftproof.conformance.bench.timing import FLUSH_BYTES

        if device.type == "cuda" and self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
            self.copy_rate = copy_bytes_per_second(device)
        return self._flush


@pytest.fixture(scope="session")
def bench_state() -> _Bench:
    """Shared by every arm of the run."""
    return _Bench()


def test_bench(
    dp_bench: BenchJob,
    bench_state: _Bench,
    benchmark: Any,
    record_property: Callable[[str, Any], None],
) -> None:
    """Time one arm of one point in one mode."""
    device = torch.device(dp_bench.device)
    args = bench_state.args(dp_bench, device)
    flush = bench_state.flush(device)
    point = dp_bench.point
    if dp_bench.prepare is None:
        thunk: Callable[[], object] = empty_launch(device, point.empty_args)
    else:
        thunk = dp_bench.prepare(args)
    loop = loop_for(thunk, dp_bench.mode, flush)
    benchmark._timer = loop.clock
    benchmark.pedantic(
        loop.function, setup=loop.setup, rounds=loop.rounds, iterations=1, warmup_rounds=2
    )
    stats = benchmark.stats.stats
    limit = None
    if point.bytes_moved and bench_state.copy_rate:
        limit = point.bytes_moved / bench_state.copy_rate * 1e6
    record_property(
        BENCH_PROPERTY,
        {
            "op": dp_bench.op,
            "point": point.name,
            "mode": dp_bench.mode,
            "arm": dp_bench.arm,
            "median_us": stats.median * 1e6,
            "min_us": stats.min * 1e6,
            "max_us": stats.max * 1e6,
            "rounds": stats.rounds,
            "bandwidth_limit_us": limit,
        },
    )
