"""Grade answers in one child process, so that no answer can stall or kill the client.

sgl-eval's grader may work for ten seconds on one expression and interrupts itself by SIGALRM, which
needs a main thread of its own. The child reads one JSON line an answer and writes one a grade.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from draftproof.accuracy import scoring

# sgl-eval bounds its own work at 10 s of comparing after four times 5 s of parsing; what takes
# longer is stuck inside one uninterruptible operation.
GRADE_TIMEOUT_S = 60.0
_READ_BYTES = 64 * 1024
_PAUSE_S = 0.1

# One spelling for each number, and few enough digits that no comparison rounds.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_BOXED_INTEGER = re.compile(rf"\{{({_INTEGER.pattern})\}}")


@dataclass(frozen=True)
class Grade:
    """What was read in an answer (None: no answer) and whether it is right.

    `published` is the few-shot lanes' second grade, by the published rule. `failure` says why the
    grader gave up; the answer then counts as wrong.
    """

    extracted: str | None
    correct: bool
    published: tuple[str | None, bool] | None = None
    failure: str | None = None


def grader(scorer: str) -> Callable[[str, str], Grade]:
    """Make the function (text, label) -> Grade of a scorer; call it in a main thread.

    Parameters
    ----------
    scorer : str
        `sgl-eval-math`, `few-shot` or `arithmetic`.
    """
    if scorer == "few-shot":

        def grade_few_shot(text: str, label: str) -> Grade:
            published = scoring.score_published(text, label)
            return Grade(*scoring.score(text, label), published=(*published,))

        return grade_few_shot
    if scorer == "arithmetic":
        return lambda text, label: Grade(*scoring.score_arithmetic(text, label))
    return _grade_math


def _grade_math(text: str, label: str) -> Grade:
    # Verdicts of sgl-eval's that need none of its work, which takes a second to load and up to 4 ms
    # for a wrong integer; the tests hold both ways against each other.
    _, boxed, behind = text.rpartition("\\boxed")
    if not boxed:
        return Grade(None, False)
    integer = _BOXED_INTEGER.match(behind)
    if integer and _INTEGER.fullmatch(label):
        return Grade(integer[1], integer[1] == label)
    return grade_by_sgl_eval(text, label)


def grade_by_sgl_eval(text: str, label: str) -> Grade:
    """Grade by sgl-eval's own evaluator, whatever the answer looks like; in a main thread.

    Parameters
    ----------
    text, label : str
        The answer, and the data set's.
    """
    # The coroutine never awaits, so no event loop is needed to run it.
    coroutine = _evaluator().eval_single({"generation": text, "expected_answer": label})
    try:
        coroutine.send(None)
    except StopIteration as done:
        return Grade(done.value["predicted_answer"], bool(done.value["symbolic_correct"]))
    raise RuntimeError("sgl-eval's evaluator awaits something; this client expects it not to")


@cache
def _evaluator() -> Any:
    from sgl_eval._vendored.nemo_skills.evaluator.math import MathEvaluator

    return MathEvaluator(config={})


def _serve(scorer: str) -> None:
    """Answer grading requests on standard input until it ends."""
    # The grader reports its own timeouts through logging; they are part of its verdict.
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grade = grader(scorer)
    started_s = time.process_time()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            got = grade(request["text"], request["label"])
        except ImportError:  # no answer's fault
            raise
        except Exception as error:  # an answer must not end the run; the row says what it did
            got = Grade(None, False, failure=f"{type(error).__name__}: {error}"[:200])
        reply = {**vars(got), "cpu_s": time.process_time() - started_s}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


@dataclass
class _Request:
    line: bytes
    grade: asyncio.Future[Grade]
    # Whether a child died over it already.
    has_killed: bool = False


class GradingProcess:
    """The child process, asked from asyncio; it grades one answer after another.

    `cpu_s` is the CPU time in seconds that its children used for grading, without their start-up.
    """

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[_Request] = deque()
        self._news = asyncio.Event()
        self._cpu_before_s = 0.0
        self._cpu_now_s = 0.0

    @property
    def cpu_s(self) -> float:
        return self._cpu_before_s + self._cpu_now_s

    async def start(self) -> asyncio.subprocess.Process:
        """Start the child; it loads what it needs while the client goes on."""
        # A session of its own: a terminal's Ctrl-C must not reach it before the client.
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "draftproof.accuracy.grading",
            self._scorer,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        if child.stdout is None or child.stdin is None:
            raise RuntimeError("the grading process has no pipes")
        # Nothing is awaited between these lines, so that no answer is sent twice.
        self._child, self._stdin = child, child.stdin
        self._stdin.writelines(request.line for request in self._waiting)
        self._reader = asyncio.create_task(self._read(child, child.stdout))
        return child

    def grade(self, text: str, label: str) -> asyncio.Future[Grade]:
        """Have one answer graded, after those before it; `start` comes first.

        Returns
        -------
        asyncio.Future
            The grade; RuntimeError if the child dies twice over the answer.
        """
        line = (json.dumps({"text": text, "label": label}) + "\n").encode()
        request = _Request(line, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._child is not None:
            # Not awaited: what the pipe does not take yet, asyncio keeps.
            self._stdin.write(line)
        return request.grade

    async def settled(self, timeout_s: float) -> None:
        """Wait until there are new grades, or so long."""
        self._news.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)

    async def _read(self, child: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
        """Hand out the grades in order; replace a child that dies or does not answer."""
        rest, is_silent = b"", False
        while True:
            head = self._waiting[0] if self._waiting else None
            try:
                # All grades that have come: one by one they would fall behind a fast server.
                chunk = await asyncio.wait_for(stdout.read(_READ_BYTES), GRADE_TIMEOUT_S)
            except asyncio.TimeoutError:
                if head is None or head is not self._waiting[0]:
                    continue
                is_silent = True
                break
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                reply = json.loads(line)
                self._cpu_now_s = reply.pop("cpu_s")
                published = reply.pop("published")
                grade = Grade(published=published and tuple(published), **reply)
                self._settle(self._waiting.popleft(), grade)
            self._news.set()
        self._child = None
        await self._end(child)
        self._blame(is_silent)
        self._news.set()
        # A child that cannot even start is not started over and over for nothing.
        while not self._waiting:
            await asyncio.sleep(_PAUSE_S)
        await self.start()

    def _blame(self, is_silent: bool) -> None:
        """Give up the answer over which a child fell silent, or died for the second time."""
        head = self._waiting[0] if self._waiting else None
        if head is None:
            return
        if is_silent:
            failure = f"no verdict in {GRADE_TIMEOUT_S:g} s"
            self._settle(self._waiting.popleft(), Grade(None, False, failure=failure))
        elif head.has_killed:
            self._waiting.popleft()
            if not head.grade.done():
                head.grade.set_exception(RuntimeError("the grader died twice over one answer"))
        else:
            head.has_killed = True

    @staticmethod
    def _settle(request: _Request, grade: Grade) -> None:
        if not request.grade.done():
            request.grade.set_result(grade)

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        self._cpu_before_s, self._cpu_now_s = self.cpu_s, 0.0
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()

    async def stop(self) -> None:
        """End the child at once; grades that are still open stay open."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        child, self._child = self._child, None
        if child is not None:
            await self._end(child)


if __name__ == "__main__":
    _serve(sys.argv[1])
