"""Measure the client's CPU time a request: 1,319 questions at 64 under way, grading included.

    python accuracy/tests/client_cost.py [EVENTS_AN_ANSWER] [RUNS] [SECONDS_BETWEEN_EVENTS]

Runs the `gsm8k` protocol on 1,319 made-up questions, whose answers are 150 words long, against the
fake server, as a user would (`draftproof accuracy run`, a process of its own), and prints CPU time
/ requests twice: of the whole command from its start to its end with all of its children, and of
the asking and grading alone. Of the answers 94% are right, and one in twenty spells its number so
that sgl-eval's own grader is needed. At most so many events are sent; 1000 are one a token: 153.

As in an installed package, Python's byte code is there before the first run that counts: a short
run writes it to a folder of this script's.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from draftproof.accuracy.lanes import load_lane
from draftproof.accuracy.tests.support import FakeServer, fake_server, math_book, own_lane

QUESTIONS = 1319
WORDS = 150
RIGHT_SHARE = 0.94
OTHER_SPELLING_EVERY = 20
FRONT = "from draftproof.conformance.cli import main; main()"


def main(events: int, runs: int, delay_s: float) -> None:
    rows = [
        {"problem": f"What makes {n} and {n + 1}?", "expected_answer": str(2 * n + 1)}
        for n in range(QUESTIONS)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lane, data = own_lane(folder, "gsm8k", rows)
        reply = "word " * WORDS + "\\boxed{{{label}}}"
        book = math_book(load_lane(lane), reply, Path(data))
        for replies in list(book.values())[::OTHER_SPELLING_EVERY]:
            for kind in replies:
                replies[kind] = replies[kind].replace("\\boxed{", "\\boxed{\\$")
        behaviour = {"book": book, "events": events, "right_share": RIGHT_SHARE}
        with fake_server(**behaviour, event_delay_s=delay_s) as server:
            arguments = [lane, "--data", data, "--base-url", server.url]
            run_once(server, folder, "warm", [*arguments, "--set", f"limit={OTHER_SPELLING_EVERY}"])
            got = [run_once(server, folder, str(run), arguments) for run in range(runs)]
    for what, costs in zip(("whole command", "asking"), zip(*got, strict=True), strict=True):
        print(
            f"{what}: {min(costs):.2f} ms of CPU a request at least, "
            f"{statistics.median(costs):.2f} in the median ({runs} runs)"
        )


def run_once(
    server: FakeServer, folder: Path, name: str, arguments: list[str]
) -> tuple[float, float]:
    """CPU time a question in ms, of the whole command and of the asking."""
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "pyc")}
    out = folder / name
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", FRONT, "accuracy", "run", *arguments, "--out", str(out)],
        env=os.environ | cached,
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run,) = out.iterdir()
    (session,) = json.loads((run / "receipt.json").read_text())["sessions"]
    counts = json.loads((run / "result.json").read_text())["counts"]
    events = [json.loads(line)["events"] for line in (run / "responses.jsonl").open()]
    whole_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    costs = [1000 * cpu_s / counts["landed"] for cpu_s in (whole_s, session["client_cpu_s"])]
    print(
        f"{name}: {counts['correct']} of {counts['planned']} right, {statistics.mean(events):.0f} "
        f"events an answer, whole {costs[0]:.2f} ms, asking {costs[1]:.2f} ms, "
        f"{session['seconds']:.1f} s long"
    )
    return costs[0], costs[1]


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 1000,
        int(sys.argv[2]) if len(sys.argv) > 2 else 3,
        float(sys.argv[3]) if len(sys.argv) > 3 else 0.0,
    )
