"""Intervals, tests, verdicts and sample sizes for scores of runs and for paired differences.

Rates and differences are fractions here (0.01 is one percentage point). A difference is always
B minus A, so a loss is negative.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

# SciPy is imported where it is used: it takes a second, and a run of one repeat needs none of it.

_NORMAL = NormalDist()

LEVEL = 0.95
POWER = 0.8

# Sizes beyond these are not worth naming: nobody asks ten million questions or 4096 times each.
_MOST_QUESTIONS = 10_000_000
_MOST_REPEATS = 4096

Verdict = Literal["no worse", "worse", "worse within the margin", "cannot tell"]


class Interval(NamedTuple):
    """Two-sided confidence interval: bounds as fractions, and by which method."""

    low: float
    high: float
    level: float
    method: str


def wilson(correct: int, planned: int, level: float = LEVEL) -> Interval:
    """Wilson's interval for the score of a run with one response a question.

    Parameters
    ----------
    correct, planned : int
        Right answers, and questions planned (whether answered or not).
    level : float
        Confidence.

    Raises
    ------
    ValueError
        If nothing was planned or more is right than was planned.
    """
    if planned < 1 or not 0 <= correct <= planned:
        raise ValueError(f"correct: must be 0 to planned = {planned} > 0, got {correct}")
    low, high = _wilson_bounds(correct, planned, _NORMAL.inv_cdf((1 + level) / 2))
    return Interval(low, high, level, "Wilson")


def _wilson_bounds(correct: float, n: float, quantile: float) -> tuple[float, float]:
    """Solve Wilson's score equation; counts need not be whole, any quantile will do."""
    square = quantile * quantile
    middle = (correct + square / 2) / (n + square)
    half = quantile * math.sqrt(correct * (n - correct) / n + square / 4) / (n + square)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def wilson_repeats(rates: Sequence[float], repeats: int, level: float = LEVEL) -> Interval:
    """Wilson's interval with an effective sample size, for several responses a question.

    With p the mean of the rates and s its standard error over questions, n_eff = p(1-p)/s^2, and
    the quantile is Student's with questions - 1 degrees of freedom. n_eff is at most the number of
    responses (questions that agree by luck prove no more than that many responses can) and is the
    number of questions where p is 0 or 1.

    Parameters
    ----------
    rates : sequence of float
        Share of right answers per question, over the planned repeats.
    repeats : int
        Planned responses per question.

    Raises
    ------
    ValueError
        If there are fewer than two questions: no error over questions can be told.
    """
    n = len(rates)
    if n < 2:
        raise ValueError(f"rates: needs at least two questions, got {n}")
    p = math.fsum(rates) / n
    variance = math.fsum((rate - p) ** 2 for rate in rates) / (n - 1) / n
    if p in (0.0, 1.0):
        effective = float(n)
    elif variance == 0:
        effective = float(n * repeats)
    else:
        effective = min(p * (1 - p) / variance, float(n * repeats))
    low, high = _wilson_bounds(p * effective, effective, t_quantile(level, n - 1))
    method = f"Wilson, n_eff = {effective:.1f}, t quantile with {n - 1} degrees of freedom"
    return Interval(low, high, level, method)


