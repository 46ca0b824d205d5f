"""Say how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0
# The first line about answers comes sooner: it shows that the server answers at all.
_FIRST_LINE_AFTER_S = 1.0


class RunProgress:
    """Landed, right so far and time left of one run.

    Parameters
    ----------
    console : Console
    name : str
        Of the lane.
    planned : int
    """

    def __init__(self, console: Console, name: str, planned: int) -> None:
        self._console = console
        self._name = name
        self._planned = planned
        self._bar: Progress | None = None
        self._next_line = time.monotonic() + _FIRST_LINE_AFTER_S
        self._shown = ""
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

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, landed: int, right: int, graded: int) -> None:
        """Take what is known now; the bar moves, a line is shown when its time has come."""
        if self._bar is not None:
            so_far = f"right so far: {right} of {graded} graded"
            self._bar.update(self._task, completed=landed, right=so_far)
            return
        if time.monotonic() >= self._next_line:
            self.finish(landed, right, graded)

    def finish(self, landed: int, right: int, graded: int) -> None:
        """Show the line now, unless it has been shown."""
        if self._bar is None:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            line = (
                f"{self._name}: {landed} of {self._planned} landed, "
                f"right so far: {right} of {graded} graded"
            )
            if line != self._shown:
                self._shown = line
                self._console.print(line, soft_wrap=True)
