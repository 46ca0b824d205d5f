"""The real server's keeper leaves no process behind, whatever the children do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from draftproof.accuracy.realserver import members

# A leader with a child that ignores SIGTERM, as an engine process may.
LEADER = """
import os, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
print(os.getpid(), flush=True)
time.sleep(600)
"""


KEEP = [sys.executable, "-m", "draftproof.accuracy.realserver", "keep"]


def keeper() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "draftproof.accuracy.realserver",
            "keep",
            sys.executable,
            "-c",
            LEADER,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    session = int(process.stdout.readline())
    deadline = time.monotonic() + 60
    while len(members(session)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The child needs a moment to set its signal handler.
    time.sleep(1)
    return process, session


def test_closing_the_pipe_ends_the_whole_session() -> None:
    process, session = keeper()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert members(session) == []


def test_the_death_of_the_leader_ends_its_children() -> None:
    process, session = keeper()
    os.kill(session, 9)
    assert process.wait(timeout=60) == 0
    assert members(session) == []
