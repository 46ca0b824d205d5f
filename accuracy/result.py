"""Turn a run's rows into its result: counts, metrics over what was planned, and objections."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from sgl_eval._vendored.nemo_skills.math_metrics import MathMetrics

from draftproof.accuracy import stats
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.runfolder import final_rows

SCHEMA = "draftproof.accuracy-result/1"


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
        What the checks before the first request found.
    is_strict : bool
        Whether an unproven protocol is no measurement.
    """

    question_ids: list[str]
    stopped: str | None
    unproven: list[str]
    flags: list[str]
    is_strict: bool


def make_result(lane: Lane, rows: list[dict[str, Any]], facts: RunFacts) -> dict[str, Any]:
    """Make the content of `result.json`.

    Parameters
    ----------
    lane : Lane
        What was planned.
    rows : list of dict
        All rows of `responses.jsonl`, in the order in which they landed.
    facts : RunFacts
        What else is known of the run.

    Returns
    -------
    dict
        `score`, `metrics` and `interval` are None unless the run is a measurement; the figures of
        one that is none are `partial_metrics`. Every figure's denominator is what was planned.
    """
    final = final_rows(rows)
    planned = len(facts.question_ids) * lane.repeats
    counts = _counts(rows, final, planned)
    flags = list(facts.flags)
    flags += [f"unproven: {name} (no effect of it was seen)" for name in facts.unproven]
    usage_faults = _usage_faults(lane, final)
    if usage_faults:
        flags.append(f"wrong usage figures, token figures are void: {usage_faults}")
    failures = [row for row in final.values() if row.get("grader_failure")]
    if failures:
        flags.append(
            f"the grader gave up on {len(failures)} answers, which count as wrong: "
            f"{failures[0]['question_id']}: {failures[0]['grader_failure']}"
        )
    metrics, repeat_flags = _metrics(lane, final, facts.question_ids)
    flags += repeat_flags
    reasons = _not_a_measurement(lane, counts, facts, final)
    measured = not reasons
    right = _right(final, facts.question_ids)
    interval = stats.score_interval(right, lane.repeats) if measured else None
    return {
        "schema": SCHEMA,
        "lane": lane.name,
        "lane_sha256": lane.sha256,
        "modified": lane.is_modified,
        "status": "incomplete" if facts.stopped or counts["landed"] < planned else "complete",
        "measurement": measured,
        "not_a_measurement": reasons,
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
        "flags": flags,
    }


def _counts(
    rows: list[dict[str, Any]], final: dict[tuple[str, int], dict[str, Any]], planned: int
) -> dict[str, Any]:
    answered = [row for row in final.values() if row["error"] is None]
    outcomes = Counter(_outcome(row) for row in answered)
    # Errors that a resumed run asked again stay counted.
    errors = Counter(row["error"] for row in rows if row["error"] is not None)
    return {
        "planned": planned,
        "landed": len(final),
        "correct": outcomes["correct"],
        "wrong": outcomes["wrong"],
        "no_answer": outcomes["no_answer"],
        "empty": outcomes["empty"],
        "ungraded": outcomes["ungraded"],
        "truncated": sum(row["finish_reason"] == "length" for row in answered),
        "stopped_by_word": sum(row["matched"] is not None for row in answered),
        "errors": dict(sorted(errors.items())),
        "errors_asked_again": sum(errors.values())
        - sum(row["error"] is not None for row in final.values()),
    }


def is_empty(row: dict[str, Any]) -> bool:
    """Whether a row's answer is empty.

    An answer that the token limit cut while the model was still thinking is no empty one: it is
    truncated and has no answer.
    """
    if (row["text"] or "").strip():
        return False
    return not (row["finish_reason"] == "length" and row["reasoning"])


def _outcome(row: dict[str, Any]) -> str:
    if is_empty(row):
        return "empty"
    if row["correct"] is None:
        return "ungraded"
    if row["correct"]:
        return "correct"
    return "no_answer" if row["extracted"] is None else "wrong"


def _right(final: dict[tuple[str, int], dict[str, Any]], question_ids: list[str]) -> list[int]:
    right = Counter(row["question_id"] for row in final.values() if row["correct"])
    return [right[question_id] for question_id in question_ids]


