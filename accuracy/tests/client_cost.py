"""Measure the client's CPU time a request: 1,319 questions at 64 under way, grading included.

    python accuracy/tests/client_cost.py [EVENTS_AN_ANSWER] [RIGHT_SHARE]

Runs the `gsm8k` protocol on 1,319 made-up questions, whose answers are 150 words long, against the
fake server, as a user would (a process of its own), and prints CPU time / requests twice: of the
whole command from its start to its end, and of the asking alone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from draftproof.accuracy.lanes import load_lane
from draftproof.accuracy.tests.support import command, fake_server, math_book, own_lane

QUESTIONS = 1319
WORDS = 150


def main(events: int, right_share: float) -> None:
    rows = [
        {"problem": f"What makes {n} and {n + 1}?", "expected_answer": str(2 * n + 1)}
        for n in range(QUESTIONS)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lane, data = own_lane(folder, "gsm8k", rows)
        reply = "word " * WORDS + "\\boxed{{{label}}}"
        book = math_book(load_lane(lane), reply, Path(data))
        with fake_server(book=book, events=events, right_share=right_share) as server:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                command(folder / "out", server, lane, "--data", data),
                stdout=subprocess.PIPE,
                text=True,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(done.stdout)
        (run,) = (folder / "out").iterdir()
        (session,) = json.loads((run / "receipt.json").read_text())["sessions"]
    whole_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for what, cpu_s in (("whole command", whole_s), ("asking", session["client_cpu_s"])):
        print(f"{what}: {1000 * cpu_s / QUESTIONS:.2f} ms of CPU a request ({events} events each)")
    print(f"asking took {session['seconds']:.1f} s")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 20,
        float(sys.argv[2]) if len(sys.argv) > 2 else 0.94,
    )
