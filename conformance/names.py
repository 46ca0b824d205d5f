"""What a command line may name and how it is refused, without loading torch: that takes seconds."""

from __future__ import annotations

from pathlib import Path

CHECKS = ("eager", "guards", "poison", "strided", "graph", "repeat", "laws", "invalid", "fuzz")
"""Every check of the suite, in the order in which they run and are reported."""

GOLDEN = Path(__file__).resolve().parent / "golden"
"""The golden vectors, a folder an op."""

PUBLISHED = Path(__file__).resolve().parent / "published"
"""Adapters for published kernels, and what is known to differ in them, a TOML file a version."""


class Refused(Exception):
    """Bad usage or input: one clear line, exit 2."""


def surely_an_op(name: str) -> bool:
    """Whether a name is an op of ours beyond doubt: its golden vectors lie here.

    Where it is not, the registry must be asked, which loads torch.
    """
    return name in {manifest.parent.name for manifest in GOLDEN.glob("*/manifest.json")}
