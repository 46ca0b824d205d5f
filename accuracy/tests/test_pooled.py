"""Tests of lanes pooled as one comparison: the bound's proof and use, false verdicts, refusals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from draftproof.accuracy import stats
from draftproof.accuracy.compare import NotComparable, compare_command
from draftproof.accuracy.pooled import (
    FALSE_NO_WORSE,
    pool,
    pool_text,
    pooled_verdict,
    power_if_equal,
    product_bound,
    stratified_interval,
    write_pool,
)
from draftproof.accuracy.tests.make_runs import lane_for, make_run

MARGIN = 0.05
REPEATS = 16


def no_worse_share(differences: np.ndarray) -> float:
    """Share of draws (rows) whose product bound lies above minus the margin."""
    with np.errstate(divide="ignore"):
        logs = np.log1p(differences).sum(axis=1)
    n = differences.shape[1]
    return float((np.exp((logs + math.log(FALSE_NO_WORSE)) / n) - 1 > -MARGIN).mean())


def test_without_a_loss_the_bound_is_the_exact_one_of_no_event_among_n():
    for n in (30, 59, 60):
        assert product_bound([0.0] * n) == pytest.approx(0.05 ** (1 / n) - 1, abs=1e-12)
    # 59 questions are the fewest that can exclude a loss of one in twenty.
    assert product_bound([0.0] * 58) < -MARGIN < product_bound([0.0] * 59)


def test_a_question_lost_altogether_leaves_no_bound_and_a_gain_raises_it():
    assert product_bound([0.0] * 59 + [-1.0]) == -1
    same = product_bound([0.0] * 60)
    assert product_bound([0.0] * 59 + [1 / 16]) > same > product_bound([0.0] * 59 + [-1 / 16])


@pytest.mark.parametrize("lost", [1.0, 0.5, 0.25, 0.125])
@pytest.mark.parametrize("gains", [0.0, 0.05])
@pytest.mark.parametrize("share_of_first", [0.5, 1.0])
def test_a_drop_of_the_margin_is_called_no_worse_in_at_most_one_of_twenty(
    lost, gains, share_of_first
):
    # Of 60 questions in two lanes, some lose the part `lost` and some gain it; the losses may
    # lie in the first lane alone.
    rng = np.random.default_rng(1)
    chances = 2 * MARGIN * np.repeat([share_of_first, 1 - share_of_first], 30) / lost + gains
    drawn = rng.random((10_000, 60))
    differences = np.where(drawn < chances, -lost, np.where(drawn > 1 - gains, lost, 0.0))
    assert differences.mean() == pytest.approx(-MARGIN, abs=0.003)
    # Of 10,000 draws the share is known to 0.0022.
    assert no_worse_share(differences) <= FALSE_NO_WORSE + 0.003


@pytest.mark.parametrize("kind", ["even", "few_lost"])
def test_chance_within_questions_adds_no_false_verdict(kind):
    rng = np.random.default_rng(2)
    a = rng.beta(12, 0.4, (10_000, 60))
    loss = MARGIN / a.mean()
    b = a * (1 - loss) if kind == "even" else np.where(rng.random(a.shape) < loss, 0.0, a)
    differences = (rng.binomial(REPEATS, b) - rng.binomial(REPEATS, a)) / REPEATS
    assert no_worse_share(differences) <= FALSE_NO_WORSE


@pytest.mark.parametrize("population", ["beta", "half_hard"])
def test_equal_arms_are_called_worse_in_at_most_one_of_twenty(population):
    rng = np.random.default_rng(3)
    called, draws = 0, 120
    for _ in range(draws):
        if population == "beta":
            lanes = [rng.beta(12, 0.4, 30), rng.beta(4, 0.5, 30)]
        else:
            lanes = [np.ones(30), np.full(30, 0.5)]
        strata = [
            ((rng.binomial(REPEATS, one) - rng.binomial(REPEATS, one)) / REPEATS).tolist()
            for one in lanes
        ]
        called += stratified_interval(strata, False).high < 0
    assert called / draws <= 0.05


def test_the_power_is_what_the_pool_is_for():
    # Rates such as AIME's: most questions always right, every tenth in 7 of 10.
    hard = [1.0] * 27 + [0.7] * 3
    alone = power_if_equal([hard], [REPEATS], MARGIN)
    both = power_if_equal([hard, hard], [REPEATS] * 2, MARGIN)
    three = power_if_equal([hard] * 3, [REPEATS] * 3, MARGIN)
    assert alone == 0
    assert 0.4 < both < 0.55
    assert three > 0.95
    assert power_if_equal([hard, hard], [4 * REPEATS] * 2, MARGIN) > both


def test_a_large_loss_is_found_and_a_bad_lane_shows_in_the_whole():
    worse, interval, bound = pooled_verdict([[0.0] * 30, [-0.5, -0.4] * 15], False, MARGIN)
    assert worse == "worse"
    assert interval.high < 0
    assert bound is not None
    assert bound < -MARGIN


def test_the_interval_takes_each_lane_with_its_own_mean_and_never_less_than_the_floor():
    # Two lanes that differ in their means: as one sample their spread would be three times as wide.
    strata = [[0.5, 0.3] * 50, [-0.5, -0.3] * 50]
    everything = stats.Moments.of([one for lane in strata for one in lane])
    got = stratified_interval(strata, False)
    floor = stats.tango(
        *(200 * (everything.square + sign * everything.mean) / 2 for sign in (1, -1)), 200
    )
    assert got[:2] == floor[:2]
    assert stratified_interval([[0.0] * 30] * 2, False)[:2] == stats.tango(0, 0, 60)[:2]
    alone = [0.9, -0.9] * 6
    two = stratified_interval([alone, alone], False)
    one = stats.paired_interval(stats.Moments.of(alone), False)
    assert two.high == pytest.approx(one.high / 2**0.5 * 2.0739 / 2.2010, rel=1e-3)


def test_a_pool_of_a_hundred_questions_is_judged_by_the_interval():
    verdict, interval, bound = pooled_verdict([[0.0] * 50] * 2, False, MARGIN)
    assert (verdict, bound) == ("no worse", None)
    assert interval.low > -MARGIN


def runs(folder: Path, b_of_second: list[str]) -> list[list[list[Path]]]:
    """Two lanes of 30 questions x 4 in both arms, alike but for the second lane's B."""
    whole = ["1111"] * 30
    lanes = {"first": lane_for(30, 4), "second": lane_for(30, 4, max_tokens=32)}
    arms = []
    for arm, second in (("a", whole), ("b", b_of_second)):
        arms.append(
            [
                [
                    make_run(
                        folder / arm / name,
                        whole if name == "first" else second,
                        lane,
                        receipt_data={"questions_sha256": name},
                    )
                ]
                for name, lane in lanes.items()
            ]
        )
    return arms


