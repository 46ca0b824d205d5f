"""Tests of the statistics: against independent computations, by enumeration and by simulation."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy.stats import norm
from scipy.stats import t as student
from sgl_eval._vendored.nemo_skills.math_metrics import MathMetrics
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.power import NormalIndPower
from statsmodels.stats.proportion import proportion_confint

from draftproof.accuracy.stats import (
    Interval,
    Moments,
    majority_at_k,
    mcnemar_exact,
    paired_interval,
    pass_at_k,
    questions_that_would_tell,
    repeat_noise,
    repeats_that_would_tell,
    score_interval,
    smallest_difference,
    tango,
    verdict,
    wilson,
    wilson_repeats,
)

Z = float(norm.ppf(0.975))

# Bounds are floats from iterative solvers; far below a hundredth of a percentage point.
BOUND_DIGITS = 9


def same(got: float, want: float) -> bool:
    return round(float(got) - float(want), BOUND_DIGITS) == 0


def bisect(function, low, high):
    """Root of a falling function, to 20 digits, by nothing but halving."""
    low, high = mpf(low), mpf(high)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return low


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("correct, planned", [(0, 1), (0, 30), (7, 30), (1240, 1319), (96, 96)])
def test_wilson_bounds_are_those_of_statsmodels(correct, planned, level):
    got = wilson(correct, planned, level)
    want = proportion_confint(correct, planned, alpha=1 - level, method="wilson")
    assert same(got.low, want[0])
    assert same(got.high, want[1])


@pytest.mark.parametrize(
    "correct, planned", [(0, 30), (1, 30), (29, 30), (30, 30), (1240, 1319), (1, 1)]
)
def test_wilson_bounds_solve_the_score_equation(correct, planned):
    with mp.workdps(40):
        estimate, z = mpf(correct) / planned, mpf(Z)

        def excess(p):
            return z * mp.sqrt(p * (1 - p) / planned) - abs(estimate - p)

        # Inside the interval the excess is positive, outside negative.
        low = 0 if correct == 0 else bisect(lambda p: -excess(p), 0, estimate)
        high = 1 if correct == planned else bisect(excess, estimate, 1)
    got = wilson(correct, planned)
    assert same(got.low, low)
    assert same(got.high, high)


def test_gsm8k_at_94_percent_has_the_documented_width():
    # The usual figure is the normal approximation's; Wilson's is a hundredth of a point wider.
    assert round(100 * Z * math.sqrt(0.94 * 0.06 / 1319), 2) == 1.28
    got = wilson(round(0.94 * 1319), 1319)
    assert round(100 * (got.high - got.low) / 2, 2) == 1.29


def test_repeats_use_wilson_with_the_effective_size_and_the_t_quantile():
    rates = [k / 16 for k in [16] * 20 + [15, 14, 12, 16, 9, 3, 16, 11, 0, 8]]
    got = wilson_repeats(rates, 16)
    p = statistics.mean(rates)
    s = statistics.stdev(rates) / math.sqrt(30)
    size, quantile = p * (1 - p) / s**2, student.ppf(0.975, 29)
    assert 30 < size < 480
    centre = (p + quantile**2 / (2 * size)) / (1 + quantile**2 / size)
    half = (
        quantile
        * math.sqrt(p * (1 - p) / size + quantile**2 / (4 * size**2))
        / (1 + quantile**2 / size)
    )
    assert same(got.low, centre - half)
    assert same(got.high, centre + half)


def test_repeats_without_spread_have_an_interval_all_the_same():
    everything = wilson_repeats([1.0] * 30, 16)
    assert everything.high == 1
    assert 0.8 < everything.low < 0.9
    halves = wilson_repeats([0.5] * 30, 16)
    assert 0.44 < halves.low < 0.46 < 0.54 < halves.high < 0.56


def test_score_interval_chooses_by_the_repeats():
    assert score_interval([1, 0, 1], 1) == wilson(2, 3)
    assert score_interval([3, 1], 4) == wilson_repeats([0.75, 0.25], 4)
    assert score_interval([3], 4) == wilson(3, 4)


def tango_by_likelihood(gains, losses, n):
    """Tango's interval with the nuisance parameter from the likelihood itself, in 40 digits."""
    with mp.workdps(40):
        z = mpf(Z)

        def statistic(delta):
            # Maximise losses log q + gains log(q + delta) + rest log(1 - 2q - delta) over q: its
            # derivative falls in q.
            least, most = max(mpf(0), -delta), (1 - delta) / 2

            def slope(q):
                value = mpf(0)
                for count, probability, sign in (
                    (losses, q, 1),
                    (gains, q + delta, 1),
                    (n - gains - losses, 1 - 2 * q - delta, -2),
                ):
                    if count:
                        if probability <= 0:
                            return sign * mp.inf
                        value += sign * mpf(count) / probability
                return value

            q = bisect(slope, least, most)
            variance = n * (2 * q + delta * (1 - delta))
            distance = gains - losses - n * delta
            return distance / mp.sqrt(variance) if variance > 0 else mp.sign(distance) * mp.inf

        estimate = mpf(gains - losses) / n
        low = bisect(lambda d: statistic(d) - z, -1, estimate) if losses < n else mpf(-1)
        high = bisect(lambda d: statistic(d) + z, estimate, 1) if gains < n else mpf(1)
        return float(low), float(high)


