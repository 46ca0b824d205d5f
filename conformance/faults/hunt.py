"""Run the suite on a file as it stands, then on the same file with one fault after the other.

The first round notes which lines each check enters, and its time. A fault is then tried by the
checks alone that enter its lines, those first that have killed most in the least time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from draftproof.conformance.engine import watchdog
from draftproof.conformance.engine.checks import Target, run_target, targets
from draftproof.conformance.engine.containment import OutOfTime, TimeLimit, contained, say
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.engine.session import Settings
from draftproof.conformance.engine.spec import OpSpec
from draftproof.conformance.faults.sites import Fault, faults, faulty

FAULTS_SCHEMA = "draftproof.faults/1"

STATUSES = ("killed", "survived", "not_entered", "not_run")
"""What becomes of a fault: a check failed; every check that enters its lines passed; no check
enters them; the budget was spent before its turn."""

LEAST_SECONDS = 10.0
"""Time that a check of a faulty file may take, at least."""

SLOWER = 10.0
"""How many times its own time a check may take with a fault in the file, where that is more."""

KEPT_CALLS = 512
"""Built calls that a process keeps: every fault is tried on the same ones."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a round is about, handed to its processes as JSON.

    Parameters
    ----------
    file : str
        The implementation, a `.py` file.
    ops : tuple of str
        Its ops that are held against their specs.
    deadline : float, optional
        On the machine's monotonic clock: no fault is begun later.
    entered : mapping of str to mapping
        By `op/check/case`: "lines" that it entered, "seconds" that it took. Empty in the first
        round.
    at_import : tuple of int
        Lines that run when the file is imported.
    """

    file: str
    ops: tuple[str, ...]
    deadline: float | None = None
    entered: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    at_import: tuple[int, ...] = ()

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: str) -> Plan:
        """From `write`."""
        values = json.loads(Path(path).read_text())
        return cls(**{**values, "ops": tuple(values["ops"])})


def standing(settings: Settings, plan: Plan) -> list[tuple[str, str, str]]:
    """Every (op, check, case) of the first round."""
    cuda = settings.device == "cuda"
    return [
        (op, target.check, target.name)
        for op in plan.ops
        for target in targets(load_specs()[op], settings.profile, cuda=cuda)
    ]


def order(settings: Settings, plan: Plan) -> list[Fault]:
    """Every fault of the file, shuffled by the run's seed: a budget then takes a fair sample."""
    found = faults(Path(plan.file).read_text(encoding="utf-8"))
    random.Random(settings.seed).shuffle(found)
    return found