def _not_a_measurement(
    lane: Lane,
    counts: dict[str, Any],
    facts: RunFacts,
    final: dict[tuple[str, int], dict[str, Any]],
) -> list[str]:
    reasons = []
    if facts.stopped:
        reasons.append(f"incomplete: {facts.stopped}")
    elif counts["landed"] < counts["planned"]:
        reasons.append(f"incomplete: {counts['landed']} of {counts['planned']} landed")
    errors = sum(counts["errors"].values())
    if errors > lane.limits.errors:
        kinds = ", ".join(f"{kind} x {count}" for kind, count in counts["errors"].items())
        reasons.append(f"errors: {errors} ({kinds}), the lane allows {lane.limits.errors}")
    if counts["empty"] > lane.limits.empties:
        reasons.append(f"empty answers: {counts['empty']}, the lane allows {lane.limits.empties}")
    if counts["ungraded"]:
        reasons.append(f"ungraded answers: {counts['ungraded']}")
    if lane.repeats > 1 and lane.sampling.temperature > 0:
        distinct = _distinct_texts(final)
        repeated = [texts for texts, answers in distinct.values() if answers > 1]
        if repeated and all(texts == 1 for texts in repeated):
            reasons.append(
                f"identical repeats: at temperature {lane.sampling.temperature:g} all answers to "
                "each question are the same text, so they are copies, not samples"
            )
    if facts.is_strict and facts.unproven:
        reasons.append(f"unproven protocol (--strict): {', '.join(facts.unproven)}")
    return reasons


def _distinct_texts(
    final: dict[tuple[str, int], dict[str, Any]],
) -> dict[str, tuple[int, int]]:
    """Map each question to its number of distinct texts and of answers."""
    texts = defaultdict(list)
    for row in final.values():
        if row["error"] is None and not is_empty(row):
            texts[row["question_id"]].append((row["text"], row["reasoning"]))
    return {question: (len(set(said)), len(said)) for question, said in texts.items()}


def _metrics(
    lane: Lane, final: dict[tuple[str, int], dict[str, Any]], question_ids: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Compute the metrics as sgl-eval's MathMetrics does, missing answers as wrong ones."""
    repeats = lane.repeats
    theirs = MathMetrics()
    for question_id in question_ids:
        predictions = []
        for repeat in range(repeats):
            row = final.get((question_id, repeat), {})
            predictions.append(
                {
                    "predicted_answer": row.get("extracted"),
                    "symbolic_correct": bool(row.get("correct")),
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
        published = sum(bool((row.get("published") or {}).get("correct")) for row in final.values())
        metrics["score_published"] = published / (len(question_ids) * repeats)
    return metrics, flags


def _usage_faults(lane: Lane, final: dict[tuple[str, int], dict[str, Any]]) -> str | None:
    """Say what is wrong with the first wrong usage figures."""
    for row in final.values():
        if row["error"] is None and row["usage"] is not None:
            fault = usage_fault(row, lane.sampling.max_tokens)
            if fault:
                return f"{row['question_id']}, repeat {row['repeat']}: {fault}"
    return None


def usage_fault(row: dict[str, Any], max_tokens: int | None) -> str | None:
    """Say what is impossible in a row's usage figures, None if nothing is.

    Parameters
    ----------
    row : dict
        A row of `responses.jsonl`.
    max_tokens : int or None
        The limit that was sent.
    """
    usage = row["usage"]
    told = {name: value for name, value in usage.items() if value is not None}
    for name, value in told.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return f"{name} is {value!r}"
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    total, reasoning = usage.get("total_tokens"), usage.get("reasoning_tokens")
    if prompt == 0:
        return "prompt_tokens is 0"
    if completion is not None:
        if completion == 0 and row["text"]:
            return "completion_tokens is 0 with a text"
        if max_tokens is not None and completion > max_tokens:
            return f"completion_tokens is {completion}, the limit sent was {max_tokens}"
        if completion < row["events"]:
            return f"completion_tokens is {completion}, but {row['events']} pieces of text came"
        if reasoning is not None and reasoning > completion:
            return f"reasoning_tokens is {reasoning} of completion_tokens {completion}"
    if None not in (prompt, completion, total) and prompt + completion != total:
        return f"total_tokens is {total}, the parts make {prompt + completion}"
    return None


def _tokens(final: dict[tuple[str, int], dict[str, Any]]) -> dict[str, int | None]:
    """Sum the token figures; None where not every answer told them."""
    answered = [row["usage"] or {} for row in final.values() if row["error"] is None]
    tokens: dict[str, int | None] = {}
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        told = [usage[name] for usage in answered if usage.get(name) is not None]
        tokens[name] = sum(told) if told and len(told) == len(answered) else None
    return tokens


def _accept_length(final: dict[tuple[str, int], dict[str, Any]]) -> float | None:
    """Tokens per verification step over all answers, None unless every answer tells its steps."""
    answered = [row["usage"] or {} for row in final.values() if row["error"] is None]
    told = [
        (usage["completion_tokens"], usage["spec_verify_ct"])
        for usage in answered
        if usage.get("spec_verify_ct") and usage.get("completion_tokens") is not None
    ]
    if not told or len(told) < len(answered):
        return None
    return sum(tokens for tokens, _ in told) / sum(steps for _, steps in told)