def t_quantile(level: float, freedom: float) -> float:
    """Student's two-sided quantile with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))


def score_interval(right: Sequence[int], repeats: int, level: float = LEVEL) -> Interval:
    """Interval of a run's score: `wilson` for one response a question, else `wilson_repeats`.

    Parameters
    ----------
    right : sequence of int
        Right answers per planned question, each 0 to `repeats`; what never landed counts as wrong.
    repeats : int
        Planned responses per question.

    Notes
    -----
    A single question asked several times has no error over questions: its responses are then taken
    as independent.
    """
    if repeats == 1 or len(right) == 1:
        return wilson(sum(right), len(right) * repeats, level)
    return wilson_repeats([count / repeats for count in right], repeats, level)


def _tango_statistic(delta: float, gains: float, losses: float, n: float) -> float:
    """Tango's score statistic at a supposed difference; it falls as `delta` grows."""
    # The probability of a loss under the supposed difference is the larger root of
    # 2n q^2 + linear q + constant = 0, in the form that does not cancel.
    linear = -gains - losses + (2 * n - gains + losses) * delta
    constant = -losses * delta * (1 - delta)
    root = math.sqrt(max(linear * linear - 8 * n * constant, 0.0))
    loss = -2 * constant / (linear + root) if linear > 0 else (root - linear) / (4 * n)
    variance = n * (2 * loss + delta * (1 - delta))
    distance = gains - losses - n * delta
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def tango(gains: float, losses: float, n: float, level: float = LEVEL) -> Interval:
    """Tango's score interval for the difference of two paired proportions.

    Parameters
    ----------
    gains, losses : float
        Pairs that only B has right, and that only A has right. Need not be whole (see
        `paired_interval`).
    n : float
        Pairs.

    Returns
    -------
    Interval
        Of B - A: the differences whose score statistic is within the normal quantile. Without any
        discordant pair it is +- z^2 / (n + z^2), not [0, 0].

    Raises
    ------
    ValueError
        If the counts are negative or exceed n.

    Source: Tango, Statistics in Medicine 17 (1998), 891-908.
    """
    # Sums of squares may exceed n by a rounding error.
    if n <= 0 or gains < 0 or losses < 0 or gains + losses > n * (1 + 1e-12):
        raise ValueError(
            f"gains, losses: must be 0 or more and together at most n = {n}, "
            f"got {gains} and {losses}"
        )
    from scipy.optimize import brentq

    z = _NORMAL.inv_cdf((1 + level) / 2)
    estimate = (gains - losses) / n

    def solve(end: float, quantile: float) -> float:
        if abs(end - estimate) < 1e-12:
            return end
        return float(
            brentq(
                lambda delta: _tango_statistic(delta, gains, losses, n) - quantile,
                *sorted((end * (1 - 1e-15), estimate)),
                xtol=1e-13,
            )
        )

    return Interval(solve(-1.0, z), solve(1.0, -z), level, "Tango")


class Moments(NamedTuple):
    """What the paired interval needs of the per-question differences B - A.

    `n` questions, their mean difference `mean` and their mean squared difference `square`.
    """

    n: int
    mean: float
    square: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Moments:
        """Take the moments of per-question differences, each in [-1, 1]."""
        n = len(differences)
        if not n:
            raise ValueError("differences: needs at least one question, got none")
        return cls(n, math.fsum(differences) / n, math.fsum(d * d for d in differences) / n)


def paired_interval(moments: Moments, single: bool, level: float = LEVEL) -> Interval:
    """Interval of the mean paired difference B - A over questions.

    Parameters
    ----------
    moments : Moments
        Of the per-question differences.
    single : bool
        Whether each arm has one response a question: then Tango's interval. Otherwise Student's t
        interval with Tango's (n = questions) as its floor: the wider bound of the two on each side.

    Notes
    -----
    With several responses, differences lie between -1 and 1, and Tango's counts are those of a
    table with the same mean and the same mean square: gains - losses = n mean, gains + losses =
    n square (at least |n mean|, which no table can undercut). For single responses these are the
    counts themselves; for identical arms they are 0, where t alone would be [0, 0] at any n. The
    floor also keeps t honest where few questions flip altogether and the differences are skewed.
    """
    n, mean, square = moments
    discordant = max(square, abs(mean))
    floor = tango(n * (discordant + mean) / 2, n * (discordant - mean) / 2, n, level)
    if single or n == 1:
        return floor
    deviation = math.sqrt(max(square - mean * mean, 0.0) * n / (n - 1))
    half = t_quantile(level, n - 1) * deviation / math.sqrt(n)
    low, high = max(mean - half, -1.0), min(mean + half, 1.0)
    return Interval(
        min(low, floor.low), max(high, floor.high), level, "t over questions, Tango as floor"
    )


def mcnemar_exact(gains: int, losses: int) -> float:
    """Exact two-sided McNemar p-value of discordant pairs (1 if there are none).

    For several responses a question the pairs are questions on which B is better, or worse: the
    sign test, which for single responses is McNemar's.
    """
    if gains + losses == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses, 0.5).pvalue)


def verdict(interval: Interval, margin: float) -> Verdict:
    """Judge an interval of B - A by the tolerated loss `margin` (a fraction above 0)."""
    within = interval.low > -margin
    worse = interval.high < 0
    if within and worse:
        return "worse within the margin"
    if within:
        return "no worse"
    return "worse" if worse else "cannot tell"


def _smallest(tells: Callable[[int], bool], start: int, most: int) -> int | None:
    """Smallest size from `start` to `most` that tells, where every larger one does too."""
    failing, size = start - 1, start
    while not tells(size):
        if size >= most:
            return None
        failing, size = size, min(2 * size, most)
    while size - failing > 1:
        middle = (failing + size) // 2
        if tells(middle):
            size = middle
        else:
            failing = middle
    return size