@pytest.mark.parametrize(
    "gains, losses, n",
    [(0, 0, 30), (2, 12, 50), (40, 20, 160), (0, 5, 200), (7, 0, 30), (3, 3, 1319), (0, 30, 30)],
)
def test_tango_inverts_the_score_test_of_the_restricted_likelihood(gains, losses, n):
    low, high = tango_by_likelihood(gains, losses, n)
    got = tango(gains, losses, n)
    assert same(got.low, low)
    assert same(got.high, high)


@pytest.mark.parametrize("n, points", [(96, "3.85"), (1319, "0.29")])
def test_identical_runs_have_the_documented_honest_width(n, points):
    got = tango(0, 0, n)
    assert same(got.high, Z**2 / (n + Z**2))
    assert same(got.low, -got.high)
    assert f"{100 * got.high:.2f}" == points


def test_tango_turns_around_when_the_arms_do():
    for gains, losses in ((0, 9), (4, 11), (2.5, 0.25)):
        one, other = tango(gains, losses, 60), tango(losses, gains, 60)
        assert same(one.low, -other.high)
        assert same(one.high, -other.low)


@pytest.mark.parametrize("gains, losses", list(itertools.product(range(0, 13, 3), repeat=2)))
def test_mcnemar_adds_the_binomial_tail_of_the_discordant_pairs(gains, losses):
    pairs = gains + losses
    tail = sum(math.comb(pairs, k) for k in range(min(gains, losses) + 1))
    want = min(Fraction(2 * tail, 2**pairs), 1)
    assert same(mcnemar_exact(gains, losses), want)
    assert same(mcnemar_exact(gains, losses), mcnemar([[5, gains], [losses, 5]], exact=True).pvalue)


def test_single_responses_are_judged_by_tango_alone():
    differences = [1] * 4 + [-1] * 11 + [0] * 85
    assert paired_interval(Moments.of(differences), single=True) == tango(4, 11, 100)


def test_repeats_are_judged_by_t_where_it_is_wider_than_its_floor():
    # Half the questions much better, half much worse: t's own quantile makes it the wider one.
    differences = [0.9, -0.9] * 6
    half = student.ppf(0.975, 11) * statistics.stdev(differences) / math.sqrt(12)
    got = paired_interval(Moments.of(differences), single=False)
    assert same(got.low, -half)
    assert same(got.high, half)


