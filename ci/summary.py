"""What a pipeline shows of a run: a summary of the job, and annotations where the code fails.

`python -m draftproof.ci.summary verify.json --impl my_kernel.py` appends Markdown to the file that
GITHUB_STEP_SUMMARY names (else it prints it), and under GitHub Actions prints annotations.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.conformance.names import CHECKS

SIGNS = {
    "failed": ":x: {} failed",
    "error": ":boom: {} error",
    "known": ":warning: {} known",
    "passed": ":white_check_mark: {}",
    "skipped": "{} skipped",
    "not_provided": "not provided",
}
"""How a cell of the matrix shows a count, the worst first."""

SHOWN_FAILURES = 10
"""Failures that a summary shows in full."""

RAISED_AT = re.compile(r" at (\S+\.py):(\d+)$", re.MULTILINE)


class BadReport(ValueError):
    """A file that is no report of `verify --json`."""


def read(path: Path) -> dict[str, Any]:
    """A report of `verify --json`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadReport(f"{path}: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != "draftproof.verify/1":
        raise BadReport(f"{path}: not a report of verify --json")
    return document


def state(result: Mapping[str, Any]) -> str:
    """The status, or "known" for a failure that the file of known differences lists."""
    return "known" if result.get("known") is not None else str(result["status"])


def failures(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Results that fail the run."""
    return [result for result in document["results"] if state(result) in ("failed", "error")]


def name_of(result: Mapping[str, Any]) -> str:
    """`op / check / case`."""
    return f"{result['op']} / {result['check']} / {result['case']}"


def markdown(document: Mapping[str, Any]) -> str:
    """The summary of a run: totals, matrix, first failures, what was not compared."""
    about, totals = document["environment"], document["totals"]
    failed = failures(document)
    names = ", ".join(dict.fromkeys(result["implementation"] for result in document["results"]))
    words = ", ".join(f"{totals[s]} {s.replace('_', ' ')}" for s in SIGNS if totals.get(s))
    head = "holds" if not failed and totals["compared"] and not document.get("stale") else "FAILS"
    lines = [
        f"## draftproof: {names or 'nothing'} {head}",
        "",
        f"{totals['compared']} compared: {words or 'nothing ran'}. {about.get('device')}, profile "
        f"{about.get('profile')}, seed {about.get('seed')}, commit {about.get('commit')}.",
        "",
        *(f"- {text}" for text in document.get("stale") or ()),
        *_matrix(document["results"]),
    ]
    for result in failed[:SHOWN_FAILURES]:
        lines += ["", f"<details><summary>{_plain(name_of(result))}</summary>", "", "```text"]
        lines += [*str(result["detail"]).replace("```", "'''").splitlines(), "```", "</details>"]
    if len(failed) > SHOWN_FAILURES:
        lines += ["", f"... and {len(failed) - SHOWN_FAILURES} more failures in the report."]
    reasons = Counter(
        str(result["detail"]).split("\n")[0]
        for result in document["results"]
        if result["status"] == "skipped"
    )
    lines += ["", *(f"- skipped {count}: {_plain(reason)}" for reason, count in reasons.items())]
    return "\n".join(lines).rstrip() + "\n"


def _matrix(results: Sequence[Mapping[str, Any]]) -> list[str]:
    ran = [check for check in (*CHECKS, "all") if any(r["check"] == check for r in results)]
    cells: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        cells.setdefault((result["op"], result["check"]), Counter())[state(result)] += 1
    lines = [f"| op | {' | '.join(ran)} |", "|" + "---|" * (len(ran) + 1)]
    for op in dict.fromkeys(result["op"] for result in results):
        texts = [
            ", ".join(
                sign.format(count)
                for status, sign in SIGNS.items()
                if (count := cells.get((op, check), Counter())[status])
            )
            for check in ran
        ]
        lines.append(f"| {op} | {' | '.join(texts)} |")
    return lines


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def marks(document: Mapping[str, Any], implementation: Path | None) -> list[str]:
    """GitHub's workflow commands, one for each op and check that fails.

    Parameters
    ----------
    document : mapping
    implementation : Path, optional
        The file under test: where a failure names no line of its own, its op's function is marked.
    """
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in failures(document):
        grouped.setdefault((result["op"], result["check"]), []).append(result)
    lines = []
    for (op, check), members in grouped.items():
        first = members[0]
        place = _place(str(first["detail"]), op, implementation)
        title = f"{op} / {check}: {len(members)} of its cases fail"
        options = ",".join(
            f"{key}={_option(value)}" for key, value in {**place, "title": title}.items()
        )
        lines.append(f"::error {options}::{_message(str(first['detail']))}")
    return lines


def _place(detail: str, op: str, implementation: Path | None) -> dict[str, str]:
    """The line that raised, else that of the op's function, as GitHub names places."""
    here = Path.cwd().resolve()
    for found in RAISED_AT.finditer(detail):
        path = Path(found[1]).resolve()
        if path.is_relative_to(here):
            return {"file": path.relative_to(here).as_posix(), "line": found[2]}
    if implementation is None or not implementation.is_file():
        return {}
    place = {"file": implementation.as_posix()}
    try:
        tree = ast.parse(implementation.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return place
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == op:
            place["line"] = str(node.lineno)
    return place


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _option(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def main(arguments: list[str] | None = None) -> int:
    """Show a run; 0, or 2 where the report is none."""
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.summary", description="Summary and annotations of a run."
    )
    parser.add_argument("report", type=Path, help="JSON of draftproof verify")
    parser.add_argument("--impl", type=Path, help="file under test, for annotations")
    options = parser.parse_args(arguments)
    try:
        document = read(options.report)
    except BadReport as error:
        print(f"summary: {error}", file=sys.stderr)
        return 2
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print("\n".join(marks(document, options.impl)))
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(markdown(document))
    else:
        print(markdown(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
