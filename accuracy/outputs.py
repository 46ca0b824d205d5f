"""What a CI job takes from a command: JSON, a JUnit file, and a job summary in Markdown."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

STANDARD_OUTPUT = Path("-")

_NOT_IN_XML = re.compile("[^\\t\\n\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE|-", help="Write the outcome as JSON; -: to stdout."),
]
JUnitOption = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit file.")
]
SummaryOption = Annotated[
    Path | None,
    typer.Option(
        "--summary", metavar="FILE", help="Append Markdown: for $GITHUB_STEP_SUMMARY and the like."
    ),
]


@dataclass(frozen=True)
class Case:
    """One line of a JUnit file.

    Attributes
    ----------
    name : str
    text : str
        What the command said.
    failure : str or None
        The gate was missed.
    error : str or None
        Nothing was measured.
    seconds : float
    """

    name: str
    text: str
    failure: str | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Outputs:
    """Where a user wants the outcome, besides the terminal."""

    json: Path | None = None
    junit: Path | None = None
    summary: Path | None = None

    @property
    def holds_stdout(self) -> bool:
        """Whether standard output is JSON alone; texts for people then go to standard error."""
        return self.json == STANDARD_OUTPUT

    def write(self, value: dict[str, Any], cases: list[Case], markdown: str) -> None:
        """Write what was asked for.

        Raises
        ------
        OSError
            If a file cannot be written.
        """
        if self.json is not None:
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            if self.holds_stdout:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                self.json.write_text(text, encoding="utf-8")
        if self.junit is not None:
            self.junit.write_bytes(junit(cases))
        if self.summary is not None:
            with self.summary.open("a", encoding="utf-8") as file:
                file.write(markdown.rstrip() + "\n\n")


def junit(cases: list[Case]) -> bytes:
    """Write cases as a JUnit file."""
    suite = ElementTree.Element(
        "testsuite",
        name="draftproof accuracy",
        tests=str(len(cases)),
        failures=str(sum(case.failure is not None for case in cases)),
        errors=str(sum(case.error is not None for case in cases)),
        time=f"{sum(case.seconds for case in cases):.3f}",
    )
    for case in cases:
        element = ElementTree.SubElement(
            suite,
            "testcase",
            classname="draftproof.accuracy",
            name=case.name,
            time=f"{case.seconds:.3f}",
        )
        for kind, message in (("failure", case.failure), ("error", case.error)):
            if message is not None:
                told = _for_xml(message)
                ElementTree.SubElement(element, kind, message=told.splitlines()[0]).text = told
        ElementTree.SubElement(element, "system-out").text = _for_xml(case.text)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


def _for_xml(text: str) -> str:
    """Leave out the characters that XML has no way to write."""
    return _NOT_IN_XML.sub(" ", text) or " "


def markdown_of(title: str, verdict: str, lines: list[str]) -> str:
    """A heading, the verdict in bold, and the rest as it stands on a terminal."""
    fence = "````"
    return "\n".join([f"### {title}", "", f"**{verdict}**", "", fence, *lines, fence])
