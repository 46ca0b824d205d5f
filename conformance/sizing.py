"""How many workers a run gets where nobody says: by cores, and by the memory that is free."""

from __future__ import annotations

import os
from pathlib import Path

MAX_WORKERS = {"cpu": 8, "cuda": 4}
"""Processes that checks are spread over at most, by device."""

HOST_BYTES = 2 << 30
"""Host memory that a worker may need: torch, Triton, and a large case."""

DEVICE_BYTES = 16 << 30
"""Device memory that a worker may need beside those heavy cases that run alone."""

UNLIMITED = 1 << 62


def workers(device: str) -> int:
    """Workers for a run on "cpu" or "cuda", at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = min(MAX_WORKERS[device], cores or 1, free_host_bytes() // HOST_BYTES)
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        most = min(most, free // DEVICE_BYTES)
    return max(1, most)


def free_host_bytes(
    meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int:
    """Host memory that is free, as the kernel and this process's control group say."""
    free = UNLIMITED
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            # What the group's page cache holds is given up when it is wanted.
            statistics = dict(
                line.split() for line in (group / "memory.stat").read_text().splitlines()
            )
            used = int((group / "memory.current").read_text())
            free = min(free, int(most) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return free
