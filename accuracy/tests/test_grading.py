"""The grading process keeps up with a fast server."""

from __future__ import annotations

import asyncio
import time

from draftproof.accuracy.grading import GradingProcess

ANSWERS = 2000


def test_grades_are_taken_as_they_come_however_busy_the_client_is() -> None:
    assert asyncio.run(steps_to_grade()) < ANSWERS / 2


async def steps_to_grade() -> int:
    """Steps of a busy event loop until all answers are graded."""
    grading = GradingProcess("arithmetic")
    await grading.start()
    try:
        await grading.grade("5", "5")
        grades = [grading.grade(f"It is {n}.", str(n)) for n in range(ANSWERS)]
        steps = 0
        while not all(grade.done() for grade in grades):
            steps += 1
            time.sleep(0.002)
            await asyncio.sleep(0)
        assert all(grade.result().correct for grade in grades)
        return steps
    finally:
        await grading.stop()
