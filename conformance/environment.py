"""What a run was made on: commit, device, versions and digests of the sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ROOMS = ("oracles", "kernels", "conformance")

COMMIT_VARIABLE = "DRAFTPROOF_COMMIT"
"""Environment variable that names the commit where the sources are not in a git checkout."""


def describe(device: str) -> dict[str, Any]:
    """Everything about this machine and these sources that a record should say.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    """
    about: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "draftproof": _version("draftproof"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "interpreted": os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
        "device": _processor(),
        "sources": sources(),
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        about["device"] = properties.name
        about["capability"] = f"{properties.major}.{properties.minor}"
        about["multiprocessors"] = properties.multi_processor_count
        about["cuda"] = torch.version.cuda or torch.version.hip
    return about


def sources() -> dict[str, str]:
    """SHA-256 by path of every source file that decides what a run proves."""
    found = {}
    for room in ROOMS:
        folder = PACKAGE if room == "conformance" else PACKAGE.parent / room
        for path in sorted(folder.rglob("*.py")):
            relative = f"{room}/{path.relative_to(folder).as_posix()}"
            if not relative.startswith("conformance/tests/"):
                found[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _version(package: str) -> str:
    """As the package says where it is loaded, else as installed: loading torch takes seconds."""
    if told := getattr(sys.modules.get(package), "__version__", None):
        return str(told)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit of the checkout; `+` where tracked files were changed, `?` if git cannot say."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return _head(root / ".git")


def _head(folder: Path) -> str | None:
    """The commit that HEAD names, read without git."""
    try:
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return f"{head}?"
        name = head.removeprefix("ref: ")
        if (folder / name).is_file():
            return (folder / name).read_text().strip() + "?"
        for line in (folder / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0] + "?"
    except OSError:
        pass
    return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
