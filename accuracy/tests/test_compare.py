"""Tests of comparing runs: verdicts, exit codes, refusals, tables, noise floor."""

import json

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from draftproof.accuracy import stats
from draftproof.accuracy.compare import SCHEMA_FILE, NotComparable, compare, compare_command
from draftproof.accuracy.lanes import load_lane
from draftproof.accuracy.runs import NotAMeasurement
from draftproof.accuracy.tests.make_runs import lane_for, make_run

app = typer.Typer()
app.command()(compare_command)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def marks(right, total):
    return ["1"] * right + ["0"] * (total - right)


@pytest.fixture
def pair(tmp_path):
    """Write run A and run B with the given marks; gives their folders."""

    def write(a, b, **changes):
        return make_run(tmp_path / "a", a), make_run(tmp_path / "b", b, **changes)

    return write


@pytest.mark.parametrize(
    "a, b, margin, verdict, code, strict_code",
    [
        (marks(90, 96), marks(90, 96), 5, "no worse", 0, 0),
        (marks(50, 96), marks(90, 96), 5, "no worse", 0, 0),
        (marks(47, 96), marks(14, 96), 5, "worse", 1, 1),
        (marks(90, 96), marks(84, 96), 15, "worse within the margin", 0, 0),
        (marks(20, 30), marks(20, 30), 5, "cannot tell", 0, 1),
    ],
)
def test_each_verdict_has_its_exit_code(pair, a, b, margin, verdict, code, strict_code):
    folders = pair(a, b)
    got = invoke(*folders, "--margin", margin)
    assert f"B against A: {verdict}." in got.output
    assert got.exit_code == code
    assert invoke(*folders, "--margin", margin, "--strict").exit_code == strict_code


def test_the_table_the_test_and_the_flips_are_those_of_the_pairs(pair):
    a = ["1", "1", "0", "0", "1", "-", *marks(60, 90)]
    b = ["1", "0", "1", "0", "0", "0", *marks(60, 90)]
    got = compare(*([folder] for folder in pair(a, b)))
    assert got["table"] == {"both_right": 61, "only_a": 2, "only_b": 1, "neither": 32}
    assert (got["questions_better"], got["questions_worse"]) == (1, 2)
    assert got["mcnemar_p"] == 1
    assert [flip["question_id"] for flip in got["flipped"]] == ["q-1", "q-2", "q-4"]
    assert got["flipped"][0]["right"] == {"a": 1, "b": 0}
    assert got["flipped"][0]["answers"] == {"a": ["1"], "b": ["wrong"]}
    assert got["interval"] == stats.tango(1, 2, 96)._asdict()
    assert got["arms"]["a"]["interval"] == stats.wilson(63, 96)._asdict()
    # The dash and the wrong answer of the last question are different texts, no flip.
    assert got["texts_that_differ"] == 4


def test_a_failed_request_within_the_limit_counts_as_wrong(tmp_path):
    lane = lane_for(4, errors=1)
    a = make_run(tmp_path / "a", ["1", "1", "1", "1"], lane)
    b = make_run(tmp_path / "b", ["1", "1", "1", "e"], lane)
    got = compare([a], [b])
    assert got["table"]["only_a"] == 1
    assert got["arms"]["b"]["score"] == 0.75


def test_cannot_tell_says_what_would_tell(pair):
    got = compare(*([folder] for folder in pair(marks(20, 30), marks(20, 30))))
    assert got["verdict"] == "cannot tell"
    assert got["would_tell"] == {"questions": 73}


def test_thirty_questions_cannot_tell_five_points_at_any_number_of_repeats(pair):
    folders = pair(["1" * 16] * 30, ["1" * 16] * 30)
    got = compare(*([folder] for folder in folders))
    assert got["would_tell"] == {"questions": 73, "responses_per_question": None}
    output = invoke(*folders).output
    assert "73 questions of this kind would tell" in output
    assert "No number of responses to these questions alone would tell" in output


def test_repeats_are_compared_over_questions(pair):
    a, b = ["1111", "1100", "0000", "1110"] * 10, ["1111", "1000", "0001", "1110"] * 10
    got = compare(*([folder] for folder in pair(a, b)))
    moments = stats.Moments.of([0.0, -0.25, 0.25, 0.0] * 10)
    assert got["responses_per_question"] == 4
    assert got["interval"] == stats.paired_interval(moments, single=False)._asdict()
    assert (got["questions_better"], got["questions_worse"]) == (10, 10)
    assert sum(got["table"].values()) == 160


