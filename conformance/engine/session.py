"""What one run of the suite is about: options resolved, jobs made, results gathered."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftproof.conformance.engine import compiling, known, watchdog
from draftproof.conformance.engine.known import Entry

VERIFY_SCHEMA = "draftproof.verify/1"

STATUSES = ("passed", "failed", "error", "skipped", "not_provided")

MAX_STRIKES = {"crash": 8, "timeout": 3}
"""Cases of one check of one op that may crash, and that may run out of time, before the rest of
that check of that op is not run: a crash costs a new worker, a hang its whole time limit."""

ENDS = ("", *MAX_STRIKES)
"""How a failed check may have ended beside being wrong."""

TIMEOUT_SECONDS = {"quick": 60, "full": 300, "soak": 1800}
"""Time limit of one check of an implementation from outside."""


@dataclass(frozen=True)
class Result:
    """One line of a report."""

    op: str
    check: str
    case: str
    implementation: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    case_file: str | None = None
    places: tuple[dict[str, Any], ...] = ()
    """Where the wrong elements lie, a picture of each tensor (`engine.places`)."""
    ended: str = ""
    """ "crash" or "timeout", of a failed check that did not come to an end."""
    known: str | None = None
    """Of a failure that the file of known differences lists: its reason."""
    compiled: tuple[dict[str, Any], ...] = ()
    """What Triton compiled or loaded for it (`engine.compiling`)."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: one of {STATUSES} is due, got {self.status!r}")
        if self.ended not in ENDS:
            raise ValueError(f"ended: one of {ENDS} is due, got {self.ended!r}")


@dataclass(frozen=True)
class Settings:
    """The options of a run, resolved.

    Parameters
    ----------
    implementation : str
        As given to `--impl`.
    ops : tuple of str
        The ops to run; empty: all of ours. (The controlling process of a spread run does not know
        them: it need not load torch.)
    device : str
        "cpu" or "cuda".
    profile : str
    seed : int
    failures : str
        Folder for case files of failing calls.
    provided : tuple of str, optional
        For code from outside: the ops that it defines, found in a child process.
    scratch : str, optional
        Folder in which workers leave notes about what they are running.
    specs : tuple of str
        Spec files whose ops are known beside ours.
    checks : tuple of str
        The checks to run; empty: all.
    timeout : float, optional
        Limit of one check in seconds; None: as the profile has it, for code from outside.
    known : str, optional
        File of known differences.
    lacking, about : mapping
        Of code from outside: why it has no function for an op, and what a record should say of it.
    faults : str, optional
        Plan of a round of faults made by rule (`conformance/faults`).
    """

    implementation: str
    ops: tuple[str, ...]
    device: str
    profile: str
    seed: int
    failures: str
    provided: tuple[str, ...] | None = None
    scratch: str | None = None
    specs: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    timeout: float | None = None
    known: str | None = None
    lacking: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    faults: str | None = None

    def limit(self, own: float = 0.0) -> float:
        """How long a check may take, in seconds; 0: no limit.

        Parameters
        ----------
        own : float
            What its case asks for.
        """
        if self.timeout is not None:
            return self.timeout
        return max(TIMEOUT_SECONDS[self.profile], own) if self.provided is not None else 0.0

    def chosen(self) -> tuple[str, ...]:
        """The ops to run, by name."""
        from draftproof.conformance.engine.registry import op_names

        return self.ops or op_names()

    def dump(self) -> str:
        """As JSON, for a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Settings:
        """From `dump`."""
        values = json.loads(text)
        for name in ("ops", "provided", "specs", "checks"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Job:
    """One test item: a check of an op on a case."""

    op: str
    check: str
    case: str

    @property
    def id(self) -> str:
        """The parameter part of the test's name."""
        return f"{self.op}-{self.check}-{self.case}"

    @classmethod
    def from_node(cls, node: str) -> Job | None:
        """The job of a test name such as `test_ops.py::test_op[c128_cleanup-eager-wrap]`."""
        _, opened, rest = node.partition("::test_op[")
        parts = rest.removesuffix("]").split("-")
        return cls(*parts) if opened and len(parts) == 3 else None


def jobs(settings: Settings) -> list[Job]:
    """Every job of a run: what is legal of all ops, then `invalid`, which is the likeliest to crash
    code that does not validate.
    """
    from draftproof.conformance.engine.checks import targets
    from draftproof.conformance.engine.registry import load_specs

    specs = load_specs()
    found = []
    for op in settings.chosen():
        if settings.provided is not None and op not in settings.provided:
            found.append(Job(op, "all", "not_provided"))
            continue
        cuda = settings.device == "cuda"
        for target in targets(specs[op], settings.profile, cuda=cuda):
            if not settings.checks or target.check in settings.checks:
                found.append(Job(op, target.check, target.name))
    return sorted(found, key=lambda job: job.check == "invalid")


