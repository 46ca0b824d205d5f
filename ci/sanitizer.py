"""Run the quick profile under compute-sanitizer, a tool at a time, and give a verdict for each."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
"""What is run: accesses outside memory, races in shared memory, reads of what nobody wrote."""

SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?"
    r"|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\))",
    re.MULTILINE,
)
"""The line that ends a process's report, and its counts."""

REPORTED = re.compile(r"^=+ (?!COMPUTE-SANITIZER|.*SUMMARY)(\S.*)$", re.MULTILINE)
"""A line of a report that says what was found, not where in the stack."""

VERDICTS = ("clean", "errors", "no verdict")
"""What a tool says; the last where the run or the tool itself failed."""


@dataclass(frozen=True)
class Verdict:
    """What one tool found.

    Parameters
    ----------
    tool : str
    verdict : str
        One of `VERDICTS`.
    errors, warnings : int
        Over all processes of the run.
    first : str
        The first thing reported, or why there is no verdict.
    """

    tool: str
    verdict: str
    errors: int = 0
    warnings: int = 0
    first: str = ""


def judge(tool: str, output: str, code: int) -> Verdict:
    """Read a tool's output.

    Parameters
    ----------
    tool : str
    output : str
        Both streams of the run.
    code : int
        Its exit code, which is that of `draftproof verify`.
    """
    found = SUMMARY.findall(output)
    errors = sum(int(plain or races) for plain, races, _ in found)
    warnings = sum(int(count or 0) for *_, count in found)
    reported = REPORTED.search(output)
    first = reported[1].strip() if reported else ""
    if errors:
        return Verdict(tool, "errors", errors, warnings, first)
    if code or not found:
        why = f"verify ended with {code}" if code else "the tool printed no summary"
        return Verdict(tool, "no verdict", 0, warnings, why)
    return Verdict(tool, "clean", 0, warnings, first if warnings else "")


def run(tool: str, command: list[str], arguments: list[str]) -> Verdict:
    """Run `draftproof verify` under one tool, in one process, and judge it."""
    verify = [
        str(Path(sys.executable).with_name("draftproof")),
        *("verify", "--check", "eager", "--device", "cuda", "--jobs", "1"),
        *arguments,
    ]
    # Torch's allocator keeps blocks: with it a read outside a tensor, or of what nobody wrote, may
    # fall on memory that the tool knows as good.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, "--tool", tool, "--target-processes", "all", *verify],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    verdict = judge(tool, done.stdout, done.returncode)
    if verdict.verdict != "clean":
        print(done.stdout)
    return verdict


def main(arguments: list[str] | None = None) -> int:
    """Run every tool; exit 1 where one found something or gave no verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.sanitizer",
        description="The quick profile under compute-sanitizer: a verdict a tool.",
    )
    parser.add_argument(
        "--sanitizer", default="compute-sanitizer", metavar="COMMAND", help="how it is called"
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON")
    parser.add_argument("verify", nargs="*", help="after --: options of draftproof verify")
    options = parser.parse_args(arguments)
    command = shlex.split(options.sanitizer)
    if not command or shutil.which(command[0]) is None:
        print(f"sanitizer: --sanitizer {options.sanitizer}: no such command", file=sys.stderr)
        return 2
    verdicts = []
    for tool in options.tool or TOOLS:
        verdict = run(tool, command, options.verify)
        verdicts.append(verdict)
        counts = f"{verdict.errors} errors, {verdict.warnings} warnings"
        print(f"{tool}: {verdict.verdict} ({counts}) {verdict.first}".rstrip(), flush=True)
    if options.json:
        document = {
            "schema": "draftproof.sanitizer/1",
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(verdict.verdict != "clean" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
