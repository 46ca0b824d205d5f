"""Open one issue for each new failure of a night, through GitHub's `gh`.

`python -m draftproof.ci.issues REPORT... [--artifacts URL]` asks for the open issues first: a
failure that has one already gets no second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.ci.summary import BadReport, failures, name_of, read

LABEL = "draftproof"

MOST = 10
"""Issues that one night opens, at most: a broken machine must not flood the tracker."""


def title_of(result: Mapping[str, Any]) -> str:
    """The issue's title: the same for the same failure, whatever the night."""
    return f"{name_of(result)} fails for {result['implementation']}"


def body_of(result: Mapping[str, Any], about: Mapping[str, Any], artifacts: str | None) -> str:
    """The issue's text: the report, what it ran on, and where the case file is."""
    case = Path(result["case_file"]).name if result.get("case_file") else None
    lines = ["```text", *str(result["detail"]).replace("```", "'''").splitlines(), "```", ""]
    lines.append(
        f"Device {about.get('device')}, profile {about.get('profile')}, seed {about.get('seed')}, "
        f"commit {about.get('commit')}, torch {about.get('torch')}, triton {about.get('triton')}."
    )
    if case:
        lines.append(
            f"Case file `{case}`" + (f" in the artifacts of {artifacts}." if artifacts else ".")
        )
    return "\n".join(lines) + "\n"


def gh(*arguments: str, given: str | None = None) -> str:
    """Run `gh`; its output."""
    done = subprocess.run(["gh", *arguments], input=given, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"gh {arguments[0]} {arguments[1]}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Open the issues; 0, or 2 where a report is none or `gh` refuses."""
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.issues", description="Open an issue for each new failure."
    )
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of draftproof verify")
    parser.add_argument("--artifacts", metavar="URL", help="where the case files can be had")
    options = parser.parse_args(arguments)
    try:
        new: dict[str, str] = {}
        for path in options.reports:
            document = read(path)
            for result in failures(document):
                text = body_of(result, document["environment"], options.artifacts)
                new.setdefault(title_of(result), text)
        if not new:
            print("issues: nothing failed")
            return 0
        listed = gh(
            "issue",
            "list",
            "--label",
            LABEL,
            "--state",
            "open",
            "--limit",
            "1000",
            "--json",
            "title",
        )
        known = {issue["title"] for issue in json.loads(listed)}
        opened = [title for title in new if title not in known]
        for title in opened[:MOST]:
            gh(
                "issue",
                "create",
                "--title",
                title,
                "--label",
                LABEL,
                "--body-file",
                "-",
                given=new[title],
            )
            print(f"issues: opened: {title}")
    except (BadReport, RuntimeError, OSError) as error:
        print(f"issues: {error}", file=sys.stderr)
        return 2
    for title in opened[MOST:]:
        print(f"issues: not opened, {MOST} a night are enough: {title}")
    print(f"issues: {len(new) - len(opened)} failures have an open issue already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
