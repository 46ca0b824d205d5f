"""What a benchmark run times: every arm of every point, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftproof.conformance.engine.implementations import resolve
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.session import Settings
from draftproof.conformance.engine.spec import Args, BenchPoint
from draftproof.conformance.names import Refused


@dataclass(frozen=True)
class BenchJob:
    """One arm of one benchmark point in one mode."""

    op: str
    point: BenchPoint
    arm: str
    prepare: Callable[[Args], Callable[[], object]] | None
    """None: the empty launch."""
    mode: str
    device: str

    @property
    def id(self) -> str:
        """The parameter part of the test's name."""
        return f"{self.op}-{self.point.name}-{self.mode}-{self.arm}"


def bench_jobs(settings: Settings) -> list[BenchJob]:
    """Point by point, so that a point's arguments are made once; without a GPU, one point an op.

    Raises
    ------
    Refused
        If a point names no arms and the op has no "triton" or no "baseline".
    """
    found = []
    cuda = settings.device == "cuda"
    for op in settings.chosen():
        spec = load_specs()[op]
        points = spec.bench() if spec.bench else []
        for point in points if cuda else points[:1]:
            arms = dict(point.arms)
            if not arms:
                for name in ("triton", "baseline"):
                    function = resolve(name).get(op)
                    if function is None:
                        raise Refused(f"bench: {op} has no function {op}_{name}")
                    arms[name] = _plain_arm(function)
            if cuda:
                modes = ["cold" if point.cold else "graph", *(["eager"] if point.eager else [])]
            else:
                modes = ["interpreted"]
            for mode in modes:
                for arm, prepare in [*arms.items(), ("empty", None)]:
                    found.append(BenchJob(op, point, arm, prepare, mode, settings.device))
    return found


def _plain_arm(function: Callable[..., object]) -> Callable[[Args], Callable[[], object]]:
    return lambda args: lambda: function(**args)