def test_repeats_have_their_own_metrics_in_each_arm(tmp_path):
    lane = lane_for(3, 2)
    folders = {
        name: make_run(tmp_path / name, marks, lane)
        for name, marks in (
            ("a1", ["11", "10", "00"]),
            ("a2", ["11", "00", "00"]),
            ("b1", ["11", "11", "-1"]),
            ("b2", ["11", "11", "--"]),
        )
    }
    got = compare([folders["a1"], folders["a2"]], [folders["b1"], folders["b2"]])
    # By hand: of four responses 4, 1 and 0 are right; two drawn miss with chance 0, 3/6 and 1.
    assert got["arms"]["a"]["of_repeats"]["pass"] == 0.5
    # Ties count half: 1, 1/2, 0 in the first run, 1, 0, 0 in the second.
    assert got["arms"]["a"]["of_repeats"]["majority"] == (0.5 + 1 / 3) / 2
    # An answer that is none has no vote: 1, 1, 1 and 1, 1, 0.
    assert got["arms"]["b"]["of_repeats"]["majority"] == (1 + 2 / 3) / 2
    names = [",".join(str(folders[arm + run]) for run in "12") for arm in "ab"]
    assert "pass@2 50.00%, majority@2 41.67%" in invoke(*names).output


def test_an_overridden_margin_is_recorded(pair):
    folders = pair(marks(90, 96), marks(90, 96))
    own = compare(*([folder] for folder in folders))
    assert own["margin"] == {"points": 5.0, "lane_points": 5.0, "overridden": False}
    other = compare(*([folder] for folder in folders), margin_pp=2.0)
    assert other["margin"] == {"points": 2.0, "lane_points": 5.0, "overridden": True}
    assert "overridden; the lane's is 5" in invoke(*folders, "--margin", 2).output


@pytest.mark.parametrize("margin", ["0", "-1", "100", "nan", "inf"])
def test_an_impossible_margin_is_bad_usage(pair, margin):
    got = invoke(*pair(marks(9, 9), marks(9, 9)), f"--margin={margin}")
    assert got.exit_code == 2
    assert "--margin" in got.output


@pytest.mark.parametrize(
    "lane, differs",
    [
        (lambda: lane_for(4, concurrency=1), "concurrency: 8 against 1"),
        (lambda: lane_for(4, max_tokens=9), "sampling.max_tokens: 64 against 9"),
        (lambda: lane_for(5), "dataset.limit: 4 against 5"),
    ],
)
def test_other_lanes_are_refused_with_the_field_that_differs(tmp_path, lane, differs):
    a = make_run(tmp_path / "a", marks(3, 4))
    b = make_run(tmp_path / "b", marks(3, lane().dataset.limit), lane())
    got = invoke(a, b)
    assert got.exit_code == 2
    assert differs in got.output


def test_a_serial_lane_is_refused_beside_its_concurrent_twin(tmp_path):
    folders = []
    for name in ("gsm8k-heldout", "gsm8k-heldout-concurrent"):
        lane = load_lane(name).modified({"limit": "2"})
        folders.append(make_run(tmp_path / name, ["1", "0"], lane))
    got = invoke(*folders)
    assert got.exit_code == 2
    assert "concurrency: 1 against 64" in got.output


@pytest.mark.parametrize(
    "changes, differs",
    [
        ({"receipt_protocol": {"sampling_sent": {"temperature": 1}}}, "sampling_sent"),
        ({"receipt_protocol": {"dropped": ["min_p"]}}, "dropped"),
        ({"receipt_data": {"questions_sha256": "2" * 64}}, "questions_sha256"),
        ({"receipt_data": {"prompts_sha256": "2" * 64}}, "prompts_sha256"),
    ],
)
def test_other_protocols_and_questions_are_refused(pair, changes, differs):
    got = invoke(*pair(marks(3, 4), marks(3, 4), **changes))
    assert got.exit_code == 2
    assert differs in got.output


def test_another_model_is_what_a_comparison_is_for(pair):
    folders = pair(marks(3, 4), marks(3, 4), receipt_model={"id": "another-model"})
    got = compare(*([folder] for folder in folders))
    assert got["arms"]["b"]["runs"][0]["model"] == "another-model"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"status": "incomplete", "measurement": False}, "is incomplete: "),
        ({"measurement": False, "not_a_measurement": ["errors: 3"]}, "errors: 3"),
    ],
)
def test_what_is_no_measurement_is_not_compared(pair, changes, message):
    a, b = pair(marks(3, 4), marks(3, 4), **changes)
    with pytest.raises(NotAMeasurement, match=message):
        compare([a], [b])
    got = invoke(a, b)
    assert got.exit_code == 4
    assert "not a measurement" in got.output
    assert "against A" not in got.output


def test_a_run_is_not_compared_with_itself(pair):
    a, _ = pair(marks(3, 4), marks(3, 4))
    with pytest.raises(NotComparable, match="given twice"):
        compare([a], [a])


