"""Turn a run's rows into its result: counts, metrics over what was planned, and objections."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_eval._vendored.nemo_skills.math_metrics import MathMetrics

from draftproof.accuracy import stats
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.rows import Row, Usage, final_rows

SCHEMA = "draftproof.accuracy-result/2"

# Ways for a model to end an answer; every other finish reason is odd.
_ENDS = ("stop", "length")
# A run with more answers than this that hold no readable answer says so beside its score.
_UNREADABLE_SHARE = 0.1

Final = dict[tuple[str, int], Row]


@dataclass(frozen=True)
class RunFacts:
    """What the rows do not tell.

    Attributes
    ----------
    question_ids : list of str
        The questions planned.
    stopped : str or None
        Why the run ended before everything planned had landed.
    unproven : list of str
        Fields of the protocol whose effect was not seen.
    flags : list of str
        What the checks before the first request found, and what else a reader must know.
    is_strict : bool
        Whether an unproven protocol is no measurement.
    model : str or None
        The model asked for; None where answers name none.
    label : str or None
        What the user calls the run.
    build_changes : list of str
        In what the server's build changed during the run.
    """

    question_ids: list[str]
    stopped: str | None
    unproven: list[str]
    flags: list[str]
    is_strict: bool
    model: str | None = None
    label: str | None = None
    build_changes: list[str] = field(default_factory=list)


def make_result(lane: Lane, rows: list[Row], facts: RunFacts) -> dict[str, Any]:
    """Make the content of `result.json`.

    Parameters
    ----------
    lane : Lane
        What was planned.
    rows : list of Row
        All rows of `responses.jsonl`, in the order in which they landed.
    facts : RunFacts
        What else is known of the run.

    Returns
    -------
    dict
        `score`, `metrics` and `interval` are None unless the run is a measurement; the figures of
        one that is none are `partial_metrics`. Every figure's denominator is what was planned.
        `resumable` says whether `--resume` can make a measurement of it.
    """
    final = final_rows(rows)
    planned = len(facts.question_ids) * lane.repeats
    counts = _counts(lane, rows, final, planned)
    flags = list(facts.flags)
    flags += [f"unproven: {name} (no effect of it was seen)" for name in facts.unproven]
    usage_faults = _usage_faults(lane, final)
    if usage_faults:
        flags.append(f"wrong usage figures, token figures are void: {usage_faults}")
    failures = [row for row in final.values() if row.grader_failure]
    if failures:
        flags.append(
            f"the grader gave up on {len(failures)} answers, which count as wrong: "
            f"{failures[0].question_id}: {failures[0].grader_failure}"
        )
    models = _names(row.model for row in rows)
    others = [name for name in models if facts.model is not None and name != facts.model]
    if others:
        flags.append(f"asked for model {facts.model!r}, the answers name {', '.join(others)}")
    metrics, repeat_flags = _metrics(lane, final, facts.question_ids)
    flags += repeat_flags
    lost, missing = _objections(lane, rows, counts, facts, final)
    reasons = lost + missing
    measured = not reasons
    right = _right(final, facts.question_ids)
    interval = stats.score_interval(right, lane.repeats) if measured else None
    return {
        "schema": SCHEMA,
        "lane": lane.name,
        "lane_sha256": lane.sha256,
        "modified": lane.is_modified,
        "label": facts.label,
        "status": "incomplete" if facts.stopped or counts["landed"] < planned else "complete",
        "measurement": measured,
        "not_a_measurement": reasons,
        "resumable": bool(missing) and not lost,
        "counts": counts,
        "score": counts["correct"] / planned if measured else None,
        # By another name, so that nobody who reads the usual one takes them for a score.
        "metrics": metrics if measured else None,
        "partial_metrics": None if measured else metrics,
        "interval": interval
        and {
            "level": interval.level,
            "low": interval.low,
            "high": interval.high,
            "method": interval.method,
        },
        "tokens": None if usage_faults else _tokens(final),
        "accept_length": None if usage_faults else _accept_length(final),
        "models_answering": models,
        "doubts": _doubts(counts, final),
        "flags": flags,
    }


def end_kind(row: Row, max_tokens: int | None) -> str | None:
    """Kind of an odd end: a finish reason that neither the model nor the limit sent explains.

    Parameters
    ----------
    row : Row
        Of an answer.
    max_tokens : int or None
        The limit that was sent.

    Returns
    -------
    str or None
        `length_below_limit`, or the reason itself; None for an end that is not odd.
    """
    if row.error is not None or row.finish_reason is None:
        return None
    if row.finish_reason not in _ENDS:
        return row.finish_reason
    if row.finish_reason == "length" and max_tokens is not None and row.usage is not None:
        tokens = row.usage.completion_tokens
        if isinstance(tokens, int) and 0 <= tokens < max_tokens:
            return "length_below_limit"
    return None


def _counts(lane: Lane, rows: list[Row], final: Final, planned: int) -> dict[str, Any]:
    answered = [row for row in final.values() if row.error is None]
    outcomes = Counter(_outcome(row) for row in answered)
    # Errors that a resumed run asked again stay counted.
    errors = Counter(row.error for row in rows if row.error is not None)
    ends = Counter(end_kind(row, lane.sampling.max_tokens) for row in answered)
    del ends[None]
    retried = Counter(kind for row in rows for kind in row.retried)
    return {
        "planned": planned,
        "landed": len(final),
        "correct": outcomes["correct"],
        "wrong": outcomes["wrong"],
        "no_answer": outcomes["no_answer"],
        "empty": outcomes["empty"],
        "ungraded": outcomes["ungraded"],
        "truncated": sum(row.finish_reason == "length" for row in answered),
        "stopped_by_word": sum(row.matched is not None for row in answered),
        "odd_ends": dict(sorted(ends.items())),
        "errors": dict(sorted(errors.items())),
        "errors_asked_again": errors.total() - sum(row.error is not None for row in final.values()),
        "attempts": sum(row.attempts for row in rows),
        "retried": dict(sorted(retried.items())),
        "paused_s": round(sum(row.paused_s for row in rows), 3),
    }


def _outcome(row: Row) -> str:
    if row.is_empty:
        return "empty"
    if row.correct is None:
        return "ungraded"
    if row.correct:
        return "correct"
    return "no_answer" if row.extracted is None else "wrong"


def _right(final: Final, question_ids: list[str]) -> list[int]:
    right = Counter(row.question_id for row in final.values() if row.correct)
    return [right[question_id] for question_id in question_ids]


def _names(names: Iterable[str | None]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name is not None]


def limits_broken(lane: Lane, counts: dict[str, Any]) -> list[str]:
    """Say which limits of the lane the counts break; going on mends none of it."""
    reasons = []
    for name, said, limit in (
        ("errors", "errors", lane.limits.errors),
        ("empty", "empty answers", lane.limits.empties),
        ("odd_ends", "odd ends", lane.limits.odd_ends),
    ):
        found = counts[name]
        total = sum(found.values()) if isinstance(found, dict) else found
        if total > limit:
            kinds = ""
            if isinstance(found, dict):
                told = ", ".join(f"{kind} x {count}" for kind, count in sorted(found.items()))
                kinds = f" ({told})"
            reasons.append(f"{said}: {total}{kinds}, the lane allows {limit}")
    return reasons


def _objections(
    lane: Lane, rows: list[Row], counts: dict[str, Any], facts: RunFacts, final: Final
) -> tuple[list[str], list[str]]:
    """Why it is no measurement: what cannot be mended any more, and what going on would."""
    missing = []
    if facts.stopped:
        missing.append(f"incomplete: {facts.stopped}")
    elif counts["landed"] < counts["planned"]:
        missing.append(f"incomplete: {counts['landed']} of {counts['planned']} landed")
    if counts["ungraded"]:
        missing.append(f"ungraded answers: {counts['ungraded']}")
    lost = limits_broken(lane, counts)
    models = _names(row.model for row in rows)
    if len(models) > 1:
        lost.append(f"the model changed: the answers name {', '.join(models)}")
    prints = _names(row.fingerprint for row in rows)
    if len(prints) > 1:
        lost.append(f"the build changed: the answers' fingerprints are {', '.join(prints)}")
    if facts.build_changes:
        lost.append(f"the build changed: {'; '.join(facts.build_changes)}")
    if lane.repeats > 1 and lane.sampling.temperature > 0 and not missing:
        distinct = _distinct_texts(final)
        repeated = [texts for texts, answers in distinct.values() if answers > 1]
        if repeated and all(texts == 1 for texts in repeated):
            lost.append(
                f"identical repeats: at temperature {lane.sampling.temperature:g} all answers to "
                "each question are the same text, so they are copies, not samples"
            )
    if facts.is_strict and facts.unproven:
        # Answers to come may still prove it.
        where = missing if missing else lost
        where.append(f"unproven protocol (--strict): {', '.join(facts.unproven)}")
    return lost, missing


def _doubts(counts: dict[str, Any], final: Final) -> list[str]:
    """What belongs beside the score itself: answers that hold none, and answers all cut off."""
    answered = sum(row.error is None for row in final.values())
    unreadable = counts["no_answer"] + counts["empty"]
    doubts = []
    if answered and unreadable > _UNREADABLE_SHARE * answered:
        doubts.append(f"{unreadable} of {answered} answers hold no readable answer")
    if answered and counts["truncated"] == answered:
        doubts.append(f"all {answered} answers were cut by the token limit")
    return doubts


def _distinct_texts(final: Final) -> dict[str, tuple[int, int]]:
    """Map each question to its number of distinct texts and of answers."""
    texts = defaultdict(list)
    for row in final.values():
        if row.error is None and not row.is_empty:
            texts[row.question_id].append(row.digest)
    return {question: (len(set(said)), len(said)) for question, said in texts.items()}


def _metrics(lane: Lane, final: Final, question_ids: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Compute the metrics as sgl-eval's MathMetrics does, missing answers as wrong ones."""
    repeats = lane.repeats
    theirs = MathMetrics()
    for question_id in question_ids:
        predictions = []
        for repeat in range(repeats):
            row = final.get((question_id, repeat))
            predictions.append(
                {
                    "predicted_answer": row.extracted if row else None,
                    "symbolic_correct": bool(row and row.correct),
                }
            )
        theirs.update(predictions)
    raw = theirs.get_metrics()
    headline = raw["pass@1" if repeats == 1 else f"pass@1[avg-of-{repeats}]"]
    metrics = {
        "pass@1": headline["symbolic_correct"] / 100,
        "no_answer": headline["no_answer"] / 100,
    }
    flags = []
    if repeats > 1:
        for name in (f"pass@{repeats}", f"majority@{repeats}"):
            metrics[name] = raw[name]["symbolic_correct"] / 100
        distinct = _distinct_texts(final)
        copies = sum(answers > 1 and texts == 1 for texts, answers in distinct.values())
        metrics["distinct_texts"] = sum(texts for texts, _ in distinct.values())
        if copies:
            flags.append(f"{copies} of {len(question_ids)} questions got the same text each time")
    if lane.scorer == "few-shot":
        published = sum(bool(row.published and row.published[1]) for row in final.values())
        metrics["score_published"] = published / (len(question_ids) * repeats)
    return metrics, flags