def test_repeats_never_have_a_narrower_interval_than_the_floor():
    assert paired_interval(Moments.of([0.0] * 30), single=False)[:2] == tango(0, 0, 30)[:2]
    # Sixteenths that cancel: their squares are worth a twentieth of a flip, and no less than none.
    sixteenths = Moments.of([1 / 16, -1 / 16] * 15)
    floor = tango(15 / 256, 15 / 256, 30)
    assert paired_interval(sixteenths, single=False)[:2] == floor[:2]
    assert floor.high > tango(0, 0, 30).high
    # All questions worse by a tenth: no table has that mean with fewer than three losses.
    tenth = paired_interval(Moments.of([-0.1] * 30), single=False)
    assert same(tenth.low, tango(0, 3, 30).low)
    assert same(tenth.high, tango(0, 3, 30).high)


@pytest.mark.parametrize(
    "low, high, want",
    [
        (-0.04, 0.03, "no worse"),
        (0.01, 0.03, "no worse"),
        (-0.04, -0.01, "worse within the margin"),
        (-0.09, -0.01, "worse"),
        (-0.09, 0.01, "cannot tell"),
        # A bound that touches the limit proves nothing.
        (-0.05, 0.03, "cannot tell"),
        (-0.05, 0.0, "cannot tell"),
        (-0.04, 0.0, "no worse"),
    ],
)
def test_the_verdict_follows_from_the_bounds_and_the_margin(low, high, want):
    assert verdict(Interval(low, high, 0.95, ""), 0.05) == want


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    right, repeats = [0, 1, 3, 5], 5
    for k in range(1, repeats + 1):
        shares = []
        for count in right:
            marks = [True] * count + [False] * (repeats - count)
            subsets = list(itertools.combinations(marks, k))
            shares.append(Fraction(sum(map(any, subsets)), len(subsets)))
        assert same(pass_at_k(right, repeats, k), sum(shares) / len(shares))


def test_majority_and_pass_agree_with_the_metrics_of_sgl_eval():
    rng = np.random.default_rng(7)
    answers, right = [], []
    for _ in range(40):
        texts = [None if rng.random() < 0.2 else str(rng.integers(4)) for _ in range(6)]
        answers.append(texts)
        right.append([text == "2" for text in texts])
    answers.append([None] * 6)
    right.append([False] * 6)
    # The same text judged differently is two answers.
    answers.append(["1", "1", "1", "3", None, None])
    right.append([True, True, False, False, False, False])
    metrics = MathMetrics()
    for texts, marks in zip(answers, right, strict=True):
        metrics.update(
            [
                {"predicted_answer": text, "symbolic_correct": mark, "expected_answer": "2"}
                for text, mark in zip(texts, marks, strict=True)
            ]
        )
    theirs = metrics.get_metrics()
    assert same(100 * majority_at_k(answers, right), theirs["majority@6"]["symbolic_correct"])
    counts = [sum(marks) for marks in right]
    for k in (1, 2, 6):
        want = theirs[f"pass@{k}"]["symbolic_correct"]
        assert same(100 * pass_at_k(counts, 6, k), want)


def test_a_tie_of_answers_scores_the_mean_of_the_tied():
    assert majority_at_k([["1", "1", "2", "2", "3"]], [[True, True, False, False, False]]) == 0.5


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    "moments, margin", [((30, 0.0, 0.0), 0.05), ((40, -0.05, 0.1), 0.1), ((96, 0.01, 0.05), 0.02)]
)
def test_the_size_that_would_tell_is_the_first_that_does(moments, margin, single):
    moments = Moments(*moments)

    def tells(n):
        interval = paired_interval(moments._replace(n=n), single)
        return verdict(interval, margin) != "cannot tell"

    scan = next(n for n in range(moments.n, 100_000) if tells(n))
    assert questions_that_would_tell(moments, single, margin) == scan
    assert scan > moments.n


