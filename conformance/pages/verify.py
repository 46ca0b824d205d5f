"""The page of a conformance run: its matrix, its failures with pictures, what did not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.conformance.names import CHECKS
from draftproof.conformance.pages.page import environment_rows, render
from draftproof.conformance.pages.picture import Picture, pictures

SIGNS = {
    "failed": ("failed", "bad"),
    "error": ("error", "fault"),
    "known": ("known", "unsure"),
    "passed": ("passed", "good"),
    "skipped": ("skipped", "unsure"),
    "not_provided": ("not provided", "unsure"),
}
"""Word and tone of every status, the worst first."""

SHOWN_FAILURES = 200
"""Failures that a page shows in full."""

OPEN_FAILURES = 10
"""Failures whose reports are open when the page is."""


def verify_page(document: Mapping[str, Any]) -> str:
    """The page of a run.

    Parameters
    ----------
    document : mapping
        What `verify --json` writes.

    Returns
    -------
    str
        HTML that needs no other file.
    """
    results = document["results"]
    totals = document["totals"]
    failures = [result for result in results if _state(result) in ("failed", "error")]
    known = [result for result in results if _state(result) == "known"]
    anchors = {id(result): f"failure-{number}" for number, result in enumerate(failures, start=1)}
    names = ", ".join(dict.fromkeys(result["implementation"] for result in results)) or "nothing"
    lead, tone = _lead(totals, document.get("stale") or [])
    missing = _missing(results)
    contents = [("matrix", "Matrix")]
    if failures:
        contents.append(("failures", f"Failures ({len(failures)})"))
    if known or document.get("stale"):
        contents.append(("known", f"Known differences ({len(known)})"))
    skipped = _reasons(results)
    if skipped:
        contents.append(("skipped", "Not compared"))
    return render(
        "verify.html.j2",
        title=f"draftproof verify: {names}",
        lead=lead,
        tone=tone,
        contents=[*contents, ("environment", "Environment")],
        environment=environment_rows(document["environment"]),
        checks=_checks(results),
        several=len({result["implementation"] for result in results}) > 1,
        matrix=_matrix(results, anchors),
        failures=[
            _failure(result, anchors[id(result)], number <= OPEN_FAILURES)
            for number, result in enumerate(failures[:SHOWN_FAILURES], start=1)
        ],
        more_failures=[_name(result) for result in failures[SHOWN_FAILURES:]],
        known=[_failure(result, f"known-{n}", False) for n, result in enumerate(known, start=1)],
        skipped=skipped,
        missing=missing,
        stale=document.get("stale") or [],
    )


def _lead(totals: Mapping[str, int], stale: Sequence[str]) -> tuple[str, str]:
    """What the run says, in one line, and its tone."""
    words = ", ".join(
        f"{totals[status]} {word}" for status, (word, _) in SIGNS.items() if totals.get(status)
    )
    compared = totals.get("compared", 0)
    if totals.get("failed"):
        return f"The contract is broken: {words}.", "bad"
    if totals.get("error"):
        return f"The suite itself failed: {words}.", "fault"
    if stale:
        return f"The file of known differences does not hold: {words}.", "bad"
    if not compared:
        return f"Nothing was compared: {words or 'nothing ran'}. Such a run fails.", "bad"
    if totals.get("known"):
        return f"Nothing but the known differences: {words}.", "unsure"
    return f"Every comparison holds, bit for bit: {words}.", "good"


def _state(result: Mapping[str, Any]) -> str:
    """The status, or "known" for a failure that the file of known differences lists."""
    return "known" if result.get("known") is not None else str(result["status"])


def _checks(results: Sequence[Mapping[str, Any]]) -> list[str]:
    ran = {result["check"] for result in results}
    return [check for check in CHECKS if check in ran or check != "laws"]


def _matrix(
    results: Sequence[Mapping[str, Any]], anchors: Mapping[int, str]
) -> list[dict[str, Any]]:
    """One row an implementation and op; a cell holds (count, word, tone, anchor) by status."""
    checks = _checks(results)
    rows: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    firsts: dict[tuple[str, str, str, str], str] = {}
    for result in results:
        key = (result["implementation"], result["op"])
        rows.setdefault(key, {}).setdefault(result["check"], Counter())[_state(result)] += 1
        if id(result) in anchors:
            firsts.setdefault((*key, result["check"], _state(result)), anchors[id(result)])
    return [
        {
            "implementation": name,
            "op": op,
            "absent": "all" in cells,
            "cells": [
                [
                    (count, word, tone, firsts.get((name, op, check, status)))
                    for status, (word, tone) in SIGNS.items()
                    if (count := cells.get(check, Counter())[status])
                ]
                for check in checks
            ],
        }
        for (name, op), cells in rows.items()
    ]


def _name(result: Mapping[str, Any]) -> str:
    return f"{result['op']} / {result['check']} / {result['case']}"


def _failure(result: Mapping[str, Any], anchor: str, opened: bool) -> dict[str, Any]:
    lines = str(result["detail"]).splitlines()
    replays = [line for line in lines if line.startswith("  replay: ")]
    several = len({one["path"] for one in result.get("places") or ()}) > 1
    drawn: list[Picture] = []
    for place in result.get("places") or ():
        drawn += pictures(place, named=several)
    sign, tone = SIGNS[_state(result)]
    rules = list(dict.fromkeys(one["rule"] for one in result.get("places") or ()))
    apart = {*replays, *(f"  rule: {rule}" for rule in rules)}
    return {
        "anchor": anchor,
        "name": _name(result),
        "implementation": result["implementation"],
        "sign": sign,
        "tone": tone,
        "opened": opened,
        "text": "\n".join(line for line in lines if line not in apart),
        "rules": rules,
        "replay": replays[0].removeprefix("  replay: ") if replays else None,
        "pictures": drawn,
        "known": result.get("known"),
    }


def _reasons(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every reason for which something was not compared, and where."""
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        if result["status"] in ("skipped", "not_provided"):
            reason = (
                str(result["detail"]).splitlines()[0] if result["detail"] else "no reason given"
            )
            word = SIGNS[result["status"]][0]
            where = f"{result['op']}/{result['check']}"
            reasons.setdefault((word, reason), Counter())[where] += 1
    return [
        {"word": word, "reason": reason, "count": where.total(), "where": sorted(where)}
        for (word, reason), where in reasons.items()
    ]


def _missing(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pairs op/check in which nothing was compared."""
    ops = dict.fromkeys(result["op"] for result in results if result["check"] != "all")
    done = {
        (result["op"], result["check"])
        for result in results
        if result["status"] in ("passed", "failed")
    }
    tried = {(result["op"], result["check"]) for result in results}
    return [
        f"{op}/{check}"
        for op in ops
        for check in CHECKS
        if (op, check) not in done and (check != "laws" or (op, check) in tried)
    ]