def _usage_faults(lane: Lane, final: Final) -> str | None:
    """Say what is wrong with the first wrong usage figures."""
    for row in final.values():
        if row.error is None and row.usage is not None:
            fault = usage_fault(row, lane.sampling.max_tokens)
            if fault:
                return f"{row.question_id}, repeat {row.repeat}: {fault}"
    return None


def usage_fault(row: Row, max_tokens: int | None) -> str | None:
    """Say what is impossible in a row's usage figures, None if nothing is.

    Parameters
    ----------
    row : Row
        Of an answer with usage figures.
    max_tokens : int or None
        The limit that was sent.
    """
    usage = row.usage or Usage()
    for name, value in usage._asdict().items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            return f"{name} is {value!r}"
    prompt, completion, total, reasoning, _ = usage
    if prompt == 0:
        return "prompt_tokens is 0"
    if completion is not None:
        if completion == 0 and row.has_text:
            return "completion_tokens is 0 with a text"
        if max_tokens is not None and completion > max_tokens:
            return f"completion_tokens is {completion}, the limit sent was {max_tokens}"
        if completion < row.events:
            return f"completion_tokens is {completion}, but {row.events} pieces of text came"
        if reasoning is not None and reasoning > completion:
            return f"reasoning_tokens is {reasoning} of completion_tokens {completion}"
    if None not in (prompt, completion, total) and prompt + completion != total:
        return f"total_tokens is {total}, the parts make {prompt + completion}"
    return None


def _tokens(final: Final) -> dict[str, int | None]:
    """Sum the token figures; None where not every answer told them."""
    answered = [row.usage or Usage() for row in final.values() if row.error is None]
    tokens: dict[str, int | None] = {}
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        told = [getattr(usage, name) for usage in answered if getattr(usage, name) is not None]
        tokens[name] = sum(told) if told and len(told) == len(answered) else None
    return tokens


def _accept_length(final: Final) -> float | None:
    """Tokens per verification step over all answers, None unless every answer tells its steps."""
    answered = [row.usage or Usage() for row in final.values() if row.error is None]
    told = [
        (usage.completion_tokens, usage.spec_verify_ct)
        for usage in answered
        if usage.spec_verify_ct and usage.completion_tokens is not None
    ]
    if not told or len(told) < len(answered):
        return None
    return sum(tokens for tokens, _ in told) / sum(steps for _, steps in told)
