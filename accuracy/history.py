"""Kept run folders: find the last good one of a lane, and mend one whose rows are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftproof.accuracy.lanes import Lane, load_lane, overrides
from draftproof.accuracy.rows import check_row
from draftproof.accuracy.runfolder import (
    RECEIPT,
    RESPONSES,
    RESULT,
    SET_ASIDE,
    RunFolder,
    whole_lines,
    write_in_one_step,
)
from draftproof.accuracy.runs import Run, load_measurement

# What a damaged run's rows no longer bear out.
_STALE = (RESULT, "summary.md", "summary.html")


class NoGoodRun(LookupError):
    """No kept run of the lane is a measurement."""


def last_good(lane: Lane, parent: Path, label: str | None = None) -> Run:
    """Find the newest run of a lane that is a measurement.

    Parameters
    ----------
    lane : Lane
        Its very content counts, not its name: a modified lane has runs of its own.
    parent : Path
        Folder of run folders.
    label : str, optional
        Only runs with this label.

    Raises
    ------
    NoGoodRun
        If there is none; the message says what the runs of that lane lack.
    ValueError
        If `parent` is no folder.
    """
    if not parent.is_dir():
        raise ValueError(f"DIR: {parent} is no folder")
    good: list[Run] = []
    others = 0
    lacks: list[str] = []
    for receipt in sorted(parent.glob(f"*/{RECEIPT}")):
        told = _receipt(receipt)
        if told.get("lane_sha256") != lane.sha256 or label not in (None, told.get("label")):
            others += 1
            continue
        try:
            good.append(load_measurement(receipt.parent))
        except ValueError as error:
            lacks.append(str(error))
    if not good:
        why = f"no run in {parent} is a measurement of {lane.name}"
        why += f" with label {label!r}" if label is not None else ""
        why += f" ({others} of other lanes or labels)" if others else ""
        raise NoGoodRun("; ".join([why, *lacks]))
    return max(good, key=lambda run: run.receipt["times"]["started"])


def _receipt(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def mend(folder: Path) -> tuple[int, int]:
    """Set the bad lines of a run aside, so that `--resume` asks them again.

    A result that spoke of them is taken away with them: it is written anew when the run is whole.

    Parameters
    ----------
    folder : Path
        A run folder that no client has open.

    Returns
    -------
    kept, set_aside : int
        Numbers of lines.

    Raises
    ------
    FolderError
        If it is no run folder, or a client has it open.
    OSError
        If it cannot be written.
    """
    path = folder / RESPONSES
    if not path.is_file():
        raise ValueError(f"RUN: {folder} has no {RESPONSES}")
    held = RunFolder(folder)
    try:
        bad = [line for line in whole_lines(path) if not _is_row(line)]
        kept = sum(1 for _ in whole_lines(path)) - len(bad)
        if bad:
            # First aside, then away: a line may stand in both files, but never in none.
            with (folder / SET_ASIDE).open("ab") as file:
                file.writelines(bad)
            for name in _STALE:
                (folder / name).unlink(missing_ok=True)
            write_in_one_step(path, (line for line in whole_lines(path) if _is_row(line)))
    finally:
        held.close()
    return kept, len(bad)


def _is_row(line: bytes) -> bool:
    try:
        check_row(json.loads(line))
    except (ValueError, RecursionError):
        return False
    return True


def last_good_command(
    lane: Annotated[str, typer.Argument(help="A lane's name, or the path of a lane file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of run folders.")],
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Of a modified lane; repeatable."),
    ] = [],  # noqa: B006 - Typer's way to say "none by default"
    label: Annotated[str | None, typer.Option(help="Only runs with this label.")] = None,
) -> None:
    """Print the folder of the newest run of a lane that is a measurement.

    Exit 0: there is one. 4: there is none. 2: bad usage or input.
    """
    try:
        run = last_good(load_lane(lane).modified(overrides(changes)), folder, label)
    except NoGoodRun as error:
        typer.echo(f"no good run: {error}", err=True)
        raise typer.Exit(4) from error
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(run.folder)


def mend_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
) -> None:
    """Set damaged lines of a run's answers aside; `run --resume` then asks them again.

    Exit 0: the rows are whole now. 2: bad usage or input.
    """
    try:
        kept, bad = mend(folder)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if not bad:
        typer.echo(f"nothing to mend: {kept} rows")
        return
    typer.echo(f"{bad} bad lines set aside in {folder / SET_ASIDE}, {kept} rows kept")
    typer.echo(f"to ask them again: the run's command with --resume {folder}")