def test_identical_runs_need_more_questions_though_the_normal_formula_asks_for_none():
    # z^2 / (n + z^2) < margin, solved by hand.
    for margin in (0.01, 0.05):
        want = math.floor(Z**2 * (1 - margin) / margin) + 1
        assert questions_that_would_tell(Moments(10, 0.0, 0.0), True, margin) == want


def test_more_repeats_tell_where_chance_within_questions_is_what_hides_the_difference():
    rng = np.random.default_rng(3)
    right_a = rng.binomial(2, 0.5, size=300)
    right_b = rng.binomial(2, 0.5, size=300)
    moments = Moments.of([(b - a) / 2 for a, b in zip(right_a, right_b, strict=True)])
    noise = repeat_noise(right_a, right_b, 2)
    # Two binomials of two draws at one half: 2 x 0.25 / 2 in expectation.
    assert 0.2 < noise < 0.3
    needed = repeats_that_would_tell(moments, noise, 2, 0.05)
    assert needed is not None
    assert needed > 2


def test_no_number_of_repeats_makes_thirty_questions_tell_five_points():
    assert repeats_that_would_tell(Moments(30, 0.0, 0.01), 0.01, 16, 0.05) is None


def test_the_documented_smallest_differences_follow():
    # 94%, 1319 questions, 80% power. Unpaired, by statsmodels' own power function.
    effect = NormalIndPower().solve_power(nobs1=1319, alpha=0.05, power=0.8)
    assert round(100 * effect * math.sqrt(0.94 * 0.06), 1) == 2.6
    # Paired, where 1.1% to 5.4% of the questions flip.
    assert round(100 * smallest_difference(0.011, 1319), 1) == 0.8
    assert round(100 * smallest_difference(0.054, 1319), 1) == 1.8


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: wilson(5, 4), "correct"),
        (lambda: wilson(0, 0), "correct"),
        (lambda: wilson_repeats([1.0], 4), "rates"),
        (lambda: tango(-1, 0, 5), "gains"),
        (lambda: tango(3, 3, 5), "gains"),
        (lambda: pass_at_k([1], 4, 5), "k"),
        (lambda: Moments.of([]), "differences"),
    ],
)
def test_impossible_counts_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# --- simulation: how often a verdict is false ---

FALSE_AT_MOST = 0.05
DRAWS = 20_000


