"""The end of a run on a terminal: a table op x check, and what did not run."""

from __future__ import annotations

import io
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof.conformance.engine.session import Report, Result, Settings
from draftproof.conformance.names import CHECKS

REPORT_SECONDS = 0.1
"""Time between two states of the line of progress."""

_SIGNS = {
    "passed": ("ok", "green"),
    "failed": ("FAIL", "bold red"),
    "known": ("known", "cyan"),
    "error": ("ERR", "bold magenta"),
    "skipped": ("skip", "yellow"),
    "not_provided": ("none", "yellow"),
}


class Progress:
    """One line on a terminal, written over and over: how far a run is, and what it is at.

    Parameters
    ----------
    file : text file
        The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.total = 0
        self._file = file
        self._started = time.monotonic()
        self._shown = 0.0
        self._counts: Counter[str] = Counter()

    def show(self, result: Result) -> None:
        """Count a result, and tell its op, its check and the rate."""
        self._counts["known" if result.known is not None else result.status] += 1
        now = time.monotonic()
        if now - self._shown < REPORT_SECONDS:
            return
        self._shown = now
        done = self._counts.total()
        bad = ", ".join(
            f"{self._counts[status]} {status}"
            for status in ("failed", "error", "known")
            if self._counts[status]
        )
        line = (
            f"{done}/{self.total or '?'}  {result.op} {result.check}  "
            f"{done / max(now - self._started, 0.001):.1f}/s  {bad}"
        )
        self._file.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        self._file.flush()

    def clear(self) -> None:
        """Take the line away."""
        self._file.write("\r\x1b[2K")
        self._file.flush()


def summary(report: Report, settings: Settings, *, width: int, colour: bool) -> str:
    """The table and the lines below it.

    Parameters
    ----------
    report : Report
    settings : Settings
    width : int
        Columns of the terminal.
    colour : bool
        Whether to write escape codes.
    """
    console = Console(
        file=io.StringIO(), width=max(width, 60), force_terminal=colour, no_color=not colour
    )
    title = f"{settings.implementation} on {settings.device}, {settings.profile}"
    console.print(title, style="italic", highlight=False, markup=False)
    # 80 columns hold the longest op and every check: one blank between columns, no frame.
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("op", no_wrap=True)
    ops = report.ops or list(dict.fromkeys(result.op for result in report.results))
    laws = any(result.check == "laws" for result in report.results)
    checks = [
        check
        for check in CHECKS
        if (check in settings.checks if settings.checks else check != "laws" or laws)
    ]
    for check in checks:
        table.add_column(check)
    cells: dict[tuple[str, str], Counter[str]] = {}
    for result in report.results:
        status = "known" if result.known is not None else result.status
        cells.setdefault((result.op, result.check), Counter())[status] += 1
    for op in ops:
        if (op, "all") in cells:
            table.add_row(op, Text("not provided", style="yellow"), *[""] * (len(checks) - 1))
            continue
        table.add_row(op, *[_cell(cells.get((op, check), Counter())) for check in checks])
    console.print(table)
    for reason, where in _reasons(report).items():
        line = f"skipped {where.total()}, {reason}: {', '.join(sorted(where))}"
        console.print(line, highlight=False, markup=False)
    provided = [op for op in ops if (op, "all") not in cells]
    for reason, where in _known(report).items():
        line = f"known {where.total()}, {reason}: {', '.join(sorted(where))}"
        console.print(line, highlight=False, markup=False)
    for line in report.stale:
        console.print(f"not as listed: {line}", style="bold red", highlight=False, markup=False)
    if missing := report.unexercised(provided, settings.checks or CHECKS):
        pairs = ", ".join(f"{op}/{check}" for op, check in missing)
        console.print(f"nothing compared: {pairs}", highlight=False, markup=False)
    if compiled := report.compiled():
        count, spent = (sum(one[name] for one in compiled) for name in ("variants", "seconds"))
        line = f"compiled: {count} variants of {len(compiled)} kernels, {spent:.1f} s"
        console.print(line, highlight=False)
    totals = report.totals()
    words = ", ".join(
        f"{totals[status]} {status.replace('_', ' ')}" for status in _SIGNS if totals[status]
    )
    console.print(f"{report.compared} compared: {words or 'nothing ran'}", highlight=False)
    if not report.compared:
        console.print("nothing was compared: the run fails", style="bold red", highlight=False)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def mutant_lines(mutants: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a mutant: which of its checks caught it, and which of them did not."""
    lines = []
    for mutant in sorted(mutants, key=lambda one: (one["op"], one["name"])):
        missed = [check for check in mutant["should"] if check not in mutant["killers"]]
        if mutant["killers"]:
            verdict = f"killed by {', '.join(mutant['killers'])}"
            verdict += f" (not by {', '.join(missed)})" if missed else ""
        else:
            verdict = "SURVIVED" if mutant["survived"] else "not run here"
        lines.append(f"{mutant['op']} {mutant['name']}: {verdict}")
    alive = sum(mutant["survived"] for mutant in mutants)
    lines.append(f"{len(mutants)} mutants, {alive} alive")
    return lines


def _cell(counts: Counter[str]) -> Text:
    text = Text()
    for status, (sign, style) in _SIGNS.items():
        if counts[status]:
            text.append(f"{counts[status]} {sign}", style=style)
            text.append("\n")
    text.rstrip()
    return text


def _reasons(report: Report) -> dict[str, Counter[str]]:
    """Why checks were skipped: reason to counts by op/check.

    Sizes that stand in brackets at a reason's end differ from one case to the next: they are left
    to the JSON, but for the first.
    """
    reasons: dict[str, Counter[str]] = {}
    named: dict[str, str] = {}
    for result in report.results:
        if result.status == "skipped":
            reason = result.detail.splitlines()[0] if result.detail else "no reason given"
            bare = reason.partition(" (asked for ")[0]
            reason = named.setdefault(bare, reason)
            reasons.setdefault(reason, Counter())[f"{result.op}/{result.check}"] += 1
    return reasons


def _known(report: Report) -> dict[str, Counter[str]]:
    """Known differences that were met: reason to counts by op/check."""
    reasons: dict[str, Counter[str]] = {}
    for result in report.results:
        if result.known is not None:
            reasons.setdefault(result.known, Counter())[f"{result.op}/{result.check}"] += 1
    return reasons
