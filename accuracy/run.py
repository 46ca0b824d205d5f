"""Run a lane against a live server: ask everything planned, keep every answer, end in a result."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
import json
import random
import signal
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy import runfolder
from draftproof.accuracy.client import PROBE_S, Answer, Client, RequestFailed
from draftproof.accuracy.grading import Grade, GradingProcess
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.prompts import few_shot_prefix, renderer
from draftproof.accuracy.protocol import Findings, check_server, prove_by_answers, unproven
from draftproof.accuracy.questions import Question, QuestionSet, load_questions
from draftproof.accuracy.result import RunFacts, is_empty, make_result
from draftproof.accuracy.runfolder import RECEIPT, RESULT, FolderError, RunFolder

# Attempts at one answer; only a failed connection is tried again.
_ATTEMPTS = 3
_BACKOFF_S = 0.5
# A server that answers none of so many probes in a row is gone.
_PROBES = 3
_PROBE_PAUSE_S = 1.0
# Silence on all streams after which the server is asked whether it is alive.
_SILENCE_S = 5.0
_WATCH_EVERY_S = 0.2
# So many failures in a row, and no answer between them, end a run.
_FAILURES_IN_A_ROW = 20
# How long a stopped run waits for grades: a signal must be obeyed within two seconds.
_LAST_GRADES_S = 0.5
_PLAIN_PROGRESS_EVERY_S = 10.0


class Interrupted(RuntimeError):
    """A signal came before the first question was asked."""


@dataclass(frozen=True)
class RunOptions:
    """What a user asks for.

    Attributes
    ----------
    lane : Lane
    base_url, model, api_key : str
        The server; `model` None takes its only one.
    data : Path or None
        A local JSONL instead of fetching the set.
    out : Path
        Parent of a new run folder.
    resume : Path or None
        A run folder to go on with.
    order_seed : int or None
        Ask the questions in the order that this seed shuffles them to.
    is_strict : bool
        Whether an unproven protocol is no measurement.
    command : list of str
        The command line, for the receipt.
    """

    lane: Lane
    base_url: str
    model: str | None
    api_key: str | None
    data: Path | None
    out: Path
    resume: Path | None
    order_seed: int | None
    is_strict: bool
    command: list[str]


@dataclass(frozen=True)
class Outcome:
    """Where a run lies and what came out."""

    folder: Path
    result: dict[str, Any]


def run_lane(options: RunOptions, console: Console) -> Outcome:
    """Run a lane to its end, or to the end that the server, the disk or a signal makes.

    Parameters
    ----------
    options : RunOptions
        What to run.
    console : Console
        For progress: a bar on a terminal, plain lines elsewhere.

    Returns
    -------
    Outcome
        Its result says whether it is a measurement.

    Raises
    ------
    ValueError
        For bad input and servers that do not fit (before anything is asked).
    ServerFailed, Interrupted
        If the server fails at the checks, or a signal comes during them.
    """
    questions = load_questions(options.lane, options.data)
    render = renderer(options.lane, questions)
    prompts = {question.id: render(question) for question in questions.questions}
    # Looked up before the run, so that the end of a run that is stopped does not wait for it.
    receipts.environment()
    # The libraries' objects stay to the end: neither the run nor its exit need look through them
    # (without this the exit takes over a second on a busy machine).
    gc.freeze()
    return asyncio.run(_run(options, console, questions, prompts))


async def _run(
    options: RunOptions, console: Console, questions: QuestionSet, prompts: dict[str, str]
) -> Outcome:
    lane = options.lane
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_signal(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number.name)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    client = Client(
        options.base_url,
        options.api_key,
        connect_s=lane.timeouts.connect_s,
        probe_s=min(PROBE_S, lane.timeouts.idle_s),
        connections=lane.concurrency,
    )
    grading = GradingProcess(lane.scorer)
    folder = RunFolder(options.resume) if options.resume else None
    try:
        await grading.start()
        warm_up = few_shot_prefix(questions.demonstrations) or None
        checks = asyncio.create_task(
            check_server(client, lane, list(prompts.values()), warm_up, options.model)
        )
        first: set[asyncio.Future[Any]] = {checks, stop}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            checks.cancel()
            await asyncio.gather(checks, return_exceptions=True)
            raise Interrupted(f"{stop.result()} before the first question was asked")
        findings = checks.result()
        folder = folder or RunFolder(runfolder.create(options.out, lane))
        run = _Run(options, console, questions, prompts, client, grading, findings, folder)
        return await run.to_the_end(stop)
    finally:
        await grading.stop()
        await client.close()
        if folder is not None:
            folder.close()


class _Run:
    """One session of asking: state shared by the workers, the watch and the grader."""

    def __init__(
        self,
        options: RunOptions,
        console: Console,
        questions: QuestionSet,
        prompts: dict[str, str],
        client: Client,
        grading: GradingProcess,
        findings: Findings,
        folder: RunFolder,
    ) -> None:
        self.options = options
        self.lane = options.lane
        self.console = console
        self.questions = questions
        self.prompts = prompts
        self.client = client
        self.grading = grading
        self.findings = findings
        self.folder = folder
        self.labels = {question.id: question.label for question in questions.questions}
        self.rows: list[dict[str, Any]] = []
        self.receipt = self._new_receipt()
        if options.resume is not None:
            self._take_up()
        self.pending = self._plan()
        self.stopped: str | None = None
        self.workers: list[asyncio.Task[None]] = []
        self.open_grades: set[asyncio.Future[Grade]] = set()
        self.failures_in_a_row = 0
        self.last_progress = time.monotonic()
        self.alive_check: asyncio.Task[bool] | None = None
        self.requests = 0
        self.landed = {(row["question_id"], row["repeat"]) for row in self.rows}
        self.show = _Progress(console, self.lane, self.planned)
        self.right = sum(bool(row["correct"]) for row in self.rows)
        self.graded = sum(row["correct"] is not None for row in self.rows)

    # What is planned.

    def _plan(self) -> deque[tuple[Question, int]]:
        """Every question and repeat that has no answer yet, one repeat after the other."""
        order = list(self.questions.questions)
        if self.options.order_seed is not None:
            random.Random(self.options.order_seed).shuffle(order)
        answered = {
            key for key, row in runfolder.final_rows(self.rows).items() if row["error"] is None
        }
        return deque(
            (question, repeat)
            for repeat in range(self.lane.repeats)
            for question in order
            if (question.id, repeat) not in answered
        )

    def _take_up(self) -> None:
        """Go on with an earlier session: same lane, questions, texts, model and request, or not."""
        path = self.folder.path / RECEIPT
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            receipts.validate(before)
        except (OSError, ValueError) as error:
            raise FolderError(f"--resume: {path}: cannot be read: {error}") from error
        except jsonschema.ValidationError as error:
            raise FolderError(f"--resume: {path}: is no receipt: {error.message}") from error
        now = receipts.redact(self.receipt, self._secrets())
        for what, section, field in (
            ("the lane", None, "lane_sha256"),
            ("the questions", "data", "questions_sha256"),
            ("the prompts", "data", "prompts_sha256"),
            ("the order of the questions", "data", "order_seed"),
            ("the model", None, "model"),
            ("the request", "protocol", "sampling_sent"),
            ("sgl-eval's code", None, "sgl_eval_files"),
        ):
            old = (before[section] if section else before)[field]
            new = (now[section] if section else now)[field]
            if old != new:
                raise FolderError(f"--resume: {what} changed: was {old}, is {new}")
        self.rows = runfolder.read_rows(self.folder.path)
        self.receipt["sessions"] = [*before["sessions"], *self.receipt["sessions"]]
        self.receipt["times"]["started"] = before["times"]["started"]

    # Asking.

    async def to_the_end(self, signalled: asyncio.Future[str]) -> Outcome:
        """Ask everything planned, then write result, rows and receipt."""
        self._write_receipt()
        self.console.print(f"run folder: {self.folder.path}", soft_wrap=True)
        started, cpu_started_s = time.monotonic(), time.process_time()
        signalled.add_done_callback(lambda _: self.stop(f"stopped by {signalled.result()}"))
        for row in self.rows:
            if row["error"] is None and row["correct"] is None:
                self._send_to_grader(row)
        watch = asyncio.create_task(self._watch())
        with self.show:
            self._show_progress()
            self.workers = [
                asyncio.create_task(self._work())
                for _ in range(min(self.lane.concurrency, len(self.pending)))
            ]
            if signalled.done():
                self.stop(f"stopped by {signalled.result()}")
            outcomes = await asyncio.gather(*self.workers, return_exceptions=True)
            watch.cancel()
            await self._finish_grading()
            self.show.finish()
        for outcome in (*outcomes, *await asyncio.gather(watch, return_exceptions=True)):
            if isinstance(outcome, Exception):
                raise outcome
        session = self.receipt["sessions"][-1]
        cpu_s = time.process_time() - cpu_started_s + self.grading.cpu_s
        session.update(
            ended=_now(),
            stopped=self.stopped,
            seconds=time.monotonic() - started,
            requests=self.requests,
            client_cpu_s=cpu_s,
        )
        return self._write_up()

    @property
    def planned(self) -> int:
        return len(self.questions.questions) * self.lane.repeats

    def stop(self, reason: str) -> None:
        """End the run early; what is under way is given up and does not count as an error."""
        if self.stopped is None:
            self.stopped = reason
            for worker in self.workers:
                worker.cancel()

    async def _work(self) -> None:
        while self.pending and self.stopped is None:
            question, repeat = self.pending.popleft()
            await self._ask(question, repeat)

    async def _ask(self, question: Question, repeat: int) -> None:
        """Ask one question until there is a row about it, or the run is over."""
        protocol = self.findings.protocol
        body = protocol.body(self.prompts[question.id], repeat)
        started = _now()
        for attempt in range(1, _ATTEMPTS + 1):
            self.requests += 1
            try:
                answer = await self.client.ask(protocol.path, body)
            except RequestFailed as failure:
                if failure.is_transport:
                    if not await self._is_alive():
                        self.stop(f"the server is gone ({failure.kind}: {failure.detail})")
                        return
                    if attempt < _ATTEMPTS:
                        await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
                        continue
                self._land(question, repeat, attempt, started, Answer(), failure)
                return
            self._land(question, repeat, attempt, started, answer, None)
            return

    def _land(
        self,
        question: Question,
        repeat: int,
        attempt: int,
        started: str,
        answer: Answer,
        failure: RequestFailed | None,
    ) -> None:
        seed_base = self.lane.sampling.seed_base
        if "seed_base" in self.findings.protocol.dropped:
            seed_base = None
        row = {
            "question_id": question.id,
            "repeat": repeat,
            "seed": None if seed_base is None else seed_base + repeat,
            "session": len(self.receipt["sessions"]) - 1,
            "attempt": attempt,
            "started": started,
            "text": answer.text,
            "reasoning": answer.reasoning,
            "finish_reason": answer.finish_reason,
            "matched": answer.matched,
            "usage": None if failure else _usage(answer),
            "events": answer.events,
            "latency": {"first_s": answer.first_s, "total_s": answer.total_s},
            "extracted": None,
            "correct": None,
            "error": failure.kind if failure else None,
            "error_detail": failure.detail if failure else None,
        }
        if failure is None and (is_empty(row) or not answer.text):
            row["correct"] = False
        try:
            self.folder.append(row)
        except OSError as error:
            path = self.folder.path / runfolder.RESPONSES
            self.stop(f"{path} cannot be written: {error.strerror}")
            return
        self.rows.append(row)
        self.landed.add((question.id, repeat))
        self.last_progress = time.monotonic()
        if failure is not None:
            self.failures_in_a_row += 1
            if self.failures_in_a_row >= max(_FAILURES_IN_A_ROW, self.lane.concurrency):
                self._give_up()
        else:
            self.failures_in_a_row = 0
            if row["correct"] is None:
                self._send_to_grader(row)
            else:
                self.graded += 1
        self._show_progress()

    def _give_up(self) -> None:
        last = self.rows[-self.failures_in_a_row :]
        kinds = Counter(row["error"] for row in last)
        told = ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
        self.stop(
            f"the last {self.failures_in_a_row} requests all failed ({told}): "
            f"{last[-1]['error_detail']}"
        )

    # Watching.

    async def _watch(self) -> None:
        """End what is too slow or silent, and the run if the server is gone."""
        timeouts = self.lane.timeouts
        silence_s = min(_SILENCE_S, timeouts.idle_s)
        is_streamed = "stream" in self.findings.protocol.names()
        probe_at = 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now = time.monotonic()
            exchanges = list(self.client.exchanges)
            heard = max([self.last_progress, *(one.last_byte or 0.0 for one in exchanges)])
            if exchanges and now - heard > silence_s and now >= probe_at:
                if not await self._is_alive():
                    self.stop(f"the server is gone (silent, and {_PROBES} health probes failed)")
                    return
                probe_at = time.monotonic() + silence_s
            for one in exchanges:
                if timeouts.total_s is not None and now - one.started > timeouts.total_s:
                    one.end(
                        RequestFailed("timeout", f"no whole answer within {timeouts.total_s:g} s")
                    )
                # Before its first byte a request may wait its turn, as long as others get theirs.
                silent_since = one.last_byte or max(one.started, heard)
                if is_streamed and now - silent_since > timeouts.idle_s:
                    one.end(RequestFailed("stalled", f"silent for {timeouts.idle_s:g} s"))

    async def _is_alive(self) -> bool:
        """Whether the server answers one of a few probes; all who ask at once share them."""
        if self.alive_check is None or self.alive_check.done():
            self.alive_check = asyncio.create_task(self._probe())
        return await asyncio.shield(self.alive_check)

    async def _probe(self) -> bool:
        for probe in range(_PROBES):
            if probe:
                await asyncio.sleep(_PROBE_PAUSE_S)
            if await self.client.is_alive():
                return True
        return False

    # Grading.

    def _send_to_grader(self, row: dict[str, Any]) -> None:
        grade = self.grading.grade(row["text"], self.labels[row["question_id"]])
        self.open_grades.add(grade)
        grade.add_done_callback(lambda done: self._take_grade(row, done))

    def _take_grade(self, row: dict[str, Any], done: asyncio.Future[Grade]) -> None:
        self.open_grades.discard(done)
        if done.exception() is not None:
            self.stop(f"{done.exception()}: {row['question_id']}, repeat {row['repeat']}")
            return
        grade = done.result()
        row["extracted"], row["correct"] = grade.extracted, grade.correct
        if grade.published is not None:
            row["published"] = dict(zip(("extracted", "correct"), grade.published, strict=True))
        if grade.failure is not None:
            row["grader_failure"] = grade.failure
        self.graded += 1
        self.right += grade.correct
        self._show_progress()

    async def _finish_grading(self) -> None:
        """Wait for the last grades; not for long if the run was stopped: resume makes up for it."""
        stopped_at = None
        while self.open_grades:
            if self.stopped is not None:
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > _LAST_GRADES_S:
                    return
            await asyncio.wait(self.open_grades, timeout=_WATCH_EVERY_S)

    # Writing.

    def _show_progress(self) -> None:
        self.show.update(len(self.landed), self.right, self.graded)

    def _write_up(self) -> Outcome:
        prove_by_answers(self.findings.fields, self.rows)
        # A signal that comes when all is done and graded takes nothing from the run.
        is_whole = len(self.landed) == self.planned and not self.open_grades
        facts = RunFacts(
            question_ids=[question.id for question in self.questions.questions],
            stopped=None if is_whole else self.stopped,
            unproven=unproven(self.findings.fields),
            flags=self.findings.flags,
            is_strict=self.options.is_strict,
        )
        self.receipt["protocol"]["fields"] = _fields(self.findings)
        self.receipt["times"]["ended"] = _now()
        try:
            # Rows first: a result must never speak of grades that are not there.
            self.folder.replace_rows(self.rows)
        except OSError as error:
            path = self.folder.path / runfolder.RESPONSES
            self.stop(f"{path} cannot be written anew: {error.strerror}")
            facts = dataclasses.replace(facts, stopped=self.stopped)
        result = make_result(self.lane, self.rows, facts)
        try:
            runfolder.write_json(self.folder.path / RESULT, result)
            self._write_receipt()
        except OSError as error:
            reason = f"{self.folder.path} cannot be written: {error.strerror}"
            facts = dataclasses.replace(facts, stopped=facts.stopped or reason)
            result = make_result(self.lane, self.rows, facts)
        return Outcome(self.folder.path, result)

    def _secrets(self) -> frozenset[str]:
        return frozenset({self.options.api_key} if self.options.api_key else ())

    def _write_receipt(self) -> None:
        receipt = receipts.redact(self.receipt, self._secrets())
        receipts.validate(receipt)
        runfolder.write_json(self.folder.path / RECEIPT, receipt)

    def _new_receipt(self) -> dict[str, Any]:
        protocol = self.findings.protocol
        started = _now()
        texts = [self.prompts[question.id] for question in self.questions.questions]
        return {
            "schema": receipts.SCHEMA,
            "lane": self.lane.model_dump(mode="json"),
            "lane_sha256": self.lane.sha256,
            "model": self.findings.model,
            "server": {
                "base_url": receipts.without_userinfo(self.client.root),
                "told": self.findings.told,
            },
            "protocol": {
                "path": protocol.path,
                "sampling_sent": protocol.sampling_sent(),
                "dropped": sorted(protocol.dropped),
                "fields": _fields(self.findings),
            },
            "data": {
                "source": self.questions.source,
                "sha256": self.questions.sha256,
                "questions": len(texts),
                "questions_sha256": _sha256([asdict(one) for one in self.questions.questions]),
                "prompts_sha256": _sha256(texts),
                "order_seed": self.options.order_seed,
            },
            **receipts.environment(),
            "times": {"started": started, "ended": None},
            "sessions": [
                {
                    "command": self.options.command,
                    "started": started,
                    "ended": None,
                    "stopped": None,
                    "seconds": None,
                    "requests": None,
                    "client_cpu_s": None,
                }
            ],
        }


class _Progress:
    """Landed, right so far and time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, lane: Lane, planned: int) -> None:
        self._console = console
        self._name = lane.base or lane.name
        self._planned = planned
        self._bar: Progress | None = None
        self._shown_at = time.monotonic()
        self._line = ""
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(self._name),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[right]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=planned, right="")

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, landed: int, right: int, graded: int) -> None:
        so_far = f"right so far: {right} of {graded} graded"
        if self._bar is not None:
            self._bar.update(self._task, completed=landed, right=so_far)
            return
        self._line = f"{self._name}: {landed} of {self._planned} landed, {so_far}"
        if time.monotonic() - self._shown_at >= _PLAIN_PROGRESS_EVERY_S:
            self.finish()

    def finish(self) -> None:
        if self._line:
            self._shown_at = time.monotonic()
            self._console.print(self._line, soft_wrap=True)


def _usage(answer: Answer) -> dict[str, Any] | None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
    usage = {name: getattr(answer, name) for name in (*names, "spec_verify_ct")}
    return usage if any(value is not None for value in usage.values()) else None


def _fields(findings: Findings) -> dict[str, Any]:
    return {name: asdict(finding) for name, finding in findings.fields.items()}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
