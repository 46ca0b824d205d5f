"""Make run folders as the run side writes them, from tables of right and wrong answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftproof.accuracy import stats
from draftproof.accuracy.lanes import Lane, load_lane

# "1" right, "0" wrong, "-" no answer, "e" a failed request.
Marks = Sequence[str]


def lane_for(questions: int, repeats: int = 1, **changes: Any) -> Lane:
    """An `arithmetic` lane of so many questions, at temperature 1 if it repeats."""
    overrides = {"limit": questions, "repeats": repeats, **changes}
    if repeats > 1:
        overrides.setdefault("temperature", 1.0)
    return load_lane("arithmetic").modified(
        {name: json.dumps(value) for name, value in overrides.items()}
    )


def make_run(
    folder: Path,
    marks: Marks,
    lane: Lane | None = None,
    started: str = "2026-01-01T00:00:00.000+00:00",
    **changes: Any,
) -> Path:
    """Write a run folder.

    Parameters
    ----------
    folder : Path
        Made here.
    marks : sequence of str
        Per question, one mark a repeat.
    lane : Lane, optional
        Else `lane_for` as many questions and repeats as there are marks.
    changes
        Written over the result's fields, or with the prefix `receipt_` over the receipt's
        sections (dicts are merged).
    """
    lane = lane or lane_for(len(marks), len(marks[0]))
    rows, correct, errors = [], 0, 0
    for question, row_marks in enumerate(marks):
        for repeat, mark in enumerate(row_marks):
            correct += mark == "1"
            errors += mark == "e"
            extracted = {"1": str(question), "0": "wrong"}.get(mark)
            rows.append(
                {
                    "question_id": f"q-{question}",
                    "repeat": repeat,
                    "seed": None,
                    "text": None if mark == "e" else f"It is {extracted}.",
                    "reasoning": None,
                    "finish_reason": None if mark == "e" else "stop",
                    "usage": None,
                    "latency": {"first_s": 0.1, "total_s": 0.2},
                    "extracted": extracted,
                    "correct": None if mark == "e" else mark == "1",
                    "error": "http_500" if mark == "e" else None,
                    "attempt": 1,
                }
            )
    planned = len(marks) * lane.repeats
    right = [row.count("1") for row in marks]
    result = {
        "schema": "draftproof.accuracy-result/2",
        "lane": lane.name,
        "lane_sha256": lane.sha256,
        "modified": lane.is_modified,
        "status": "complete",
        "measurement": True,
        "not_a_measurement": [],
        "resumable": False,
        "doubts": [],
        "counts": {
            "planned": planned,
            "landed": len(rows),
            "correct": correct,
            "wrong": sum(row.count("0") for row in marks),
            "no_answer": sum(row.count("-") for row in marks),
            "odd_ends": {},
            "errors": {"http_500": errors} if errors else {},
            "attempts": len(rows),
            "retried": {},
            "paused_s": 0.0,
        },
        "score": correct / planned,
        "metrics": {"pass@1": correct / planned, "distinct_texts": 5},
        "interval": stats.score_interval(right, lane.repeats)._asdict(),
        "accept_length": None,
        "flags": [],
    }
    receipt: dict[str, Any] = {
        "schema": "draftproof.accuracy-receipt/2",
        "lane": lane.model_dump(mode="json"),
        "lane_sha256": lane.sha256,
        "label": None,
        "model": {"id": "a-model"},
        "server": {"base_url": "http://host:1", "told": {}, "build": {"/version: version": "1"}},
        "grader": {"scorer": lane.scorer, "files": {"scoring.py": "3" * 64}, "packages": {}},
        "protocol": {"sampling_sent": {"temperature": 0.0}, "dropped": []},
        "data": {"questions_sha256": "0" * 64, "prompts_sha256": "1" * 64},
        "times": {"started": started, "ended": started},
    }
    for name, value in changes.items():
        section = name.removeprefix("receipt_")
        if section == name:
            result[name] = value
        else:
            receipt[section] = {**receipt[section], **value}
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "responses.jsonl").write_text(lines, encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "receipt.json").write_text(json.dumps(receipt), encoding="utf-8")
    return folder