def questions_that_would_tell(
    moments: Moments, single: bool, margin: float, level: float = LEVEL
) -> int | None:
    """Smallest number of questions at which the verdict would not be "cannot tell".

    Found by search over the interval itself, with the difference and the churn per question as
    observed; the usual normal formula asks for too few where few answers flip (none at all where
    none does).

    Returns
    -------
    int or None
        None if ten million are too few.
    """
    return _smallest(
        lambda n: (
            verdict(paired_interval(moments._replace(n=n), single, level), margin) != "cannot tell"
        ),
        max(moments.n, 2),
        _MOST_QUESTIONS,
    )


def repeats_that_would_tell(
    moments: Moments, noise: float, repeats: int, margin: float, level: float = LEVEL
) -> int | None:
    """Smallest number of responses per question and arm that would tell, on the same questions.

    Parameters
    ----------
    noise : float
        Part of the mean square that is chance within questions at `repeats` responses (see
        `repeat_noise`): it falls as 1/repeats, the rest of the square stays.

    Returns
    -------
    int or None
        None if 4096 are too few, as where the questions are too few for the margin at any number
        of repeats.
    """
    lasting = max(moments.square - noise, moments.mean * moments.mean)

    def tells(count: int) -> bool:
        square = min(lasting + noise * repeats / count, 1.0)
        supposed = moments._replace(square=square)
        return verdict(paired_interval(supposed, False, level), margin) != "cannot tell"

    return _smallest(tells, repeats, _MOST_REPEATS)


def repeat_noise(right_a: Sequence[int], right_b: Sequence[int], repeats: int) -> float:
    """Mean over questions of the variance of B - A that chance within questions causes.

    Parameters
    ----------
    right_a, right_b : sequence of int
        Right answers per question, each 0 to `repeats` (two or more).
    """
    # Per question and arm, rate (1 - rate) / (repeats - 1).
    spread = math.fsum(count * (repeats - count) for count in (*right_a, *right_b))
    return spread / (repeats * repeats * (repeats - 1)) / len(right_a)


def smallest_difference(churn: float, n: int, level: float = LEVEL, power: float = POWER) -> float:
    """Smallest true difference that a paired comparison finds with the given power.

    Parameters
    ----------
    churn : float
        Mean squared per-question difference; for single responses the share of flipped questions.
    n : int
        Questions.

    Notes
    -----
    By the normal formula (z_level + z_power) sqrt(churn / n): for planning, not for verdicts.
    """
    return (_NORMAL.inv_cdf((1 + level) / 2) + _NORMAL.inv_cdf(power)) * math.sqrt(churn / n)


def pass_at_k(right: Sequence[int], repeats: int, k: int) -> float:
    """Mean chance that at least one of k of a question's responses is right.

    Parameters
    ----------
    right : sequence of int
        Right answers per question, each 0 to `repeats`.
    k : int
        1 to `repeats`.

    Notes
    -----
    1 - C(wrong, k) / C(repeats, k) per question.
    """
    if not 1 <= k <= repeats:
        raise ValueError(f"k: must be 1 to repeats = {repeats}, got {k}")
    return math.fsum(
        1 - math.comb(repeats - count, k) / math.comb(repeats, k) for count in right
    ) / len(right)


def majority_at_k(
    answers: Sequence[Sequence[str | None]], right: Sequence[Sequence[bool]]
) -> float:
    """Mean score of the most frequent answer, as MathMetrics votes.

    Parameters
    ----------
    answers, right : sequence of sequence
        Per question, per response: what was read (None: no answer, which has no vote) and whether
        it is right. Every question has all its planned responses: one that never landed stands as
        None and wrong.

    Notes
    -----
    Answers are the same if they are the same text and equally right. Of several most frequent
    answers the mean of their scores counts; a question without any answer scores 0.
    """
    scores = []
    for texts, marks in zip(answers, right, strict=True):
        votes = Counter(
            (text, mark) for text, mark in zip(texts, marks, strict=True) if text is not None
        )
        most = max(votes.values(), default=0)
        winners = [mark for (_, mark), count in votes.items() if count == most]
        scores.append(sum(winners) / len(winners) if winners else 0.0)
    return math.fsum(scores) / len(scores)
