"""Grade answers in one child process, so that no answer can stall or kill the client.

sgl-eval's grader may work for ten seconds on one expression and interrupts itself by SIGALRM, which
needs a main thread of its own. The child reads one JSON line an answer and writes one a grade.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from draftproof.accuracy import scoring

# sgl-eval bounds its own work at 10 s of comparing after four times 5 s of parsing; what takes
# longer is stuck inside one uninterruptible operation.
GRADE_TIMEOUT_S = 60.0
_LINE_LIMIT_BYTES = 64 * 1024 * 1024


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
    from sgl_eval._vendored.nemo_skills.evaluator.math import MathEvaluator

    evaluator = MathEvaluator(config={})

    def grade_math(text: str, label: str) -> Grade:
        # The coroutine never awaits, so no event loop is needed to run it.
        coroutine = evaluator.eval_single({"generation": text, "expected_answer": label})
        try:
            coroutine.send(None)
        except StopIteration as done:
            return Grade(done.value["predicted_answer"], bool(done.value["symbolic_correct"]))
        raise RuntimeError("sgl-eval's evaluator awaits something; this client expects it not to")

    return grade_math


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
        except Exception as error:  # an answer must not end the run; the row says what it did
            got = Grade(None, False, failure=f"{type(error).__name__}: {error}"[:200])
        reply = {**asdict(got), "cpu_s": time.process_time() - started_s}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


async def _ask(process: asyncio.subprocess.Process, request: bytes) -> dict[str, Any] | None:
    """Send one request to the child; None if it died."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the grading process has no pipes")
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError:
        return None
    return json.loads(line) if line.endswith(b"\n") else None


class GradingProcess:
    """The child process, asked from asyncio; answers are graded one after another.

    `cpu_s` is the CPU time in seconds that its children used for grading, without
    their start-up.
    """

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._cpu_before_s = 0.0
        self._cpu_now_s = 0.0

    @property
    def cpu_s(self) -> float:
        return self._cpu_before_s + self._cpu_now_s

    async def start(self) -> asyncio.subprocess.Process:
        """Start the child; it loads sgl-eval while the client goes on."""
        # A session of its own: a terminal's Ctrl-C must not reach it before the client.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "draftproof.accuracy.grading",
            self._scorer,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
        )
        return self._process

    async def grade(self, text: str, label: str) -> Grade:
        """Grade one answer.

        Raises
        ------
        RuntimeError
            If the child dies twice on the same answer.
        """
        request = (json.dumps({"text": text, "label": label}) + "\n").encode()
        async with self._turn:
            for _ in range(2):
                process = self._process or await self.start()
                try:
                    reply = await asyncio.wait_for(_ask(process, request), GRADE_TIMEOUT_S)
                except asyncio.TimeoutError:
                    await self.stop()
                    return Grade(None, False, failure=f"no verdict in {GRADE_TIMEOUT_S:g} s")
                if reply is not None:
                    self._cpu_now_s = reply.pop("cpu_s")
                    published = reply.pop("published")
                    return Grade(published=published and tuple(published), **reply)
                await self.stop()
        raise RuntimeError("the grading process died twice on one answer")

    async def stop(self) -> None:
        """End the child at once."""
        process, self._process = self._process, None
        if process is None:
            return
        self._cpu_before_s, self._cpu_now_s = self.cpu_s, 0.0
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    _serve(sys.argv[1])
