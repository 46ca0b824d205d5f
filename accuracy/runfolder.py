"""A run's folder: unique, owned by one client at a time, and readable after any kind of end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.rows import check_row

RESPONSES = "responses.jsonl"
RESULT = "result.json"
RECEIPT = "receipt.json"
# Bad lines that `mend` took out of the rows.
SET_ASIDE = "responses.set-aside.jsonl"

# How a row ends whose text has no grade yet.
_OPEN_GRADE = b', "extracted": null, "correct": null}\n'


class FolderError(ValueError):
    """The run folder cannot be made, or belongs to another client."""


def create(parent: Path, lane: Lane) -> Path:
    """Make a new run folder, named by lane, UTC time and chance.

    Raises
    ------
    FolderError
        If it cannot be made.
    """
    return unique(parent, f"{lane.base}-modified" if lane.base else lane.name)


def unique(parent: Path, name: str) -> Path:
    """Make a new folder, named by what it holds, UTC time and chance; errors as of `create`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = parent / f"{name}-{stamp}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise FolderError(f"--out: cannot make {folder}: {error.strerror}") from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_in_one_step(path, [text.encode()])


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Read a run's rows one by one; a torn last line is left out.

    Raises
    ------
    FolderError
        If the file cannot be read, or a line is no row.
    """
    path = folder / RESPONSES
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            row = check_row(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise FolderError(
                f"{path}:{number}: is no row: {error}; `draftproof accuracy mend {folder}` sets "
                "bad lines aside"
            ) from error
        yield row


def holder_of(folder: Path) -> str | None:
    """Process id of the client that has a run folder open, None if none has."""
    try:
        with (folder / ".lock").open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return lock.read().strip() or "unknown"
    except OSError:
        pass
    return None


def lines_set_aside(folder: Path) -> int:
    """Number of bad lines that were taken out of a run's rows."""
    path = folder / SET_ASIDE
    return sum(1 for _ in whole_lines(path)) if path.is_file() else 0


def whole_lines(path: Path) -> Iterator[bytes]:
    """Read a file's lines; what follows the last line end is torn, and left out.

    Raises
    ------
    FolderError
        If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}") from error


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

    def fill_in(self, grades: Iterable[dict[str, Any] | None]) -> None:
        """Write the grades into the rows, all of them in one step.

        Parameters
        ----------
        grades : iterable of dict or None
            For each row, in their order, the fields to set; None leaves the row as it is.

        Raises
        ------
        OSError
            If it cannot be written; all rows are then as before.
        """
        path = self.path / RESPONSES
        lines = zip(whole_lines(path), grades, strict=True)
        write_in_one_step(path, (line if not new else _filled_in(line, new) for line, new in lines))

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _drop_torn_line(self) -> None:
        content = (self.path / RESPONSES).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._file.truncate(whole)


def _filled_in(line: bytes, grade: dict[str, Any]) -> bytes:
    told = json.dumps(grade, ensure_ascii=False).encode()[1:]
    # A row ends with its open grade, so the long texts before it need not be read again.
    head, mark, end = line.rpartition(_OPEN_GRADE)
    if mark and not end:
        return head + b", " + told + b"\n"
    return json.dumps({**json.loads(line), **grade}, ensure_ascii=False).encode() + b"\n"


def write_in_one_step(path: Path, parts: Iterable[bytes]) -> None:
    """Replace a file by another that is written whole before.

    Raises
    ------
    OSError
        If it cannot be written; the file is then as before.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
