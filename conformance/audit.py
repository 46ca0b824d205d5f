"""What no run has exercised: every (op, check, case) of the specs, held against reports of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.conformance.engine.session import VERIFY_SCHEMA
from draftproof.conformance.names import CHECKS, Refused

AUDIT_SCHEMA = "draftproof.audit/1"

Triple = tuple[str, str, str]
"""Op, check, case."""


def reports(places: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Read reports of `verify --json`; of a folder, those among its JSON files.

    Raises
    ------
    Refused
        If a file named by itself is no such report, or there is none at all.
    """
    found: list[Mapping[str, Any]] = []
    for place in places:
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        for file in files:
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise Refused(f"audit {file}: cannot be read as JSON: {error}") from error
            if isinstance(document, dict) and document.get("schema") == VERIFY_SCHEMA:
                found.append(document)
            elif not place.is_dir():
                raise Refused(f"audit {file}: not a report of verify --json ({VERIFY_SCHEMA})")
    if not found:
        raise Refused(f"audit {', '.join(map(str, places))}: no report of verify --json")
    return found


def due(ops: Iterable[str], profile: str, *, cuda: bool) -> list[Triple]:
    """Every (op, check, case) that the specs hold in a profile."""
    from draftproof.conformance.engine.checks import targets
    from draftproof.conformance.engine.registry import load_specs

    specs = load_specs()
    return [
        (op, target.check, target.name)
        for op in ops
        for target in targets(specs[op], profile, cuda=cuda)
    ]


def audit(
    expected: Sequence[Triple],
    documents: Iterable[Mapping[str, Any]],
    implementation: str | None = None,
) -> dict[str, Any]:
    """Hold what is due against what was compared.

    Parameters
    ----------
    expected : sequence of (op, check, case)
    documents : iterable of mapping
        Reports of `verify --json`. A result counts if something was compared: passed or failed.
    implementation : str, optional
        Only this implementation's results; None: any.

    Returns
    -------
    dict
        "due" and "exercised" as counts, "missing" as a list of objects.
    """
    compared: set[Triple] = set()
    for document in documents:
        for result in document["results"]:
            if implementation not in (None, result["implementation"]):
                continue
            if result["status"] in ("passed", "failed"):
                compared.add((result["op"], result["check"], result["case"]))
    missing = [triple for triple in expected if triple not in compared]
    return {
        "schema": AUDIT_SCHEMA,
        "due": len(expected),
        "exercised": len(expected) - len(missing),
        "missing": [dict(zip(("op", "check", "case"), one, strict=True)) for one in missing],
    }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """An audit for a terminal: a line an op and check, and the count."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in report["missing"]:
        cases.setdefault((one["op"], one["check"]), []).append(one["case"])
    for (op, check), names in sorted(cases.items(), key=_in_order):
        yield f"{op}/{check}: {len(names)} not exercised: {', '.join(names)}"
    yield f"{report['exercised']} of {report['due']} exercised"


def _in_order(item: tuple[tuple[str, str], list[str]]) -> tuple[str, int]:
    op, check = item[0]
    return op, CHECKS.index(check)
