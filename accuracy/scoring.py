"""Read answers out of free text: the published few-shot scorer, ours beside it, and arithmetic.

Number grammar of ours (`score`, `score_arithmetic`), after these spellings are made one: U+2212
is a minus sign, `{,}` a comma, `\\$` a `$`, `\\frac{a}{b}` (and dfrac, tfrac) is `a/b`.

    number   = [sign] [currency] [sign] value
    sign     = "-" | "+"            counts unless a letter, digit or closing bracket stands before
                                    it (there it subtracts); at the very start of what is read,
                                    spaces may follow it
    currency = "$" | "€" | "£" | "¥" | "₹", and one space may follow it
    value    = decimal | integer "/" digits | integer " " digits "/" digits
    decimal  = integer ["." digits] | "." digits
    integer  = digits | 1 to 3 digits, then groups of "," and 3 digits

Digits are ASCII. A run of digits, commas and points that is not a decimal (`1,00,000`, `1.2.3`), a
zero denominator, a date (`3/4/2020`), a clock time (`7:30`), a power of ten (`1e3`) and a run of
more than 100 characters have no value: they are read as no answer, never as their first digits. A
point or comma behind a number ends a sentence. Units, a percent sign and brackets are not looked
at: `18%` is 18. Leading zeros are allowed: `018` is 18. A number that the token limit cut is read
as it stands. Values are exact fractions, so 18.50 equals 18.5 and 1/3 equals nothing decimal.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

ANSWER_MARKER = "####"
NEXT_QUESTION = "Question"

# Longer runs are no answers, and Python refuses to convert very long ones.
_MAX_NUMBER_CHARACTERS = 100

_FRAC = re.compile(r"\\[dt]?frac\{(\d{1,50})\}\{(\d{1,50})\}")
_LEADING_SIGN = re.compile(r"\A\s*([-+])\s+(?=[$€£¥₹]?\s?\.?[0-9])")
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}])[-+])?
    (?:[$€£¥₹][ ]?)?
    (?P<inner>(?<=[$€£¥₹ ])[-+])?
    (?P<run>[0-9](?:[0-9,.]*[0-9])?|(?<![.0-9])\.[0-9](?:[0-9,.]*[0-9])?)
    (?:[ ](?P<part>[0-9]+)(?=/[0-9]))?
    (?:/(?P<denominator>[0-9]+))?
    (?P<spoilt>[eE][-+]?[0-9]|[:/][0-9])?
    """,
    re.VERBOSE | re.ASCII,
)
_INTEGER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+")
_DECIMAL = re.compile(rf"(?:{_INTEGER.pattern})(?:\.[0-9]+)?|\.[0-9]+")


class Scored(NamedTuple):
    """What a scorer read in a response, as text (None: no answer), and whether it is right."""

    extracted: str | None
    correct: bool


def _one_spelling(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    return _LEADING_SIGN.sub(r"\1", _FRAC.sub(r"\1/\2", text))


def _value(match: re.Match[str]) -> Fraction | None:
    """Value of a match of `_NUMBER`, None if it breaks the grammar."""
    run, part, denominator = match["run"], match["part"], match["denominator"]
    if match["spoilt"] or len(match[0]) > _MAX_NUMBER_CHARACTERS:
        return None
    if match["sign"] and match["inner"]:
        return None
    grammar = _DECIMAL if denominator is None else _INTEGER
    if not grammar.fullmatch(run) or (denominator and int(denominator) == 0):
        return None
    value = Fraction(run.replace(",", ""))
    if part:
        value += Fraction(int(part), int(denominator))
    elif denominator:
        value /= int(denominator)
    return -value if "-" in (match["sign"], match["inner"]) else value


def _text(value: Fraction | None) -> str | None:
    """Write a value as a decimal where it ends, else as a fraction."""
    if value is None:
        return None
    twos = fives = 0
    rest = value.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or not places:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


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
        if that number breaks the grammar of this module. "Question" is the lanes' first stop word:
        what stands behind it exists only where a server does not stop there.
    """
    before_next, _, _ = text.partition(NEXT_QUESTION)
    _, marker, answer = before_next.partition(ANSWER_MARKER)
    if not marker:
        return None
    answer, _, _ = answer.partition(ANSWER_MARKER)
    match = _NUMBER.search(_one_spelling(answer))
    return _value(match) if match else None


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
    return Scored(_text(got), got == wanted)


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
        The expected answer, a number by the grammar of this module.

    Returns
    -------
    Scored
        No answer if there is no number, or the last one breaks the grammar.

    Raises
    ------
    ValueError
        If the label is no number.
    """
    wanted, got = _last_value(label), _last_value(text)
    if wanted is None:
        raise ValueError(f"label: not a number, got {label!r}")
    return Scored(_text(got), got == wanted)


def _last_value(text: str) -> Fraction | None:
    matches = list(_NUMBER.finditer(_one_spelling(text)))
    return _value(matches[-1]) if matches else None
