"""A lack of memory in one line, and how workers that share a device take turns for its memory."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1 << 30
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}

KEPT_BYTES = 1 << 30
"""A worker that holds more device memory than this after a check gives back what it does not use:
the allocator's cache of one is no use to the others."""

DEVICE, HOST = "not enough device memory", "not enough memory"
"""How a reason begins; what follows in brackets are the sizes."""


def lack(error: BaseException) -> str | None:
    """Why an allocation failed, in one line with the sizes; None for any other error."""
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA out of memory" in text:
        asked = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)", text)
        total = re.search(r"total capacity of ([\d.]+) (bytes|[KMG]iB)", text)
        free = re.search(r"of which ([\d.]+) (bytes|[KMG]iB) is free", text)
        return _reason(DEVICE, asked, free, total)
    if "DefaultCPUAllocator: can't allocate memory" in text or isinstance(error, MemoryError):
        return _reason(HOST, re.search(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", text))
    return None


def _reason(
    what: str,
    asked: re.Match[str] | None,
    free: re.Match[str] | None = None,
    total: re.Match[str] | None = None,
) -> str:
    sizes = []
    if asked:
        sizes.append(f"asked for {_gib(asked)}")
    if free:
        sizes.append(f"free {_gib(free)}" + (f" of {_gib(total)}" if total else ""))
    return f"{what} ({', '.join(sizes) or 'sizes not told'})"


def _gib(size: re.Match[str]) -> str:
    return f"{float(size[1]) * _UNITS[size[2]] / GIB:.1f} GiB"


@contextlib.contextmanager
def turn(folder: Path | None, *, alone: bool) -> Iterator[None]:
    """Hold the device's memory: together with the other workers, or alone.

    Parameters
    ----------
    folder : Path, optional
        Of the run's notes. None: there are no other workers.
    alone : bool
        Wait until no other worker of the run uses the device, and keep them out.
    """
    if folder is None:
        yield
        return
    # Who waits to be alone closes the gate first: those who share cannot keep it out for ever.
    with (folder / "gate").open("w") as gate, (folder / "memory").open("w") as memory:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(memory, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def give_back() -> None:
    """Return to the device what this process's allocator keeps and does not use."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
