"""Keep what a run brings: rows as they land, their grades, the receipt, the result at the end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jsonschema

from draftproof.accuracy import builds, runfolder
from draftproof.accuracy import receipt as receipts
from draftproof.accuracy.asking import Asked, now
from draftproof.accuracy.grading import Grade
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.protocol import Findings, prove_by_answers, unproven
from draftproof.accuracy.questions import Question, QuestionSet
from draftproof.accuracy.result import RunFacts, end_kind, limits_broken, make_result
from draftproof.accuracy.rows import Row, final_rows, keep, make_row
from draftproof.accuracy.runfolder import RECEIPT, RESULT, FolderError, RunFolder

# What a run that is resumed must share with its first session: what it is, and where it stands.
_SAME_ON_RESUME = (
    ("the lane", None, "lane_sha256"),
    ("the questions", "data", "questions_sha256"),
    ("the prompts", "data", "prompts_sha256"),
    ("the order of the questions", "data", "order_seed"),
    ("the model", None, "model"),
    ("the request", "protocol", "sampling_sent"),
    ("the grader's code", None, "grader"),
)


@dataclass(frozen=True)
class Plan:
    """What a run is about.

    Attributes
    ----------
    lane : Lane
    questions : QuestionSet
    prompts : dict of str to str
        Rendered text by question id.
    findings : Findings
        Of the checks before the first question.
    base_url : str
    order_seed : int or None
    label : str or None
    is_strict : bool
    secrets : frozenset of str
        Never written.
    command : list of str
        The command line.
    """

    lane: Lane
    questions: QuestionSet
    prompts: dict[str, str]
    findings: Findings
    base_url: str
    order_seed: int | None
    label: str | None
    is_strict: bool
    secrets: frozenset[str]
    command: list[str]

    @property
    def planned(self) -> int:
        """Number of responses planned."""
        return len(self.questions.questions) * self.lane.repeats


class RunBook:
    """The rows and papers of one run, in mind and in its folder.

    Parameters
    ----------
    plan : Plan
    folder : RunFolder
    resumes : bool
        Whether the folder holds earlier sessions to go on with.
    takes_other_build : bool
        Whether to go on though the server's build changed; the run is then no measurement.

    Raises
    ------
    FolderError
        If an earlier session was another run.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, resumes: bool, takes_other_build: bool
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.rows: list[Row] = []
        # Texts of earlier sessions that have no grade yet.
        self.to_grade: list[tuple[Row, str]] = []
        self._receipt = self._new_receipt()
        self._written: set[int] = set()
        self._build_changes: list[str] = []
        if resumes:
            self._take_up(takes_other_build)
        self.landed = {row.key for row in self.rows}
        self.right = sum(bool(row.correct) for row in self.rows)
        self.graded = sum(row.correct is not None for row in self.rows)
        # Of the counts, those by which a run is lost, kept as they grow.
        limit = plan.lane.sampling.max_tokens
        ends = Counter(end_kind(row, limit) for row in self.rows)
        del ends[None]
        self._breaking: dict[str, Any] = {
            "errors": Counter(row.error for row in self.rows if row.error is not None),
            "empty": sum(row.error is None and row.is_empty for row in self.rows),
            "odd_ends": ends,
        }
        self._models = {row.model for row in self.rows if row.model is not None}

    # What is planned, and what came of it.

    def pending(self, order: list[Question]) -> Iterator[tuple[Question, int]]:
        """Every question and repeat that has no answer yet, one repeat after the other."""
        answered = {key for key, row in final_rows(self.rows).items() if row.error is None}
        for repeat in range(self.plan.lane.repeats):
            for question in order:
                if (question.id, repeat) not in answered:
                    yield question, repeat

    def land(self, question: Question, repeat: int, asked: Asked) -> tuple[Row, str | None]:
        """Append the row of what came, and give the text that waits for its grade.

        Raises
        ------
        OSError
            If it cannot be written; the run then has no such row.
        """
        seed_base = self.plan.lane.sampling.seed_base
        if "seed_base" in self.plan.findings.protocol.dropped:
            seed_base = None
        seed = None if seed_base is None else seed_base + repeat
        session = len(self._receipt["sessions"]) - 1
        content = make_row(question.id, repeat, seed, session, asked)
        self.folder.append(content)
        row = keep(content)
        self.rows.append(row)
        self.landed.add(row.key)
        if row.error is not None:
            self._breaking["errors"][row.error] += 1
            return row, None
        self._breaking["empty"] += row.is_empty
        kind = end_kind(row, self.plan.lane.sampling.max_tokens)
        if kind is not None:
            self._breaking["odd_ends"][kind] += 1
        if row.model is not None:
            self._models.add(row.model)
        if row.correct is not None:
            self.graded += 1
            return row, None
        return row, content["text"]

    def take_grade(self, row: Row, grade: Grade) -> None:
        """Take the grade of a row's text."""
        row.take(grade)
        self.graded += 1
        self.right += grade.correct

    def lost(self) -> list[str]:
        """Why nothing that may still land makes a measurement of this run; nothing if it can."""
        reasons = limits_broken(self.plan.lane, self._breaking)
        if len(self._models) > 1:
            names = ", ".join(sorted(self._models))
            reasons.append(f"the model changed: the answers name {names}")
        if self._build_changes:
            reasons.append(f"the build changed: {'; '.join(self._build_changes)}")
        return reasons

    def see_build(self, build: dict[str, Any] | None) -> None:
        """Take what the server told of its build at the end; None where it could not be asked."""
        session = self._receipt["sessions"][-1]
        session["build_after"] = build
        if build is not None:
            changed = builds.changes(session["server"]["build"], build)
            self._build_changes += [f"while it ran, {change}" for change in changed]

    # The papers.

    def write_receipt(self) -> None:
        """Write the receipt, without secrets.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        receipt = receipts.redact(self._receipt, self.plan.secrets)
        receipts.validate(receipt)
        runfolder.write_json(self.folder.path / RECEIPT, receipt)

    def write_up(
        self, stopped: str | None, has_open_grades: bool, **session: Any
    ) -> dict[str, Any]:
        """Write rows, result and receipt at the end of a session.

        Parameters
        ----------
        stopped : str or None
            Why the session ended early.
        has_open_grades : bool
            Whether texts are left without a grade.
        session
            What else the receipt's session tells.

        Returns
        -------
        dict
            The result, also where the disk did not take it.
        """
        plan = self.plan
        prove_by_answers(plan.findings.fields, self.rows)
        self._receipt["sessions"][-1].update(ended=now(), stopped=stopped, **session)
        self._receipt["protocol"]["fields"] = _fields(plan.findings)
        self._receipt["times"]["ended"] = now()
        # What ends a run that is whole and graded takes nothing from it.
        is_whole = len(self.landed) == plan.planned and not has_open_grades
        facts = RunFacts(
            question_ids=[question.id for question in plan.questions.questions],
            stopped=None if is_whole else stopped,
            unproven=unproven(plan.findings.fields),
            flags=[*plan.findings.flags, *self._flags()],
            is_strict=plan.is_strict,
            model=plan.findings.protocol.model,
            label=self._receipt["label"],
            build_changes=self._build_changes,
        )
        try:
            # Rows first: a result must never speak of grades that are not there.
            self.folder.fill_in(self._new_grades())
        except OSError as error:
            path = self.folder.path / runfolder.RESPONSES
            reason = f"{path} cannot be written anew: {error.strerror}"
            facts = dataclasses.replace(facts, stopped=facts.stopped or reason)
        result = make_result(plan.lane, self.rows, facts)
        try:
            runfolder.write_json(self.folder.path / RESULT, result)
            self.write_receipt()
        except OSError as error:
            reason = f"{self.folder.path} cannot be written: {error.strerror}"
            facts = dataclasses.replace(facts, stopped=facts.stopped or reason)
            result = make_result(plan.lane, self.rows, facts)
        return result

    def _new_grades(self) -> Iterator[dict[str, Any] | None]:
        for number, row in enumerate(self.rows):
            is_new = row.extracted is not None or row.correct is not None
            yield row.graded() if is_new and number not in self._written else None

    def _flags(self) -> list[str]:
        flags = []
        mended = runfolder.lines_set_aside(self.folder.path)
        if mended:
            flags.append(f"{mended} bad lines of responses.jsonl were set aside by mend")
        last = self._receipt["sessions"][-1]
        if last.get("build_after") is None and not last["server"]["build"]:
            flags.append("unknown: what build answers (the server does not tell)")
        return flags

    def _take_up(self, takes_other_build: bool) -> None:
        """Go on with an earlier session: the same run of the same build, or not."""
        path = self.folder.path / RECEIPT
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            receipts.validate(before)
        except (OSError, ValueError) as error:
            raise FolderError(f"--resume: {path}: cannot be read: {error}") from error
        except jsonschema.ValidationError as error:
            raise FolderError(f"--resume: {path}: is no receipt: {error.message}") from error
        here = receipts.redact(self._receipt, self.plan.secrets)
        for what, section, field in _SAME_ON_RESUME:
            old = (before[section] if section else before)[field]
            new = (here[section] if section else here)[field]
            if old != new:
                raise FolderError(f"--resume: {what} changed: was {old}, is {new}")
        told = here["sessions"][-1]["server"]["build"]
        for number, session in enumerate(before["sessions"]):
            known = [session["server"]["build"], session["build_after"] or told]
            for build in known:
                changed = builds.changes(build, told)
                if changed and not takes_other_build:
                    raise FolderError(
                        f"--resume: the server's build changed: {'; '.join(changed)}; "
                        "--resume-anyway goes on, but it will be no measurement"
                    )
                for change in changed:
                    text = f"since session {number}, {change}"
                    if text not in self._build_changes:
                        self._build_changes.append(text)
        self._read_rows()
        self._receipt["sessions"] = [*before["sessions"], *self._receipt["sessions"]]
        self._receipt["server"] = before["server"]
        if self.plan.label is None:
            self._receipt["label"] = before["label"]
        self._receipt["times"]["started"] = before["times"]["started"]

    def _read_rows(self) -> None:
        known = {question.id for question in self.plan.questions.questions}
        for number, content in enumerate(runfolder.read_rows(self.folder.path)):
            row = keep(content)
            if row.question_id not in known or row.repeat >= self.plan.lane.repeats:
                raise FolderError(
                    f"--resume: {self.folder.path / runfolder.RESPONSES}:{number + 1}: the lane "
                    f"does not ask {row.question_id!r}, repeat {row.repeat}"
                )
            self.rows.append(row)
            if row.correct is not None or row.error is not None:
                self._written.add(number)
            else:
                self.to_grade.append((row, content["text"]))

    def _new_receipt(self) -> dict[str, Any]:
        plan, protocol = self.plan, self.plan.findings.protocol
        started = now()
        texts = [plan.prompts[question.id] for question in plan.questions.questions]
        server = {
            "base_url": receipts.without_userinfo(plan.base_url),
            "told": plan.findings.told,
            "build": plan.findings.build,
        }
        return {
            "schema": receipts.SCHEMA,
            "label": plan.label,
            "lane": plan.lane.model_dump(mode="json"),
            "lane_sha256": plan.lane.sha256,
            "model": plan.findings.model,
            "server": server,
            "protocol": {
                "path": protocol.path,
                "sampling_sent": protocol.sampling_sent(),
                "dropped": sorted(protocol.dropped),
                "fields": _fields(plan.findings),
            },
            "data": {
                "source": plan.questions.source,
                "sha256": plan.questions.sha256,
                "questions": len(texts),
                "questions_sha256": _sha256([asdict(one) for one in plan.questions.questions]),
                "prompts_sha256": _sha256(texts),
                "order_seed": plan.order_seed,
            },
            "grader": receipts.grader(plan.lane.scorer),
            **receipts.environment(),
            "times": {"started": started, "ended": None},
            "sessions": [
                {
                    "command": plan.command,
                    "started": started,
                    "ended": None,
                    "stopped": None,
                    "seconds": None,
                    "requests": None,
                    "retried": None,
                    "paused_s": None,
                    "client_cpu_s": None,
                    "server": server,
                    "build_after": None,
                }
            ],
        }


def _fields(findings: Findings) -> dict[str, Any]:
    return {name: asdict(finding) for name, finding in findings.fields.items()}


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
