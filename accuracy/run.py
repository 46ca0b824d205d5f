"""Run a lane against a live server: ask everything planned, keep every answer, end in a result."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftproof.accuracy import builds, runfolder
from draftproof.accuracy import receipt as receipts
from draftproof.accuracy.asking import Asker, Pool, asking
from draftproof.accuracy.grading import Grade, GradingProcess
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.progress import RunProgress
from draftproof.accuracy.prompts import few_shot_prefix, renderer
from draftproof.accuracy.protocol import check_server
from draftproof.accuracy.questions import Question, QuestionSet, load_questions
from draftproof.accuracy.reading import RequestFailed
from draftproof.accuracy.rows import Row
from draftproof.accuracy.runfolder import FolderError, RunFolder
from draftproof.accuracy.writing import Plan, RunBook

# So many failures in a row, and no answer between them, end a run.
_FAILURES_IN_A_ROW = 20
# How long a stopped run waits for grades: a signal must be obeyed within two seconds.
_LAST_GRADES_S = 0.5
_SHOW_EVERY_S = 0.2
# Checks that take longer are told of.
_QUIET_S = 1.0


class Interrupted(RuntimeError):
    """A signal came, or the time was over, before the first question was asked."""


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
    takes_other_build : bool
        Go on though the server's build changed.
    order_seed : int or None
        Ask the questions in the order that this seed shuffles them to.
    is_strict : bool
        Whether an unproven protocol is no measurement.
    label : str or None
        What the user calls this run.
    max_minutes : float or None
        End the run as incomplete after so long; the lane's own bound stands beside it.
    secrets : frozenset of str
        More of what must never be written, beside the key.
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
    takes_other_build: bool
    order_seed: int | None
    is_strict: bool
    label: str | None
    max_minutes: float | None
    secrets: frozenset[str]
    command: list[str]


@dataclass(frozen=True)
class Outcome:
    """Where a run lies and what came out."""

    folder: Path
    result: dict[str, Any]


class Stop:
    """The one reason to end early: a signal, or the time; who waits for it is told."""

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def give(self, reason: str) -> None:
        if not self.reason.done():
            self.reason.set_result(reason)

    def on_signals(self) -> None:
        """Take SIGINT and SIGTERM as the reason."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.give, f"stopped by {number.name}")

    def after(self, seconds: float, reason: str) -> None:
        """Take the time's end as the reason."""
        asyncio.get_running_loop().call_later(seconds, self.give, reason)