def drop(path, *keys):
    """Take a field out of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    part = content
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda a: (a / "result.json").write_text("{"), "result.json: is not JSON"),
        (lambda a: (a / "result.json").write_text("{}"), "schema"),
        (lambda a: (a / "receipt.json").unlink(), "receipt.json: No such file"),
        (lambda a: (a / "responses.jsonl").unlink(), "responses.jsonl: No such file"),
        (lambda a: (a / "responses.jsonl").write_text(""), "counts 3 right answers"),
        (lambda a: (a / "receipt.json").write_text("[]"), "receipt.json: must be an object"),
        (lambda a: drop(a / "receipt.json", "model"), "receipt.json: model.id: is missing"),
        (lambda a: drop(a / "result.json", "flags"), "result.json: flags: is missing"),
        (lambda a: drop(a / "receipt.json", "lane", "endpoint"), "lane: endpoint: is missing"),
        (lambda a: drop(a / "receipt.json", "lane", "description"), "description: is missing"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(pair, damage, message):
    a, b = pair(marks(3, 4), marks(3, 4))
    damage(a)
    got = invoke(a, b)
    assert got.exit_code == 2
    assert message in got.output
    assert len(got.output.strip().splitlines()) == 1


def test_a_run_that_is_missing_is_no_measurement(tmp_path):
    got = invoke(tmp_path / "none", tmp_path / "none2")
    assert got.exit_code == 4
    assert "none: is missing: there is no run" in got.output


@pytest.fixture
def four(tmp_path):
    """Write runs A1, B1, B2, A2, started in that order."""
    runs = {}
    for hour, (name, right) in enumerate((("a1", 60), ("b1", 61), ("b2", 60), ("a2", 62)), start=1):
        started = f"2026-01-01T0{hour}:00:00.000+00:00"
        runs[name] = make_run(tmp_path / name, marks(right, 96), started=started)
    return runs


def test_several_runs_an_arm_pool_and_tell_the_noise_floor(four):
    got = compare([four["a1"], four["a2"]], [four["b1"], four["b2"]])
    assert got["order"] == "A B B A"
    assert got["responses_per_question"] == 2
    assert got["arms"]["a"]["score"] == 122 / 192
    assert [floor["arm"] for floor in got["noise_floor"]] == ["A", "B"]
    assert got["noise_floor"][0]["questions_better"] == 2
    assert got["noise_floor"][0]["table"] == {
        "both_right": 60,
        "only_a": 0,
        "only_b": 2,
        "neither": 34,
    }
    assert not any("order" in flag or "noise floor" in flag for flag in got["flags"])


def test_arms_that_ran_one_after_the_other_are_flagged(four):
    got = compare([four["a1"], four["b1"]], [four["b2"], four["a2"]])
    assert any("order is A A B B" in flag for flag in got["flags"])


def test_an_arm_that_differs_from_itself_is_flagged(tmp_path, four):
    bad = make_run(tmp_path / "bad", marks(20, 96), started="2026-01-02T00:00:00.000+00:00")
    got = compare([four["a1"], bad], [four["b1"], four["b2"]])
    assert any("two runs of A differ" in flag for flag in got["flags"])


def test_one_run_an_arm_has_no_noise_floor_and_says_so(pair):
    got = compare(*([folder] for folder in pair(marks(3, 4), marks(3, 4))))
    assert got["noise_floor"] == []
    assert any("no noise floor" in flag for flag in got["flags"])


def test_arms_of_different_size_are_refused(four):
    got = invoke(f"{four['a1']},{four['a2']}", four["b1"])
    assert got.exit_code == 2
    assert "A has 2 runs and B has 1" in got.output


def test_a_published_lane_is_not_called_modified(tmp_path):
    lane = load_lane("arithmetic")
    a = make_run(tmp_path / "a", marks(60, 96), lane)
    b = make_run(tmp_path / "b", marks(60, 96), lane)
    got = compare([a], [b])
    assert not got["modified"]
    assert not any("modified" in flag for flag in got["flags"])


def test_the_json_meets_its_schema(tmp_path, four, pair):
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    file = tmp_path / "compare.json"
    lists = [
        (f"{four['a1']},{four['a2']}", f"{four['b1']},{four['b2']}"),
        pair(["10"] * 30, ["01"] * 30),
    ]
    for a, b in lists:
        assert invoke(a, b, "--json", file).exit_code == 0
        jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), schema)


def test_a_json_file_that_cannot_be_written_is_bad_input(tmp_path, pair):
    got = invoke(*pair(marks(3, 4), marks(3, 4)), "--json", tmp_path / "none" / "x.json")
    assert got.exit_code == 2
    assert "x.json" in got.output
