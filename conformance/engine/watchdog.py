"""Ends workers that hang where Python cannot be interrupted: from outside, whatever they did.

A worker leaves word of the check that it runs and until when; a thread of the controlling process,
where no code from outside runs, ends it when that time is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 5.0
"""How much longer than its limit a check may take before its whole worker is ended."""

LOOK_SECONDS = 0.25
"""Time between two looks."""


@contextlib.contextmanager
def watched(folder: Path, worker: str, seconds: float) -> Iterator[None]:
    """Leave word in `folder` that `worker`, this process, runs a check of at most `seconds`.

    The clock is the machine's monotonic one, which all its processes share.
    """
    path = folder / f"running-{worker}"
    fresh = folder / f"word-{worker}"
    until = time.monotonic() + seconds + grace(seconds)
    fresh.write_text(json.dumps({"pid": os.getpid(), "until": until}))
    fresh.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def grace(seconds: float) -> float:
    """How much longer than `seconds` a worker lives: short limits are not meant to wait long."""
    return min(GRACE_SECONDS, max(1.5, seconds))


class Watchdog:
    """Looks after the workers of a run.

    Parameters
    ----------
    folder : Path
        Where they leave word.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            for path in self._folder.glob("running-*"):
                with contextlib.suppress(OSError, ValueError):
                    word = json.loads(path.read_text())
                    if time.monotonic() > word["until"]:
                        _ended(self._folder, path.name.removeprefix("running-")).touch()
                        path.unlink(missing_ok=True)
                        # The first leaves the stack behind, where faulthandler is on.
                        os.kill(word["pid"], signal.SIGABRT)
                        time.sleep(LOOK_SECONDS)
                        os.kill(word["pid"], signal.SIGKILL)


def _ended(folder: Path, worker: str) -> Path:
    return folder / f"ended-{worker}"


def was_ended(folder: Path, worker: str) -> bool:
    """Whether a worker was ended because its time was over."""
    return _ended(folder, worker).exists()
