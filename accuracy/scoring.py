"""Read answers out of free text: the published few-shot scorer, ours beside it, and arithmetic.

Ours (`score`, `score_arithmetic`) read numbers by the grammar of `draftproof.accuracy.numerals` and
compare them as exact fractions: 18.50 equals 18.5, and 1/3 equals nothing decimal. A number that
breaks the grammar is no answer. A number that the token limit cut is read as it stands.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from draftproof.accuracy.numerals import first_value, last_value, written

ANSWER_MARKER = "####"
NEXT_QUESTION = "Question"


class Scored(NamedTuple):
    """What a scorer read in a response, as text (None: no answer), and whether it is right."""

    extracted: str | None
    correct: bool


def marked_value(text: str) -> Fraction | None:
    """Read the answer behind the marker, by the rule of `score`.

    Parameters
    ----------
    text : str
        A response.

    Returns
    -------
    Fraction or None
        The first number between the first "####" and the second, or the next "Question" if that
        comes before; None without a "####" before the next "Question", without a number there, or
        if that number breaks the grammar. "Question" is the lanes' first stop word:
        what stands behind it exists only where a server does not stop there.
    """
    before_next, _, _ = text.partition(NEXT_QUESTION)
    _, marker, answer = before_next.partition(ANSWER_MARKER)
    if not marker:
        return None
    answer, _, _ = answer.partition(ANSWER_MARKER)
    return first_value(answer)


def published_value(text: str) -> int | None:
    """Read the answer as the published few-shot harness does, faults kept.

    Commas are dropped and the last run of digits is taken: signs and points are lost (`18.50` is
    50, `-3` is 3), numbers behind the answer replace it, and a run with a leading zero is invalid
    unless it is all zeros (`018` is, `00` is 0).

    Returns
    -------
    int or None
        None where that harness has its "invalid" value.
    """
    runs = re.findall(r"\d+", text.replace(",", ""))
    # That harness reads the run as a Python literal: ASCII only, 4300 digits at most.
    if not runs or not runs[-1].isascii() or len(runs[-1]) > 4300:
        return None
    last = runs[-1]
    if last[0] == "0" and last.strip("0"):
        return None
    return int(last)


def score(text: str, label: str) -> Scored:
    """Score a few-shot response by the number behind its "####".

    Parameters
    ----------
    text : str
        The response, as raw text.
    label : str
        The row's whole `answer`, whose last part is "#### <number>".

    Returns
    -------
    Scored
        Numbers are compared exactly, sign and decimals included.

    Raises
    ------
    ValueError
        If the label has no readable number behind a "####".
    """
    # Labels may say "Questions" in their work (row 138 of GSM8K's test set does), so only what
    # stands behind the last marker is read.
    wanted = marked_value(ANSWER_MARKER + label.rpartition(ANSWER_MARKER)[2])
    if wanted is None or ANSWER_MARKER not in label:
        raise ValueError(f"label: no number behind {ANSWER_MARKER!r}, got {label!r}")
    got = marked_value(text)
    return Scored(written(got), got == wanted)


def score_published(text: str, label: str) -> Scored:
    """Score a few-shot response as the published harness does, for comparison with its figures.

    The label is read by the same faulty rule, so rows 489 and 1113 of GSM8K's test set (-10 and -3)
    are held to be 10 and 3. A response without an answer is wrong.

    Parameters
    ----------
    text, label : str
        As for `score`.

    Raises
    ------
    ValueError
        If the label has no answer by that rule.
    """
    wanted = published_value(label)
    if wanted is None:
        raise ValueError(f"label: no valid run of digits, got {label!r}")
    got = published_value(text)
    return Scored(None if got is None else str(got), got == wanted)


def score_arithmetic(text: str, label: str) -> Scored:
    """Score a reply of the `arithmetic` lane by the last number in it.

    Parameters
    ----------
    text : str
        The reply.
    label : str
        The expected answer, a number by the grammar.

    Returns
    -------
    Scored
        No answer if there is no number, or the last one breaks the grammar.

    Raises
    ------
    ValueError
        If the label is no number.
    """
    wanted, got = last_value(label), last_value(text)
    if wanted is None:
        raise ValueError(f"label: not a number, got {label!r}")
    return Scored(written(got), got == wanted)