class Runner:
    """Runs jobs in this process."""

    def __init__(self, settings: Settings, worker: str = "main") -> None:
        self.settings = settings
        self._worker = worker
        self._implementation: Any = None
        self._known = known.read(settings.known) if settings.known else ()

    def run(self, job: Job) -> Result:
        """Run one job; what it raises is a fault of the suite or of the machine."""
        result = self._run(job)
        if result.status != "failed":
            return result
        result = mark_known(result, self._known)
        if result.ended and result.known is None:
            strike(self.settings, job, result.ended)
        return result

    def _run(self, job: Job) -> Result:
        from draftproof.conformance.engine.containment import OutOfTime
        from draftproof.conformance.engine.implementations import BadImplementation

        said = functools.partial(Result, job.op, job.check, job.case, self.settings.implementation)
        lacking = f"{self.settings.implementation} has no {job.op}"
        if reason := self.settings.lacking.get(job.op):
            lacking += f": {reason}"
        if job.check == "all":
            return said("not_provided", detail=lacking)
        for ended, most in MAX_STRIKES.items():
            if (strikes := self.strikes(job, ended)) >= most:
                verb = {"crash": "crashed", "timeout": "ran out of time"}[ended]
                reason = f"not run: {strikes} cases of {job.op}/{job.check} {verb} before"
                return said("skipped", detail=reason)
        try:
            subject = self._subject(job.op)
        except BadImplementation as error:
            return said("error", detail=str(error))
        if subject is None:
            return said("not_provided", detail=lacking)
        limit = self._limit(job)
        started = time.perf_counter()
        compiled: list[dict[str, Any]] = []
        try:
            with contextlib.ExitStack() as stack:
                # Under the interpreter nothing is compiled.
                if self.settings.device != "cpu":
                    compiled = stack.enter_context(compiling.noted())
                outcome = self._in_turn(subject, job, limit)
        except OutOfTime as late:
            detail = (
                f"{job.op} / {job.check} / {job.case}, implementation "
                f"{self.settings.implementation}\n"
                f"did not end within {limit:g} s, last seen at {late}"
            )
            if last := last_note(self.settings, self._worker):
                detail += f"\n  {last}"
            seconds = round(time.perf_counter() - started, 4)
            return said("failed", seconds, detail, ended="timeout")
        return said(
            outcome.status,
            round(outcome.seconds, 4),
            outcome.detail,
            None if outcome.case_file is None else str(outcome.case_file),
            outcome.places,
            compiled=tuple(compiled),
        )

    def _subject(self, op: str) -> Any:
        """The implementation's function for an op, ready to be checked; None if it has none."""
        import torch

        from draftproof.conformance.engine.implementations import resolve
        from draftproof.conformance.engine.registry import load_specs
        from draftproof.conformance.engine.running import Subject

        if self._implementation is None:
            if self.settings.device == "cpu":
                # Also for code that imports it inside a call: casts are put right before.
                import triton  # noqa: F401
            self._implementation = resolve(self.settings.implementation)
        function = self._function(op)
        if function is None:
            return None
        return Subject(
            spec=load_specs()[op],
            function=function,
            implementation=self.settings.implementation,
            device=torch.device(self.settings.device),
            profile=self.settings.profile,
            seed=self.settings.seed,
            failures=Path(self.settings.failures),
            graph_reason=self._implementation.graph_reason(op),
            named_errors=not self._implementation.outside,
            note=self.note,
            peers=self._function,
        )

    def _function(self, op: str) -> Any:
        """The implementation's function for an op, None if it has none."""
        from draftproof.conformance.engine.containment import contained

        function = self._implementation.get(op)
        if function is None or self.settings.provided is None:
            return function
        return contained(function)

    def _limit(self, job: Job) -> float:
        from draftproof.conformance.engine.registry import load_specs

        spec = load_specs()[job.op]
        own = [case.seconds for case in spec.cases if case.name == job.case]
        own += [
            case.seconds
            for law in spec.laws
            for case in law.cases
            if f"{law.name}.{case.name}" == job.case
        ]
        return self.settings.limit(max(own, default=0.0))

    def _in_turn(self, subject: Any, job: Job, limit: float) -> Any:
        """Run a job beside those of other workers; alone where it lacks device memory so."""
        from draftproof.conformance.engine import memory

        shared = self.settings.device == "cuda" and self._worker != "main"
        folder = Path(self.settings.scratch) if shared and self.settings.scratch else None
        with memory.turn(folder, alone=False):
            outcome = self._limited(subject, job, limit)
            memory.give_back()
        if folder is not None and memory.DEVICE in outcome.detail:
            with memory.turn(folder, alone=True):
                outcome = self._limited(subject, job, limit)
                memory.give_back()
        return outcome

    def _limited(self, subject: Any, job: Job, limit: float) -> Any:
        from draftproof.conformance.engine.checks import run_target, targets
        from draftproof.conformance.engine.containment import TimeLimit

        cuda = self.settings.device == "cuda"
        target = next(
            target
            for target in targets(subject.spec, self.settings.profile, cuda=cuda)
            if (target.check, target.name) == (job.check, job.case)
        )
        with contextlib.ExitStack() as stack:
            if limit and self.settings.scratch and self._worker != "main":
                folder = Path(self.settings.scratch)
                stack.enter_context(watchdog.watched(folder, self._worker, limit))
            stack.enter_context(TimeLimit(limit))
            return run_target(subject, target)

    def _scratch(self, name: str) -> Path | None:
        folder = self.settings.scratch
        return None if folder is None else Path(folder) / name

    def note(self, text: str) -> None:
        """Leave word of what is about to run, for the report of a crash."""
        if path := self._scratch(f"note-{self._worker}"):
            path.write_text(text)

    def strikes(self, job: Job, ended: str) -> int:
        """How many cases of a job's op and check ended so, in any worker."""
        path = self._scratch(_strikes(job, ended))
        return len(path.read_text().split()) if path and path.is_file() else 0


