"""A file as it stands, and with one fault after the other: what `draftproof mutants --of` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftproof.conformance.faults.hunt import Hunter
from draftproof.conformance.faults.sites import Fault
from draftproof.conformance.plugin import FAULT_PROPERTY


def test_stands(
    dp_standing: tuple[str, str, str],
    dp_hunter: Hunter,
    record_property: Callable[[str, Any], None],
) -> None:
    """The file passes this check as it is; the lines that the check enters are noted."""
    record_property(FAULT_PROPERTY, dp_hunter.stand(*dp_standing))


def test_fault(
    dp_fault: Fault,
    dp_hunter: Hunter,
    record_property: Callable[[str, Any], None],
) -> None:
    """What the suite sees of this fault."""
    record_property(FAULT_PROPERTY, dp_hunter.hunt(dp_fault))
