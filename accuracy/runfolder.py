"""A run's folder: unique, owned by one client at a time, and readable after any kind of end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from draftproof.accuracy.lanes import Lane

RESPONSES = "responses.jsonl"
RESULT = "result.json"
RECEIPT = "receipt.json"


class FolderError(ValueError):
    """The run folder cannot be made, or belongs to another client."""


def create(parent: Path, lane: Lane) -> Path:
    """Make a new run folder, named by lane, UTC time and chance.

    Raises
    ------
    FolderError
        If it cannot be made.
    """
    label = f"{lane.base}-modified" if lane.base else lane.name
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = parent / f"{label}-{stamp}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise FolderError(f"--out: cannot make {folder}: {error.strerror}") from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    _replace(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read a run's rows; a torn last line is left out.

    Raises
    ------
    FolderError
        If the file cannot be read, or a line before the last is no row.
    """
    path = folder / RESPONSES
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}") from error
    # What follows the last line end is empty, or torn.
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise FolderError(f"{path}:{number}: is no row: {error}") from error
    return rows


def final_rows(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Map (question, repeat) to the last row about it: errors asked again are superseded."""
    return {(row["question_id"], row["repeat"]): row for row in rows}


class RunFolder:
    """An open run folder: holds the lock and appends rows.

    Parameters
    ----------
    path : Path
        An existing folder.

    Raises
    ------
    FolderError
        If another client has it open, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lock = (path / ".lock").open("a+")
            self._file = (path / RESPONSES).open("ab", buffering=0)
        except OSError as error:
            raise FolderError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip()
            self.close()
            raise FolderError(f"{path}: another client (process {holder}) runs here") from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._drop_torn_line()
        self._end = self._file.seek(0, os.SEEK_END)

    def append(self, row: dict[str, Any]) -> None:
        """Append a row and hand it to the operating system at once.

        Raises
        ------
        OSError
            If it cannot be written whole; the file then ends where it ended before.
        """
        data = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(data)

    def replace_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write all rows anew in one step."""
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        _replace(self.path / RESPONSES, "".join(lines))

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _drop_torn_line(self) -> None:
        content = (self.path / RESPONSES).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._file.truncate(whole)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
