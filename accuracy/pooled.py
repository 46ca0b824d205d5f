"""Several lanes as one comparison: stratified, with a bound that proves more from few questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftproof.accuracy import stats
from draftproof.accuracy.compare import NotComparable, compare
from draftproof.accuracy.report import Bar, Page, Section, draw, percent, points, write_page
from draftproof.accuracy.runs import load_measurement

SCHEMA = "draftproof.accuracy-pool/1"

# Pools of fewer questions are judged by the product bound. Fixed here, so that no look at the data
# chooses the method: with 100 questions or more the usual interval has the power.
PRODUCT_BELOW_QUESTIONS = 100
# Largest chance that a true loss of the whole margin is called "no worse".
FALSE_NO_WORSE = 0.05

_POWER_DRAWS = 2000
_POWER_SEED = 60


def stratified_interval(
    strata: Sequence[Sequence[float]], single: bool, level: float = stats.LEVEL
) -> stats.Interval:
    """Interval of the mean paired difference over the questions of several lanes.

    Parameters
    ----------
    strata : sequence of sequence of float
        Per lane, its per-question differences B - A, each in [-1, 1].
    single : bool
        Whether every lane has one response a question: then Tango's interval over all questions.
    level : float
        Confidence.

    Returns
    -------
    Interval
        Of the mean over all questions. Each lane has its own mean and variance (Student's t with
        Satterthwaite's degrees of freedom); Tango's interval for as many questions is its floor,
        as in `stats.paired_interval`.

    Raises
    ------
    ValueError
        If a lane has fewer than two questions.
    """
    for differences in strata:
        if len(differences) < 2:
            raise ValueError(f"strata: needs two questions a lane, got {len(differences)}")
    everything = [one for differences in strata for one in differences]
    moments = stats.Moments.of(everything)
    floor = stats.paired_interval(moments, True, level)
    if single:
        return floor
    total = len(everything)
    # Of each lane, its part of the variance of the mean over all questions.
    parts = []
    for differences in strata:
        n, mean, square = stats.Moments.of(differences)
        variance = max(square - mean * mean, 0.0) * n / (n - 1)
        parts.append((n * variance / total**2, n - 1))
    variance = math.fsum(part for part, _ in parts)
    if variance == 0:
        return floor
    freedom = variance**2 / math.fsum(part**2 / degrees for part, degrees in parts)
    half = stats.t_quantile(level, freedom) * math.sqrt(variance)
    return stats.Interval(
        min(max(moments.mean - half, -1.0), floor.low),
        max(min(moments.mean + half, 1.0), floor.high),
        level,
        "stratified t over questions, Tango as floor",
    )


def product_bound(differences: Sequence[float], false: float = FALSE_NO_WORSE) -> float:
    """One-sided lower bound of the mean of B - A: the geometric mean of 1 + d, times a penalty.

    Parameters
    ----------
    differences : sequence of float
        Per-question differences, each in [-1, 1].
    false : float
        Largest chance that the bound lies above the true mean.

    Returns
    -------
    float
        prod(1 + d)^(1/n) false^(1/n) - 1. Without any difference it is false^(1/n) - 1, the exact
        bound of no loss among n questions; a question that B loses altogether makes it -1.

    Notes
    -----
    Why it holds, for any distribution of the differences and not by simulation: questions are
    independent, so the product of 1 + d has the mean prod(1 + E d), which is at most (1 + m)^n, m
    the true mean over all questions (geometric mean below arithmetic). By Markov's inequality the
    product is (1 + m)^n / false or more with a chance of at most `false`, and the bound is above m
    only then. Lanes of different difficulty need no weights: m is the mean over all questions.
    """
    if not differences:
        raise ValueError("differences: needs at least one question, got none")
    if min(differences) <= -1:
        return -1.0
    logs = math.fsum(math.log1p(one) for one in differences)
    return math.exp((logs + math.log(false)) / len(differences)) - 1


def pooled_verdict(
    strata: Sequence[Sequence[float]], single: bool, margin: float
) -> tuple[stats.Verdict, stats.Interval, float | None]:
    """Judge the differences of several lanes as one.

    Parameters
    ----------
    strata, single
        As for `stratified_interval`.
    margin : float
        Tolerated loss, a fraction above 0.

    Returns
    -------
    verdict : str
        `worse` by the interval, as for a single lane. `no worse` by the product bound in a pool of
        fewer than `PRODUCT_BELOW_QUESTIONS`, else by the interval.
    interval : Interval
        Two-sided.
    bound : float or None
        The product bound, where it decides.
    """
    interval = stratified_interval(strata, single)
    everything = [one for differences in strata for one in differences]
    if len(everything) >= PRODUCT_BELOW_QUESTIONS:
        return stats.verdict(interval, margin), interval, None
    bound = product_bound(everything)
    return stats.verdict(interval._replace(low=bound), margin), interval, bound


def power_if_equal(
    rates: Sequence[Sequence[float]], repeats: Sequence[int], margin: float
) -> float:
    """Chance that two equal arms would be called no worse, by simulation from observed rates.

    Parameters
    ----------
    rates : sequence of sequence of float
        Per lane, the share of right answers to each of its questions, taken as true for both arms.
    repeats : sequence of int
        Per lane, responses per question and arm.
    margin : float
        Tolerated loss, a fraction.
    """
    import numpy as np

    rng = np.random.default_rng(_POWER_SEED)
    single = all(count == 1 for count in repeats)
    total = sum(map(len, rates))
    drawn = [
        (rng.binomial(n, lane, (_POWER_DRAWS, len(lane))) / n)
        - (rng.binomial(n, lane, (_POWER_DRAWS, len(lane))) / n)
        for lane, n in zip(map(np.asarray, rates), repeats, strict=True)
    ]
    if total < PRODUCT_BELOW_QUESTIONS:
        everything = np.concatenate(drawn, axis=1)
        with np.errstate(divide="ignore"):
            logs = np.log1p(everything).sum(axis=1)
        bounds = np.exp((logs + math.log(FALSE_NO_WORSE)) / total) - 1
        return float((bounds > -margin).mean())
    # The interval is a search for each draw: fewer of them.
    few = range(_POWER_DRAWS // 10)
    lows = [
        stratified_interval([lane[draw].tolist() for lane in drawn], single).low for draw in few
    ]
    return sum(low > -margin for low in lows) / len(few)


def split_lanes(text: str) -> list[str]:
    """Split `X+Y` into its lanes; a folder whose name has a plus is taken whole."""
    return [text] if Path(text).is_dir() else text.split("+")


def pool(
    a_lanes: Sequence[Sequence[Path]],
    b_lanes: Sequence[Sequence[Path]],
    margin_pp: float | None = None,
) -> dict[str, Any]:
    """Compare runs of several lanes as one.

    Parameters
    ----------
    a_lanes, b_lanes : sequence of sequence of Path
        Per lane the run folders of an arm, in the same order of lanes.
    margin_pp : float, optional
        Tolerated loss in percentage points over all questions; the lanes' own if they agree.

    Returns
    -------
    dict
        Rates, differences and bounds are fractions; `lanes` holds each lane's own comparison.

    Raises
    ------
    NotAMeasurement
        If a run is incomplete or not a measurement.
    NotComparable
        If the arms differ in a lane, or two lanes ask the same questions.
    ValueError
        If a folder holds no run, or the lanes' margins differ and none is given.
    """
    if len(a_lanes) != len(b_lanes):
        raise NotComparable(
            f"A has {len(a_lanes)} lanes and B has {len(b_lanes)}: give the same lanes of each"
        )
    comparisons, strata, rates, repeats = [], [], [], []
    asked: dict[str, str] = {}
    for a_folders, b_folders in zip(a_lanes, b_lanes, strict=True):
        comparison = compare(a_folders, b_folders, margin_pp)
        responses = comparison["responses_per_question"]
        runs = [load_measurement(Path(folder)) for folder in a_folders]
        questions = runs[0].receipt["data"]["questions_sha256"]
        if questions in asked:
            raise NotComparable(
                f"lanes {asked[questions]} and {comparison['lane']} ask the same questions: "
                "several runs of a lane are given as A1,A2"
            )
        asked[questions] = comparison["lane"]
        flipped = {
            flip["question_id"]: (flip["right"]["b"] - flip["right"]["a"]) / responses
            for flip in comparison["flipped"]
        }
        ids = runs[0].question_ids
        strata.append([flipped.get(question, 0.0) for question in ids])
        rates.append([sum(run.right(q) for run in runs) / responses for q in ids])
        repeats.append(responses)
        comparisons.append(comparison)
    margins = {comparison["margin"]["points"] for comparison in comparisons}
    if len(margins) > 1:
        raise ValueError(f"--margin: is needed, the lanes have {sorted(margins)} points")
    margin = margins.pop() / 100
    single = all(count == 1 for count in repeats)
    called, interval, bound = pooled_verdict(strata, single, margin)
    everything = [one for differences in strata for one in differences]
    return {
        "schema": SCHEMA,
        "questions": len(everything),
        "margin": {
            "points": 100 * margin,
            "overridden": any(one["margin"]["overridden"] for one in comparisons),
        },
        "difference": math.fsum(everything) / len(everything),
        "interval": interval._asdict(),
        "no_worse_bound": None
        if bound is None
        else {"low": bound, "level": 1 - FALSE_NO_WORSE, "method": "product of 1 + d, one-sided"},
        "verdict": called,
        "power_if_equal": power_if_equal(rates, repeats, margin),
        "lanes": comparisons,
    }


def pool_text(pooled: dict[str, Any]) -> str:
    """Write a pooled comparison as a few lines for a terminal."""
    lines = [_verdict_text(pooled)]
    lines += [
        f"{one['lane']}: {one['questions']} x {one['responses_per_question']}, "
        f"A {percent(one['arms']['a']['score'])}, B {percent(one['arms']['b']['score'])}, "
        f"B - A = {points(one['difference'])}; alone: {one['verdict']}"
        for one in pooled["lanes"]
    ]
    lines.append(_power_text(pooled))
    lines += [f"note: {one['lane']}: {flag}" for one in pooled["lanes"] for flag in one["flags"]]
    lines.append("The interval speaks of these questions, not of all questions.")
    return "\n".join(lines)


def _verdict_text(pooled: dict[str, Any]) -> str:
    interval = pooled["interval"]
    text = (
        f"B against A, {len(pooled['lanes'])} lanes as one: {pooled['verdict']}. B - A = "
        f"{points(pooled['difference'])} over {pooled['questions']} questions, "
        f"{100 * interval['level']:g}% interval {points(interval['low'])} to "
        f"{points(interval['high'])} ({interval['method']})"
    )
    bound = pooled["no_worse_bound"]
    if bound is not None:
        text += (
            f"; not below {points(bound['low'])} ({100 * bound['level']:g}%, {bound['method']}), "
            "which decides 'no worse'"
        )
    text += f"; margin {pooled['margin']['points']:g} points"
    return text + (" (overridden)." if pooled["margin"]["overridden"] else ".")


def _power_text(pooled: dict[str, Any]) -> str:
    power = percent(pooled["power_if_equal"])
    return f"Two equal arms with A's rates would be called no worse in {power} of such comparisons."


def write_pool(pooled: dict[str, Any], folder: Path) -> None:
    """Write `summary.md`, `summary.html` and the plot of a pooled comparison into a folder."""
    tones = {"worse": "bad", "cannot tell": "unsure"}
    lanes = Section(
        "Lanes",
        ["Each stands for as many questions as it has; its own verdict is told, not counted."],
        ["lane", "questions", "responses", "A", "B", "B - A", "alone"],
        [
            [
                one["lane"],
                str(one["questions"]),
                str(one["responses_per_question"]),
                percent(one["arms"]["a"]["score"]),
                percent(one["arms"]["b"]["score"]),
                points(one["difference"]),
                one["verdict"],
            ]
            for one in pooled["lanes"]
        ],
    )
    notes = [f"{one['lane']}: {flag}" for one in pooled["lanes"] for flag in one["flags"]]
    sections = [lanes, Section("Power", [_power_text(pooled)])]
    if notes:
        sections.append(Section("To know", notes))
    write_page(
        Page(
            "Accuracy comparison: " + " + ".join(one["lane"] for one in pooled["lanes"]),
            _verdict_text(pooled),
            tones.get(pooled["verdict"], "good"),
            sections,
            _plot(pooled),
            "Differences of the lanes and of all, with intervals",
        ),
        folder,
    )


def _plot(pooled: dict[str, Any]) -> str:
    def bar(label: str, told: dict[str, Any]) -> Bar:
        interval = told["interval"]
        values = (told["difference"], interval["low"], interval["high"])
        return Bar(label, *(100 * value for value in values))

    bars = [bar(one["lane"], one) for one in pooled["lanes"]]
    return draw(
        [
            (
                "B - A, points (lines: 0 and the margin)",
                [*bars, bar("all", pooled)],
                [0.0, -pooled["margin"]["points"]],
            )
        ]
    )
