"""Rates of rounds and ratios of arms, with intervals that know a launch from a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftproof.accuracy.stats import LEVEL, t_quantile


class Timeline(NamedTuple):
    """What one streamed answer showed; times in seconds on one clock, tokens as counts so far.

    `first_tokens` came with the first event that brought any, at `first_s`.
    """

    sent_s: float
    first_s: float
    first_tokens: int
    last_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first event: prefill is excluded."""
        return (self.last_s - self.first_s) / (self.tokens - self.first_tokens)


@dataclass(frozen=True)
class RoundRate:
    """One round: requests sent at the same moment, each with a timeline.

    Attributes
    ----------
    user_rate : float
        Tokens a second that one user sees: 1 / median seconds a token.
    ttft_s : float
        Median seconds from sending to the first event.
    output_rate : float
        Tokens a second of all requests together, from the first sending to the last event.
    """

    user_rate: float
    ttft_s: float
    output_rate: float

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> RoundRate:
        """Take the rates of a round's requests.

        Raises
        ------
        ValueError
            If there is none, or one has no time or no token between its first and last event.
        """
        if not timelines:
            raise ValueError("timelines: needs at least one request, got none")
        for one in timelines:
            if one.tokens <= one.first_tokens or one.last_s <= one.first_s:
                raise ValueError(f"timelines: no token after the first event, got {one}")
        whole_s = max(one.last_s for one in timelines) - min(one.sent_s for one in timelines)
        return cls(
            1 / statistics.median(one.tpot_s for one in timelines),
            statistics.median(one.first_s - one.sent_s for one in timelines),
            sum(one.tokens for one in timelines) / whole_s,
        )


def spread(rates: Sequence[float]) -> float:
    """(largest - smallest) / median of the rounds' rates."""
    return (max(rates) - min(rates)) / statistics.median(rates)


class Ratio(NamedTuple):
    """Ratio of B's rate to A's; `low` and `high` None where no interval can be told, and why."""

    value: float
    low: float | None
    high: float | None
    level: float
    method: str

    @property
    def is_gain(self) -> bool:
        """Whether B is proven faster: the interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_loss(self) -> bool:
        """Whether B is proven slower: the interval lies below 1."""
        return self.high is not None and self.high < 1


def ratio(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], level: float = LEVEL
) -> Ratio:
    """Ratio of B's rates to A's, with an interval over launches and rounds.

    Parameters
    ----------
    a, b : mapping of launch to sequence of float
        The rates of each launch's rounds, all above 0.
    level : float
        Confidence.

    Returns
    -------
    Ratio
        Of the geometric means over launches. Rounds of one launch share what that launch happened
        to be (placement, clocks, memory layout), so launches are the samples: Welch's interval of
        the launches' mean log rates. Where launches differ by less than chance between their own
        rounds allows, that chance is the floor of its width. With one launch of an arm there is no
        interval: no number of rounds tells what another launch would do.

    Raises
    ------
    ValueError
        If an arm has no launch, a launch no round, or a rate is not above 0.
    """
    for name, arm in (("a", a), ("b", b)):
        if not arm or not all(arm.values()):
            raise ValueError(f"{name}: needs a launch, and a round of each launch, got {arm!r}")
        if min(min(rates) for rates in arm.values()) <= 0:
            raise ValueError(f"{name}: rates must be above 0, got {arm!r}")
    arms = [[[math.log(rate) for rate in rates] for rates in arm.values()] for arm in (a, b)]
    means = [[statistics.fmean(launch) for launch in arm] for arm in arms]
    difference = statistics.fmean(means[1]) - statistics.fmean(means[0])
    fewest = min(len(arm) for arm in arms)
    if fewest < 2:
        return Ratio(
            math.exp(difference), None, None, level, "one launch of an arm: no interval over them"
        )
    parts = [(statistics.variance(arm) / len(arm), len(arm) - 1) for arm in means]
    between = _half_width(parts, level)
    within = _half_width(
        [
            (
                statistics.variance(launch) / len(launch) / len(arm) ** 2,
                len(launch) - 1,
            )
            for arm in arms
            for launch in arm
            if len(launch) > 1
        ],
        level,
    )
    half = max(between, within)
    return Ratio(
        math.exp(difference),
        math.exp(difference - half),
        math.exp(difference + half),
        level,
        f"Welch over {len(means[0])} and {len(means[1])} launches, rounds as floor",
    )


def _half_width(parts: Sequence[tuple[float, int]], level: float) -> float:
    """Half width of an interval whose variance is a sum of parts with degrees of freedom each."""
    variance = math.fsum(part for part, _ in parts)
    if variance == 0:
        return 0.0
    freedom = variance**2 / math.fsum(part**2 / degrees for part, degrees in parts)
    return t_quantile(level, freedom) * math.sqrt(variance)


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the ranges of two arms' rates have a value in common."""
    return max(min(a), min(b)) <= min(max(a), max(b))
