"""What one run of the suite is about: options resolved, jobs made, results gathered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERIFY_SCHEMA = "draftproof.verify/1"

STATUSES = ("passed", "failed", "error", "skipped", "not_provided")

MAX_STRIKES = 3
"""Checks of one op that may crash or hang before the rest of that op is not run."""

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

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: one of {STATUSES} is due, got {self.status!r}")


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
        for name in ("ops", "provided", "specs"):
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
    """Every job of a run, in the order in which they run."""
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
            found.append(Job(op, target.check, target.name))
    return found


class Runner:
    """Runs jobs in this process."""

    def __init__(self, settings: Settings, worker: str = "main") -> None:
        self.settings = settings
        self._worker = worker
        self._implementation: Any = None

    def run(self, job: Job) -> Result:
        """Run one job; what it raises is a fault of the suite or of the machine."""
        import torch

        from draftproof.conformance.engine.checks import run_target, targets
        from draftproof.conformance.engine.implementations import BadImplementation, resolve
        from draftproof.conformance.engine.registry import load_specs
        from draftproof.conformance.engine.running import Subject

        name = self.settings.implementation
        if job.check == "all":
            return Result(
                job.op, "all", job.case, name, "not_provided", detail=f"{name} has no {job.op}"
            )
        strikes = self.strikes(job.op)
        if strikes >= MAX_STRIKES:
            reason = f"not run: {strikes} checks of {job.op} crashed or hung before"
            return Result(job.op, job.check, job.case, name, "skipped", detail=reason)
        try:
            if self._implementation is None:
                if self.settings.device == "cpu":
                    # Also for code that imports it inside a call: casts are put right before.
                    import triton  # noqa: F401
                self._implementation = resolve(name)
            function = self._implementation.get(job.op)
        except BadImplementation as error:
            return Result(job.op, job.check, job.case, name, "error", detail=str(error))
        if function is None:
            return Result(
                job.op, job.check, job.case, name, "not_provided", detail=f"{name} has no {job.op}"
            )
        spec = load_specs()[job.op]
        cuda = self.settings.device == "cuda"
        target = next(
            target
            for target in targets(spec, self.settings.profile, cuda=cuda)
            if (target.check, target.name) == (job.check, job.case)
        )
        subject = Subject(
            spec=spec,
            function=function,
            implementation=name,
            device=torch.device(self.settings.device),
            profile=self.settings.profile,
            seed=self.settings.seed,
            failures=Path(self.settings.failures),
            graph_reason=self._implementation.graph_reason(job.op),
            named_errors=not self._implementation.outside,
            note=self.note,
        )
        outcome = run_target(subject, target)
        return Result(
            job.op,
            job.check,
            job.case,
            name,
            outcome.status,
            round(outcome.seconds, 4),
            outcome.detail,
            None if outcome.case_file is None else str(outcome.case_file),
        )

    def _scratch(self, name: str) -> Path | None:
        folder = self.settings.scratch
        return None if folder is None else Path(folder) / name

    def note(self, text: str) -> None:
        """Leave word of what is about to run, for the report of a crash."""
        if path := self._scratch(f"note-{self._worker}"):
            path.write_text(text)

    def strikes(self, op: str) -> int:
        """How many checks of an op crashed or hung so far, in any worker."""
        path = self._scratch(f"strikes-{op}")
        return len(path.read_text().split()) if path and path.is_file() else 0


def strike(settings: Settings, job: Job) -> None:
    """Remember that a job crashed or hung."""
    if settings.scratch:
        with (Path(settings.scratch) / f"strikes-{job.op}").open("a") as file:
            file.write(f"{job.id}\n")


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

    def totals(self) -> dict[str, int]:
        """Count by status."""
        counts = dict.fromkeys(STATUSES, 0)
        for result in self.results:
            counts[result.status] += 1
        return counts

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
            },
            "results": [asdict(result) for result in self.results],
            "totals": {**self.totals(), "compared": self.compared},
        }


def _digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of spec files, by name."""
    paths = [Path(file).expanduser() for file in files]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
