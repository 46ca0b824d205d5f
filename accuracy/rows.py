"""Rows of `responses.jsonl`: what the file holds, and the little of it that a run keeps in mind."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftproof.accuracy.asking import Asked
from draftproof.accuracy.grading import Grade
from draftproof.accuracy.reading import Answer

_OPTIONAL_TEXT = ("text", "reasoning", "finish_reason", "matched", "model", "fingerprint")


class Usage(NamedTuple):
    """Token figures as the server told them, whatever they are; None where it did not."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    reasoning_tokens: Any = None
    spec_verify_ct: Any = None


@dataclass(slots=True)
class Row:
    """What a run keeps in mind of one row: all but its texts.

    Attributes
    ----------
    key : (str, int)
        Question and repeat.
    is_blank : bool
        Whether the text is empty, or nothing but spaces.
    has_text, has_reasoning : bool
    digest : bytes
        Of text and reasoning, to tell distinct texts.
    extracted, correct, published, grader_failure
        The grade; `correct` is None of an error, and until there is a grade.
    """

    key: tuple[str, int]
    session: int
    attempts: int
    retried: tuple[str, ...]
    paused_s: float
    finish_reason: str | None
    matched: str | None
    model: str | None
    fingerprint: str | None
    usage: Usage | None
    events: int
    is_blank: bool
    has_text: bool
    has_reasoning: bool
    digest: bytes
    extracted: str | None
    correct: bool | None
    published: tuple[str | None, bool] | None
    grader_failure: str | None
    error: str | None
    error_detail: str | None

    @property
    def question_id(self) -> str:
        return self.key[0]

    @property
    def repeat(self) -> int:
        return self.key[1]

    @property
    def is_empty(self) -> bool:
        """Whether the answer is empty.

        An answer that the token limit cut while the model was still thinking is no empty one: it
        is truncated and has no answer.
        """
        return self.is_blank and not (self.finish_reason == "length" and self.has_reasoning)

    def take(self, grade: Grade) -> None:
        """Take the grade of the row's text."""
        self.extracted, self.correct = grade.extracted, grade.correct
        self.published, self.grader_failure = grade.published, grade.failure

    def graded(self) -> dict[str, Any]:
        """The fields of the file that a grade changes."""
        fields: dict[str, Any] = {"extracted": self.extracted, "correct": self.correct}
        if self.published is not None:
            fields["published"] = {"extracted": self.published[0], "correct": self.published[1]}
        if self.grader_failure is not None:
            fields["grader_failure"] = self.grader_failure
        return fields


def make_row(
    question_id: str, repeat: int, seed: int | None, session: int, asked: Asked
) -> dict[str, Any]:
    """Write the row of an answer, or of a failure, that has just landed.

    An answer without anything to grade is wrong at once; every other answer waits for its grade.
    """
    answer = asked.answer or Answer()
    failure = asked.failure
    usage = Usage(*(getattr(answer, name) for name in Usage._fields))
    is_told = any(value is not None for value in usage)
    return {
        "question_id": question_id,
        "repeat": repeat,
        "seed": seed,
        "session": session,
        "attempt": asked.attempts,
        "retried": asked.retried,
        "paused_s": round(asked.paused_s, 3),
        "started": asked.started,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "matched": answer.matched,
        "model": answer.model,
        "fingerprint": answer.fingerprint,
        "usage": usage._asdict() if is_told and not failure else None,
        "events": answer.events,
        "latency": {"first_s": answer.first_s, "total_s": answer.total_s},
        "error": failure.kind if failure else None,
        "error_detail": failure.detail if failure else None,
        # Last, so that a grade can be filled in without reading the row again.
        "extracted": None,
        "correct": None if failure or (answer.text or "").strip() else False,
    }


def check_row(value: Any) -> dict[str, Any]:
    """Give back what is a row.

    Raises
    ------
    ValueError
        With what is wrong, if it is none.
    """
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {str(value)[:80]}")
    for name, kind in (("question_id", str), ("repeat", int)):
        if not isinstance(value.get(name), kind) or isinstance(value[name], bool):
            raise ValueError(f"{name}: must be {kind.__name__}, got {value.get(name)!r}")
    if value["repeat"] < 0:
        raise ValueError(f"repeat: must not be negative, got {value['repeat']}")
    for name in ("error", "correct", "extracted", "text"):
        if name not in value:
            raise ValueError(f"{name}: is missing")
    for name in ("error", "error_detail", "extracted", "grader_failure", *_OPTIONAL_TEXT):
        if not isinstance(value.get(name), str | None):
            raise ValueError(f"{name}: must be a text or null, got {value[name]!r}")
    if not isinstance(value["correct"], bool | None):
        raise ValueError(f"correct: must be true, false or null, got {value['correct']!r}")
    for name in ("usage", "published", "latency"):
        if not isinstance(value.get(name), dict | None):
            raise ValueError(f"{name}: must be an object or null, got {value[name]!r}")
    for name in ("session", "attempt", "events"):
        if not isinstance(value.get(name, 0), int):
            raise ValueError(f"{name}: must be a whole number, got {value[name]!r}")
    return value


def keep(row: dict[str, Any]) -> Row:
    """Take of a file's row what a run keeps in mind."""
    usage, published = row.get("usage"), row.get("published")
    text, reasoning = row["text"], row.get("reasoning")
    said = f"{text}\0{reasoning}".encode("utf-8", "surrogatepass")
    return Row(
        key=(sys.intern(row["question_id"]), row["repeat"]),
        session=row.get("session", 0),
        attempts=row.get("attempt", 1),
        retried=tuple(row.get("retried", ())),
        paused_s=row.get("paused_s") or 0.0,
        finish_reason=_known(row.get("finish_reason")),
        matched=_known(row.get("matched")),
        model=_known(row.get("model")),
        fingerprint=_known(row.get("fingerprint")),
        usage=None if usage is None else Usage(*(usage.get(name) for name in Usage._fields)),
        events=row.get("events", 0),
        is_blank=not (text or "").strip(),
        has_text=bool(text),
        has_reasoning=bool(reasoning),
        digest=hashlib.blake2b(said, digest_size=8).digest(),
        extracted=row["extracted"],
        correct=row["correct"],
        published=published and (published.get("extracted"), bool(published.get("correct"))),
        grader_failure=row.get("grader_failure"),
        error=_known(row["error"]),
        error_detail=row.get("error_detail"),
    )


def final_rows(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Map (question, repeat) to the last row about it: errors asked again are superseded."""
    return {row.key: row for row in rows}


def _known(text: str | None) -> str | None:
    """One object for each of the few texts that stand in many rows."""
    return None if text is None else sys.intern(text)
