"""Tests of rates and ratios: by hand, and by simulated launches."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from draftproof.accuracy.rates import RoundRate, Timeline, overlap, ratio, spread


def test_a_round_leaves_prefill_out_of_the_rate_a_user_sees():
    # First event after 2 s with 3 tokens, then 10 tokens in 1 s; the other half as fast.
    one = Timeline(sent_s=0.0, first_s=2.0, first_tokens=3, last_s=3.0, tokens=13)
    two = Timeline(sent_s=0.5, first_s=1.0, first_tokens=1, last_s=3.0, tokens=11)
    rate = RoundRate.of([one, two])
    assert rate.user_rate == pytest.approx(1 / 0.15)
    assert rate.ttft_s == pytest.approx(1.25)
    assert rate.output_rate == pytest.approx(24 / 3.0)


@pytest.mark.parametrize("last_s, tokens", [(1.0, 5), (2.0, 1)])
def test_an_answer_without_decoding_is_no_rate(last_s, tokens):
    with pytest.raises(ValueError, match="no token after the first event"):
        RoundRate.of([Timeline(0.0, 1.0, 1, last_s, tokens)])


def test_spread_is_the_range_over_the_median():
    assert spread([10.0, 11.0, 12.0]) == pytest.approx(2 / 11)


def test_ranges_that_touch_overlap():
    assert overlap([1.0, 2.0], [2.0, 3.0])
    assert not overlap([1.0, 2.0], [2.1, 3.0])


def test_launches_are_the_samples_and_rounds_are_not():
    a = {"A1": [100.0, 100.5] * 20, "A2": [110.0, 110.5] * 20}
    b = {"B1": [108.0, 108.5] * 20, "B2": [118.0, 118.5] * 20}
    found = ratio(a, b)
    means = [[np.log(rounds).mean() for rounds in arm.values()] for arm in (a, b)]
    welch = ttest_ind(means[1], means[0], equal_var=False).confidence_interval(0.95)
    assert found.low == pytest.approx(math.exp(welch.low))
    assert found.high == pytest.approx(math.exp(welch.high))
    # As 80 independent rounds the same figures would be a sure gain.
    assert not found.is_gain
    assert ttest_ind(*(np.log(np.ravel(list(arm.values()))) for arm in (b, a))).pvalue < 1e-6


def test_equal_launches_still_have_the_noise_of_their_rounds():
    a = {"A1": [90.0, 110.0], "A2": [90.0, 110.0]}
    found = ratio(a, a)
    assert found.value == 1
    assert found.low < 0.9 < 1.1 < found.high


@pytest.mark.parametrize("rounds", [1, 50])
def test_one_launch_of_an_arm_claims_nothing_with_any_number_of_rounds(rounds):
    found = ratio({"A1": [100.0] * rounds}, {"B1": [200.0] * rounds, "B2": [200.0] * rounds})
    assert found.value == pytest.approx(2)
    assert (found.low, found.high) == (None, None)
    assert not found.is_gain
    assert not found.is_loss


def test_a_gain_that_is_there_is_claimed():
    a = {"A1": [100.0, 101.0], "A2": [100.2, 100.9], "A3": [99.9, 100.8]}
    b = {"B1": [110.0, 111.0], "B2": [110.2, 110.9], "B3": [109.9, 110.8]}
    assert ratio(a, b).is_gain
    assert ratio(b, a).is_loss


@pytest.mark.parametrize("launches", [2, 3])
@pytest.mark.parametrize("between", [0.0, 0.03])
def test_equal_arms_are_called_different_in_at_most_one_of_twenty(launches, between):
    rng = np.random.default_rng(launches)
    called, draws = 0, 400
    for _ in range(draws):
        arms = [
            np.exp(
                rng.normal(0, between * scale, (launches, 1)) + rng.normal(0, 0.01, (launches, 4))
            )
            for scale in (1, 2)
        ]
        found = ratio(*({str(n): list(row) for n, row in enumerate(arm)} for arm in arms))
        called += found.is_gain or found.is_loss
    # Of 400 draws at one in twenty, 32 or more would come in less than one of a hundred tries.
    assert called <= 31


@pytest.mark.parametrize("bad", [{}, {"A1": []}, {"A1": [1.0, 0.0]}])
def test_rates_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="a: "):
        ratio(bad, {"B1": [1.0]})