@contextmanager
def _entering(file: str) -> Iterator[set[int]]:
    """Gather the lines of a file that run meanwhile in this thread."""
    lines: set[int] = set()

    def line(frame: FrameType, event: str, argument: object) -> Any:
        lines.add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def _load(path: Path, source_folder: Path) -> ModuleType:
    """Import a file anew, with nothing kept of what it was before."""
    if str(source_folder) not in sys.path:
        sys.path.append(str(source_folder))
    name = f"draftproof_fault_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Hunter:
    """Runs the first round and the faults in one process.

    Parameters
    ----------
    settings : Settings
    plan : Plan
    worker : str
        Name of this process among those of the run.
    """

    def __init__(self, settings: Settings, plan: Plan, worker: str) -> None:
        self.settings = settings
        self.plan = plan
        self._worker = worker
        self._file = Path(plan.file)
        self._source = self._file.read_text(encoding="utf-8")
        self._specs: dict[str, OpSpec] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="faults-", dir=settings.scratch))
        self._killed: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        if settings.device == "cpu":
            # Casts are put right before code from outside runs.
            import triton  # noqa: F401

    def stand(self, op: str, check: str, case: str) -> dict[str, Any]:
        """Run one check of the file as it is: its status, time, and the lines that it entered."""
        started = time.perf_counter()
        with _entering(str(self._file)) as at_import:
            module = _load(self._file, self._file.parent)
        with _entering(str(self._file)) as lines:
            status, detail = self._run(module, op, check, case, self.settings.limit(600.0))
        return {
            "job": [op, check, case],
            "status": status,
            "detail": detail,
            "seconds": time.perf_counter() - started,
            "lines": sorted(lines),
            "at_import": sorted(at_import),
        }

    def hunt(self, fault: Fault) -> dict[str, Any]:
        """Try one fault."""
        found = said(self._file, fault)
        if self.plan.deadline is not None and time.monotonic() > self.plan.deadline:
            return {**found, "status": "not_run"}
        jobs = self._entering_jobs(fault)
        if not jobs:
            return {**found, "status": "not_entered"}
        started = time.perf_counter()
        path = self._folder / self._file.name
        path.write_text(faulty(self._source, fault), encoding="utf-8")
        killer, detail = "", ""
        try:
            with TimeLimit(LEAST_SECONDS):
                module = contained(_load)(path, self._file.parent)
        except (Exception, OutOfTime) as error:
            killer, detail = "import", f"{type(error).__name__}: {say(error)}"
        tried = 0
        for job in [] if killer else self._in_order(jobs):
            tried += 1
            self._tried[job] += 1
            limit = max(LEAST_SECONDS, SLOWER * self.plan.entered[job]["seconds"])
            op, check, case = job.split("/")
            status, detail = self._run(module, op, check, case, limit)
            if status in ("failed", "error"):
                self._killed[job] += 1
                killer = job
                break
        return {
            **found,
            "status": "killed" if killer else "survived",
            "killer": killer,
            "detail": detail.splitlines()[-1] if killer and detail else "",
            "checks": tried,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def _entering_jobs(self, fault: Fault) -> list[str]:
        first, last = fault.lines
        reach = set(range(first, last + 1))
        everywhere = not fault.function or bool(reach & set(self.plan.at_import))
        if self.settings.device == "cuda":
            # Compiled kernels run no Python: nothing is known of their lines.
            everywhere = True
        return [
            job
            for job, seen in self.plan.entered.items()
            if everywhere or not reach.isdisjoint(seen["lines"])
        ]

    def _in_order(self, jobs: list[str]) -> list[str]:
        """By kills to be expected in a second; of a check not tried yet, that it kills half."""

        def rate(job: str) -> float:
            chance = (self._killed[job] + 1) / (self._tried[job] + 2)
            return -chance / max(1e-3, self.plan.entered[job]["seconds"])

        return sorted(jobs, key=rate)

    def _run(
        self, module: ModuleType, op: str, check: str, case: str, limit: float
    ) -> tuple[str, str]:
        spec = self._spec(op)
        subject = Subject(
            spec=spec,
            function=contained(getattr(module, op)),
            implementation=self.plan.file,
            device=torch.device(self.settings.device),
            profile=self.settings.profile,
            seed=self.settings.seed,
            peers=functools.partial(self._peer, module),
        )
        target = self._target(spec, check, case)
        try:
            scratch = Path(str(self.settings.scratch))
            with watchdog.watched(scratch, self._worker, limit + 1), TimeLimit(limit):
                outcome = run_target(subject, target)
        except OutOfTime as late:
            return "failed", f"did not end within {limit:g} s, last seen at {late}"
        return outcome.status, outcome.detail

    @staticmethod
    def _peer(module: ModuleType, op: str) -> Callable[..., Any] | None:
        function = getattr(module, op, None)
        return contained(function) if function is not None else None

    def _target(self, spec: OpSpec, check: str, case: str) -> Target:
        cuda = self.settings.device == "cuda"
        return next(
            target
            for target in targets(spec, self.settings.profile, cuda=cuda)
            if (target.check, target.name) == (check, case)
        )

    def _spec(self, op: str) -> OpSpec:
        """The spec, which builds each call once: the engine copies a call before it is written."""
        if op not in self._specs:
            spec = load_specs()[op]
            self._specs[op] = dataclasses.replace(spec, build=_kept(spec.build))
        return self._specs[op]


def _kept(build: Callable[[Any, int], dict[str, Any]]) -> Callable[[Any, int], dict[str, Any]]:
    calls: dict[tuple[str, int], dict[str, Any]] = {}

    def built(params: Any, seed: int) -> dict[str, Any]:
        key = (repr(params), seed)
        if key not in calls:
            if len(calls) >= KEPT_CALLS:
                calls.pop(next(iter(calls)))
            calls[key] = build(params, seed)
        return calls[key]

    return built


def said(file: Path, fault: Fault) -> dict[str, Any]:
    """A fault as a report names it."""
    return {
        "file": str(file),
        "line": fault.line,
        "column": fault.column + 1,
        "function": fault.function,
        "kind": fault.kind,
        "before": fault.before,
        "after": fault.after,
        "change": fault.change,
    }


def with_lines(plan: Plan, said: list[dict[str, Any]], deadline: float | None) -> Plan:
    """The plan of the second round, from what the first one said."""
    entered = {
        "/".join(one["job"]): {"lines": one["lines"], "seconds": one["seconds"]}
        for one in said
        if one["status"] == "passed"
    }
    at_import = sorted({line for one in said for line in one["at_import"]})
    return dataclasses.replace(plan, deadline=deadline, entered=entered, at_import=tuple(at_import))


def document(plan: Plan, seed: int, second: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `draftproof mutants --of`, from what the second round said.

    A fault whose process ended, by a crash or a hang, was killed.
    """
    found = faults(Path(plan.file).read_text(encoding="utf-8"))
    random.Random(seed).shuffle(found)
    results = []
    for number, fault in enumerate(found):
        result = second["said"].get(str(number))
        if result is None:
            lost = {"killer": "process", "detail": "the process that ran it ended"}
            status = "killed" if number in second["lost"] else "not_run"
            result = {**said(Path(plan.file), fault), "status": status, **lost}
        results.append(result)
    totals = {status: sum(one["status"] == status for one in results) for status in STATUSES}
    return {
        "schema": FAULTS_SCHEMA,
        "environment": second["environment"],
        "file": plan.file,
        "ops": list(plan.ops),
        "totals": {"made": len(results), **totals},
        "faults": sorted(results, key=lambda one: (one["line"], one["column"], one["after"])),
    }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A report for a terminal: the survivors, what no check enters, and the count."""
    for one in report["faults"]:
        if one["status"] == "survived":
            where = f"{one['file']}:{one['line']}"
            yield f"{where}: survived ({one['kind']}) {one['change']}"
    missed: dict[str, set[int]] = {}
    for one in report["faults"]:
        if one["status"] == "not_entered":
            missed.setdefault(one["function"] or "module", set()).add(one["line"])
    for function, at in missed.items():
        yield f"not entered: {function}, lines {', '.join(map(str, sorted(at)))}"
    totals = report["totals"]
    ran = totals["killed"] + totals["survived"]
    yield (
        f"{ran} of {totals['made']} faults run (seed {report['environment']['seed']}): "
        f"{totals['killed']} killed, {totals['survived']} survived; "
        f"{totals['not_entered']} in lines that no check enters, {totals['not_run']} not run"
    )
