"""Read finished run folders for comparisons and reports, and refuse what is no measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.accuracy.lanes import Lane, lane_from
from draftproof.accuracy.runfolder import (
    RECEIPT,
    RESPONSES,
    RESULT,
    holder_of,
    read_rows,
)

# Exit code of what is no measurement; 1 is kept for a loss that was proven.
NO_MEASUREMENT = 4

RESULT_SCHEMA = "draftproof.accuracy-result/2"
RECEIPT_SCHEMA = "draftproof.accuracy-receipt/2"

# Any of them makes a folder a run's.
_FILES = (RESULT, RECEIPT, RESPONSES)

# What is read of each file; more may stand there.
_RESULT_FIELDS = (
    "lane_sha256",
    "status",
    "measurement",
    "not_a_measurement",
    "resumable",
    "doubts",
    "counts.correct",
    "counts.errors",
    "score",
    "metrics",
    "interval",
    "accept_length",
    "flags",
)
_RECEIPT_FIELDS = (
    "lane",
    "model.id",
    "protocol.sampling_sent",
    "protocol.dropped",
    "data.questions_sha256",
    "data.prompts_sha256",
    "grader",
    "label",
    "server.base_url",
    "server.build",
    "times.started",
)


class NotAMeasurement(ValueError):
    """The run is missing, incomplete or killed, or its result says that it measured nothing."""


@dataclass(frozen=True)
class Run:
    """A run folder, read and checked.

    Attributes
    ----------
    folder : Path
    lane : Lane
        As it was when the run was made, from the receipt.
    result, receipt : dict
        The folder's JSON files.
    rows : dict
        Last row per (question id, repeat).
    """

    folder: Path
    lane: Lane
    result: dict[str, Any]
    receipt: dict[str, Any]
    rows: dict[tuple[str, int], dict[str, Any]]

    @property
    def question_ids(self) -> list[str]:
        """Ids of the questions that were asked, numbers in them in order."""
        return sorted({question for question, _ in self.rows}, key=natural_key)

    def right(self, question: str) -> int:
        """Right answers to a question over the planned repeats; what never landed is wrong."""
        return sum(self.is_right(question, repeat) for repeat in range(self.lane.repeats))

    def is_right(self, question: str, repeat: int) -> bool:
        """Whether that response landed and is right."""
        row = self.rows.get((question, repeat))
        return bool(row and row["correct"])

    def right_counts(self) -> list[int]:
        """Right answers per planned question; questions that were never asked stand as 0."""
        counts = [self.right(question) for question in self.question_ids]
        return counts + [0] * (self.lane.dataset.scored - len(counts))


def natural_key(text: str) -> list[tuple[int, int | str]]:
    """Sort key that puts `aime25-9` before `aime25-10`."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def _read_json(path: Path, schema: str, fields: Sequence[str]) -> dict[str, Any]:
    source = f"run {path.parent}: {path.name}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{source}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source}: must be an object, got {content!r}")
    if content.get("schema") != schema:
        raise ValueError(f"{source}: schema: must be {schema}, got {content.get('schema')!r}")
    for field in fields:
        part: Any = content
        for key in field.split("."):
            if not isinstance(part, dict) or key not in part:
                raise ValueError(f"{source}: {field}: is missing")
            part = part[key]
    return content


def load_run(folder: Path) -> Run:
    """Read a run folder, whether it is a measurement or not.

    Raises
    ------
    ValueError
        If it is no run folder, or its files contradict each other.
    """
    if not folder.is_dir():
        raise ValueError(f"run {folder}: is no folder")
    result = _read_json(folder / RESULT, RESULT_SCHEMA, _RESULT_FIELDS)
    receipt = _read_json(folder / RECEIPT, RECEIPT_SCHEMA, _RECEIPT_FIELDS)
    lane = lane_from(receipt["lane"], f"run {folder}: {RECEIPT}: lane")
    if lane.sha256 != result["lane_sha256"]:
        raise ValueError(
            f"run {folder}: {RESULT} has lane_sha256 {result['lane_sha256']}, but the lane in "
            f"{RECEIPT} has {lane.sha256}"
        )
    rows = {(row["question_id"], row["repeat"]): row for row in read_rows(folder)}
    run = Run(folder, lane, result, receipt, rows)
    if len(run.question_ids) > lane.dataset.scored:
        raise ValueError(
            f"run {folder}: has answers to {len(run.question_ids)} questions, but the lane asks "
            f"{lane.dataset.scored}"
        )
    counted, found = result["counts"]["correct"], sum(run.right_counts())
    if counted != found:
        raise ValueError(
            f"run {folder}: {RESULT} counts {counted} right answers, its responses hold {found}"
        )
    return run


def load_measurement(folder: Path) -> Run:
    """Read a run folder that must be a measurement.

    Raises
    ------
    NotAMeasurement
        If it is missing, incomplete, killed or not a measurement; the message says what mends it.
    ValueError
        If it is no run folder, or its files contradict each other.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in _FILES):
        raise NotAMeasurement(f"run {folder}: is missing: there is no run")
    go_on = f"to go on: its command with --resume {folder}"
    if not (folder / RESULT).exists():
        holder = holder_of(folder)
        if holder is not None:
            raise NotAMeasurement(f"run {folder}: still runs (process {holder})")
        raise NotAMeasurement(f"run {folder}: ended without a result, as by a kill; {go_on}")
    run = load_run(folder)
    result = run.result
    if not result["measurement"]:
        reasons = "; ".join(result["not_a_measurement"])
        status = "incomplete" if result["status"] != "complete" else "not a measurement"
        advice = go_on if result["resumable"] else "going on cannot mend it: run it anew"
        raise NotAMeasurement(f"run {folder}: is {status}: {reasons}; {advice}")
    return run