def verdicts_of_single_runs(n, gain, loss, margin, seed):
    """Shares of the verdicts over simulated pairs of runs with one response a question."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, [gain, loss, 1 - gain - loss], size=DRAWS)[:, :2]
    tables, times = np.unique(counts, axis=0, return_counts=True)
    shares: dict[str, float] = {}
    for (gains, losses), count in zip(tables.tolist(), times.tolist(), strict=True):
        moments = Moments(n, (gains - losses) / n, (gains + losses) / n)
        called = verdict(paired_interval(moments, single=True), margin)
        shares[called] = shares.get(called, 0) + count / DRAWS
    return shares


@pytest.mark.parametrize("n, margin", [(30, 0.05), (200, 0.05), (1319, 0.01)])
@pytest.mark.parametrize("churn", [0.0, 0.01, 0.06])
def test_a_drop_of_the_margin_is_called_no_worse_in_at_most_one_of_twenty(n, margin, churn):
    shares = verdicts_of_single_runs(n, churn / 2, churn / 2 + margin, margin, seed=n)
    assert shares.get("no worse", 0) + shares.get("worse within the margin", 0) <= FALSE_AT_MOST


@pytest.mark.parametrize("n, margin", [(30, 0.05), (200, 0.05), (1319, 0.01)])
@pytest.mark.parametrize("churn", [0.004, 0.04, 0.2])
def test_equal_arms_are_called_worse_in_at_most_one_of_twenty(n, margin, churn):
    shares = verdicts_of_single_runs(n, churn / 2, churn / 2, margin, seed=n + 1)
    assert shares.get("worse", 0) + shares.get("worse within the margin", 0) <= FALSE_AT_MOST


def test_the_verdicts_do_find_what_is_there():
    # The bounds above would also hold for a judge that never can tell.
    assert verdicts_of_single_runs(1319, 0.003, 0.003, 0.01, seed=1)["no worse"] > 0.8
    assert verdicts_of_single_runs(200, 0.01, 0.16, 0.05, seed=1)["worse"] > 0.8


# Populations of questions: each draws n questions' true rates for A and for B.
def even(rng, n, drop):
    return np.full(n, 0.9), np.full(n, 0.9 - drop)


def ceiling(rng, n, drop):
    rates = rng.beta(4, 0.5, size=n)
    return rates, rates * (1 - drop / (4 / 4.5))


def few_lost(rng, n, drop):
    return np.ones(n), (rng.random(n) >= drop).astype(float)


def swapped(rng, n, drop):
    """Some questions are lost and some won altogether, `drop` more of them lost."""
    kind = rng.random(n)
    a = np.where(kind < 0.05, 0.0, 1.0)
    return a, np.where(kind < 0.05, 1.0, np.where(kind < 0.10 + drop, 0.0, 1.0))


def verdicts_of_repeated_runs(population, n, repeats, drop, margin, draws=600, judge=None):
    rng = np.random.default_rng(16)
    shares: dict[str, float] = {}
    for _ in range(draws):
        a, b = population(rng, n, drop)
        differences = (rng.binomial(repeats, b) - rng.binomial(repeats, a)) / repeats
        interval = (judge or paired_interval)(Moments.of(differences.tolist()), False)
        called = verdict(interval, margin)
        shares[called] = shares.get(called, 0) + 1 / draws
    return shares


@pytest.mark.parametrize("population", [even, ceiling, few_lost, swapped])
def test_repeated_lanes_are_as_seldom_wrong(population):
    dropped = verdicts_of_repeated_runs(population, 30, 16, drop=0.05, margin=0.05)
    false = dropped.get("no worse", 0) + dropped.get("worse within the margin", 0)
    assert false <= FALSE_AT_MOST
    equal = verdicts_of_repeated_runs(population, 30, 16, drop=0.0, margin=0.05)
    assert equal.get("worse", 0) + equal.get("worse within the margin", 0) <= FALSE_AT_MOST


def test_repeated_lanes_do_find_what_is_there():
    assert verdicts_of_repeated_runs(even, 30, 16, drop=0.3, margin=0.05)["worse"] > 0.8
    assert verdicts_of_repeated_runs(ceiling, 300, 4, drop=0.0, margin=0.05)["no worse"] > 0.8


def test_without_its_floor_t_would_call_a_drop_of_the_margin_no_worse_too_often():
    def bare_t(moments, single):
        n, mean, square = moments
        deviation = math.sqrt((square - mean * mean) * n / (n - 1))
        half = student.ppf(0.975, n - 1) * deviation / math.sqrt(n)
        return Interval(mean - half, mean + half, 0.95, "t")

    for n in (30, 200):
        ours = verdicts_of_repeated_runs(few_lost, n, 4, drop=0.05, margin=0.05)
        bare = verdicts_of_repeated_runs(few_lost, n, 4, drop=0.05, margin=0.05, judge=bare_t)
        assert ours.get("no worse", 0) + ours.get("worse within the margin", 0) <= FALSE_AT_MOST
        assert bare.get("no worse", 0) + bare.get("worse within the margin", 0) > FALSE_AT_MOST


def test_the_interval_of_a_repeated_score_covers_the_true_score():
    rng = np.random.default_rng(5)
    truth, covered, draws = 4 / 4.5, 0, 1500
    for _ in range(draws):
        right = rng.binomial(16, rng.beta(4, 0.5, size=30))
        interval = wilson_repeats((right / 16).tolist(), 16)
        covered += interval.low <= truth <= interval.high
    assert 0.92 <= covered / draws <= 0.98