def _strikes(job: Job, ended: str) -> str:
    return f"strikes-{job.op}-{job.check}-{ended}"


def strike(settings: Settings, job: Job, ended: str) -> None:
    """Remember that a job crashed or ran out of time."""
    if settings.scratch:
        with (Path(settings.scratch) / _strikes(job, ended)).open("a") as file:
            file.write(f"{job.id}\n")


def mark_known(result: Result, entries: Sequence[Entry]) -> Result:
    """The same result, with the reason of the entry that lists it, if one does."""
    entry = next((entry for entry in entries if entry.covers(result)), None)
    return replace(result, known=entry.reason) if entry else result


def last_note(settings: Settings, worker: str) -> str:
    """What a worker said before it ended."""
    path = Path(settings.scratch or "") / f"note-{worker}"
    return path.read_text() if settings.scratch and path.is_file() else ""


@dataclass
class Report:
    """The results of a run, and what they add up to."""

    results: list[Result] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    """The ops of the run, in order."""

    stale: list[str] = field(default_factory=list)
    """What is wrong with the file of known differences: one line for each entry that passes or
    matches nothing."""

    def totals(self) -> dict[str, int]:
        """Count by status; known differences apart from the other failures."""
        counts = dict.fromkeys((*STATUSES, "known"), 0)
        for result in self.results:
            counts["known" if result.known is not None else result.status] += 1
        return counts

    def compiled(self) -> list[dict[str, Any]]:
        """What Triton compiled, by op and kernel (`engine.compiling.by_kernel`)."""
        return compiling.by_kernel(
            (result.op, one) for result in self.results for one in result.compiled
        )

    @property
    def compared(self) -> int:
        """Checks in which an implementation was held against its contract."""
        return sum(result.status in ("passed", "failed") for result in self.results)

    def unexercised(self, ops: Iterable[str], checks: Iterable[str]) -> list[tuple[str, str]]:
        """(op, check) pairs in which nothing was compared."""
        done = {
            (result.op, result.check)
            for result in self.results
            if result.status in ("passed", "failed")
        }
        # Few ops have laws: where one has none, nothing is missing.
        lawful = {result.op for result in self.results if result.check == "laws"}
        return [
            (op, check)
            for op in ops
            for check in checks
            if (op, check) not in done and (check != "laws" or op in lawful)
        ]

    def document(self, settings: Settings, environment: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of `verify --json`."""
        return {
            "schema": VERIFY_SCHEMA,
            "environment": {
                **environment,
                "device_kind": settings.device,
                "profile": settings.profile,
                "seed": settings.seed,
                **({"specs": _digests(settings.specs)} if settings.specs else {}),
                **({"known": _digests((settings.known,))} if settings.known else {}),
                **({settings.implementation: settings.about} if settings.about else {}),
            },
            "results": [_written(result) for result in self.results],
            "totals": {**self.totals(), "compared": self.compared},
            "compiled": self.compiled(),
            **({"stale": self.stale} if settings.known else {}),
        }


def _written(result: Result) -> dict[str, Any]:
    """A result as it is written: only mismatches have pictures, and kernels are summed up."""
    values = asdict(result)
    del values["compiled"]
    return {name: value for name, value in values.items() if name != "places" or value}


def _digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of spec files, by name."""
    paths = [Path(file).expanduser() for file in files]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