def run_lane(options: RunOptions, console: Console) -> Outcome:
    """Run a lane to its end, or to the end that the server, the disk, the time or a signal makes.

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
    ServerFailed, ServerGone, Interrupted
        If the server fails at the checks, or the time or a signal ends them.
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
    stop = Stop()
    stop.on_signals()
    stop.after(lane.timeouts.run_s, f"the run took {lane.timeouts.run_s:g} s, the lane's bound")
    if options.max_minutes is not None:
        reason = f"the run took {options.max_minutes:g} minutes (--max-minutes)"
        stop.after(60 * options.max_minutes, reason)
    async with contextlib.AsyncExitStack() as opened:
        folder = None
        if options.resume is not None:
            folder = RunFolder(options.resume)
            opened.callback(folder.close)
        asker = await opened.enter_async_context(
            asking(options.base_url, options.api_key, lane.timeouts, lane.concurrency)
        )
        grading = GradingProcess(lane.scorer)
        opened.push_async_callback(grading.stop)
        await grading.start()
        warm_up = few_shot_prefix(questions.demonstrations) or None
        checks = asyncio.create_task(
            check_server(asker, lane, list(prompts.values()), warm_up, options.model)
        )
        first: set[asyncio.Future[Any]] = {checks, stop.reason}
        done, _ = await asyncio.wait(first, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            url = receipts.without_userinfo(asker.client.root)
            console.print(f"checking the server at {url}", soft_wrap=True, highlight=False)
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if stop.reason.done():
            checks.cancel()
            await asyncio.gather(checks, return_exceptions=True)
            raise Interrupted(f"{stop.reason.result()} before the first question was asked")
        plan = Plan(
            lane=lane,
            questions=questions,
            prompts=prompts,
            findings=checks.result(),
            base_url=asker.client.root,
            order_seed=options.order_seed,
            label=options.label,
            is_strict=options.is_strict,
            secrets=options.secrets | frozenset([options.api_key] if options.api_key else []),
            command=options.command,
        )
        if folder is None:
            folder = RunFolder(runfolder.create(options.out, lane))
            opened.callback(folder.close)
        book = RunBook(plan, folder, options.resume is not None, options.takes_other_build)
        run = _Run(plan, book, asker, grading, console)
        return Outcome(folder.path, await run.to_the_end(stop))


class _Run:
    """One session of a run: what the workers, the grader and the watch do to its book."""

    def __init__(
        self,
        plan: Plan,
        book: RunBook,
        asker: Asker,
        grading: GradingProcess,
        console: Console,
    ) -> None:
        self.plan = plan
        self.book = book
        self.asker = asker
        self.grading = grading
        self.console = console
        order = list(plan.questions.questions)
        if plan.order_seed is not None:
            random.Random(plan.order_seed).shuffle(order)
        self.pool = Pool(book.pending(order), self._ask, plan.lane.concurrency)
        self.labels = {question.id: question.label for question in order}
        self.open_grades = 0
        self.failures: list[RequestFailed] = []
        self.has_told_loss = False
        self.show = RunProgress(console, plan.lane.base or plan.lane.name, plan.planned)

    async def to_the_end(self, stop: Stop) -> dict[str, Any]:
        """Ask everything planned, then write rows, result and receipt."""
        try:
            self.book.write_receipt()
        except OSError as error:
            path = self.book.folder.path
            raise FolderError(f"{path}: cannot be written: {error.strerror}") from error
        self.console.print(f"run folder: {self.book.folder.path}", soft_wrap=True)
        started, cpu_started_s = time.monotonic(), time.process_time()
        asked_before = self.asker.tally.requests
        stop.reason.add_done_callback(lambda reason: self.pool.stop(reason.result()))
        if stop.reason.done():
            self.pool.stop(stop.reason.result())
        for row, text in self.book.to_grade:
            self._send_to_grader(row, text)
        self._tell_loss()
        with self.show:
            showing = asyncio.create_task(self._keep_showing())
            try:
                await self.pool.run()
                await self._finish_grading()
            finally:
                showing.cancel()
            self.show.finish(*self._so_far())
        if self.pool.stopped is None:
            self.book.see_build(await self._build())
        tally = self.asker.tally
        return self.book.write_up(
            self.pool.stopped,
            has_open_grades=self.open_grades > 0,
            seconds=time.monotonic() - started,
            requests=tally.requests - asked_before,
            retried=dict(sorted(tally.retried.items())),
            paused_s=round(tally.paused_s, 3),
            client_cpu_s=time.process_time() - cpu_started_s + self.grading.cpu_s,
        )

    async def _ask(self, job: tuple[Question, int]) -> None:
        question, repeat = job
        protocol = self.plan.findings.protocol
        body = protocol.body(self.plan.prompts[question.id], repeat)
        asked = await self.asker.ask(protocol.path, body)
        try:
            row, text = self.book.land(question, repeat, asked)
        except OSError as error:
            path = self.book.folder.path / runfolder.RESPONSES
            self.pool.stop(f"{path} cannot be written: {error.strerror}")
            return
        if asked.failure is not None:
            self.failures.append(asked.failure)
            if len(self.failures) >= max(_FAILURES_IN_A_ROW, self.plan.lane.concurrency):
                self._give_up()
        else:
            self.failures.clear()
        if text is not None:
            self._send_to_grader(row, text)
        self._tell_loss()

    def _give_up(self) -> None:
        kinds = Counter(failure.kind for failure in self.failures)
        told = ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
        self.pool.stop(
            f"the last {len(self.failures)} requests all failed ({told}): "
            f"{self.failures[-1].detail}"
        )

    def _tell_loss(self) -> None:
        """Say once, and as soon as it is so, that this run can be no measurement any more."""
        if not self.has_told_loss:
            reasons = self.book.lost()
            if reasons:
                self.has_told_loss = True
                text = f"this run can no longer be a measurement: {'; '.join(reasons)}"
                self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _send_to_grader(self, row: Row, text: str) -> None:
        self.open_grades += 1
        grade = self.grading.grade(text, self.labels[row.question_id])
        grade.add_done_callback(lambda done: self._take_grade(row, done))

    def _take_grade(self, row: Row, done: asyncio.Future[Grade]) -> None:
        if done.cancelled():
            return
        self.open_grades -= 1
        if done.exception() is not None:
            self.pool.stop(f"{done.exception()}: {row.question_id}, repeat {row.repeat}")
            return
        self.book.take_grade(row, done.result())

    async def _finish_grading(self) -> None:
        """Wait for the last grades; not for long if the run was stopped: resume makes up for it."""
        stopped_at = None
        while self.open_grades:
            if self.pool.stopped is not None:
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > _LAST_GRADES_S:
                    return
            await self.grading.settled(_SHOW_EVERY_S)

    async def _build(self) -> dict[str, Any] | None:
        try:
            _, build = await builds.tell(self.asker.client)
        except RequestFailed:
            return None
        return build

    def _so_far(self) -> tuple[int, int, int]:
        return len(self.book.landed), self.book.right, self.book.graded

    async def _keep_showing(self) -> None:
        while True:
            self.show.update(*self._so_far())
            await asyncio.sleep(_SHOW_EVERY_S)