def test_two_lanes_of_thirty_together_say_what_neither_says_alone(tmp_path):
    a, b = runs(tmp_path, ["1111"] * 30)
    pooled = pool(a, b, None)
    assert pooled["verdict"] == "no worse"
    assert [one["verdict"] for one in pooled["lanes"]] == ["cannot tell"] * 2
    assert pooled["questions"] == 60
    assert pooled["power_if_equal"] == 1
    said = pool_text(pooled)
    assert "2 lanes as one: no worse" in said
    assert "not below -4.87 points" in said
    write_pool(pooled, tmp_path / "report")
    assert "alone" in (tmp_path / "report/summary.md").read_text()
    assert (tmp_path / "report/plot.svg").read_text().count("<svg") == 1


def test_lanes_joined_by_a_plus_are_compared_as_one(tmp_path):
    a, b = runs(tmp_path, ["1111"] * 30)
    app = typer.Typer()
    app.command()(compare_command)
    names = ["+".join(str(folders[0]) for folders in arm) for arm in (a, b)]
    out = ["--out", str(tmp_path / "report"), "--json", str(tmp_path / "pool.json")]
    done = CliRunner().invoke(app, [*names, *out, "--strict"])
    assert done.exit_code == 0, done.output
    assert "2 lanes as one: no worse" in done.stdout
    assert json.loads((tmp_path / "pool.json").read_text())["questions"] == 60
    assert (tmp_path / "report/summary.html").is_file()
    # One lane alone cannot tell.
    assert CliRunner().invoke(app, [str(a[0][0]), str(b[0][0]), "--strict"]).exit_code == 1
    assert CliRunner().invoke(app, [names[0], str(b[0][0])]).exit_code == 2


def test_a_question_that_is_lost_is_seen_by_the_pool(tmp_path):
    a, b = runs(tmp_path, ["1111"] * 29 + ["0000"])
    pooled = pool(a, b, None)
    assert pooled["verdict"] == "cannot tell"
    assert pooled["difference"] == pytest.approx(-1 / 60)
    assert pooled["no_worse_bound"]["low"] == -1


def test_the_same_questions_twice_are_no_pool(tmp_path):
    a, b = runs(tmp_path, ["1111"] * 30)
    with pytest.raises(NotComparable, match="ask the same questions"):
        pool([a[0], a[0]], [b[0], b[0]], None)
    with pytest.raises(NotComparable, match="A has 2 lanes and B has 1"):
        pool(a, b[:1], None)
