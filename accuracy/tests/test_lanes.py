"""Tests of lane files: the shipped ones mean what they say, and bad ones say what is wrong."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import sgl_eval
import typer
import yaml
from sgl_eval.evals._loader import load_bundled
from sgl_eval.evals._prompts import render_prompt, vendored_prompt
from sgl_eval.registry import get as sgl_eval_benchmark
from typer.testing import CliRunner

from draftproof.accuracy import arithmetic
from draftproof.accuracy.lanes import (
    LANES_DIR,
    lane_names,
    list_command,
    load_lane,
    rows_sha256,
)
from draftproof.accuracy.tests.support import gsm8k_file

SGL_EVAL_DATA = Path(sgl_eval.__file__).parent / "_vendored" / "nemo_skills" / "dataset"


def sha256(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


@pytest.fixture
def lane_file(tmp_path):
    """Write a lane file like `arithmetic` with changes; gives its path."""

    def write(**changes):
        content = yaml.safe_load((LANES_DIR / "arithmetic.yaml").read_text(encoding="utf-8"))
        content["name"] = "mine"
        for path, value in changes.items():
            *sections, leaf = path.split("__")
            part = content
            for section in sections:
                part = part[section]
            if value is ...:
                del part[leaf]
            else:
                part[leaf] = value
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return str(path)

    return write


def test_all_published_lanes_are_there_under_their_names():
    assert lane_names() == [
        "aime25",
        "aime26-repeated",
        "aime26-serial",
        "arithmetic",
        "gsm8k",
        "gsm8k-5shot",
        "gsm8k-heldout",
        "gsm8k-heldout-concurrent",
    ]
    for name in lane_names():
        assert load_lane(name).name == name


@pytest.mark.parametrize(
    "name, planned, concurrency, margin",
    [
        ("gsm8k", 1319, 64, 1),
        ("gsm8k-5shot", 1319, 64, 1),
        ("gsm8k-heldout", 1314, 1, 1),
        ("gsm8k-heldout-concurrent", 1314, 64, 1),
        ("aime25", 480, 64, 5),
        ("aime26-serial", 30, 1, 5),
        ("aime26-repeated", 480, 64, 5),
        ("arithmetic", 96, 8, 5),
    ],
)
def test_each_lane_plans_what_its_protocol_says(name, planned, concurrency, margin):
    lane = load_lane(name)
    assert (lane.planned, lane.concurrency, lane.margin_pp) == (planned, concurrency, margin)


@pytest.mark.parametrize("name", ["gsm8k", "aime25", "aime26-serial", "aime26-repeated"])
def test_prompts_and_bundled_questions_are_the_files_of_the_pinned_sgl_eval(name):
    assert importlib.metadata.version("sgl-eval") == "0.1.3"
    lane = load_lane(name)
    prompt = vendored_prompt(lane.prompt.name)
    assert sha256(prompt.read_bytes()) == lane.prompt.sha256
    bundled = SGL_EVAL_DATA / lane.dataset.name / "test.txt"
    if bundled.exists():
        assert sha256(bundled.read_bytes()) == lane.dataset.sha256
        examples = load_bundled(lane.dataset.name)(None)
        assert len(examples) == lane.dataset.count
        first = render_prompt(prompt, examples[0].inputs["problem"])
        assert sha256(first) == lane.prompt.first_sha256
    else:
        assert name == "gsm8k"


@pytest.mark.parametrize("name", ["gsm8k", "aime25"])
def test_lanes_named_after_sgl_eval_send_what_it_sends(name):
    lane, theirs = load_lane(name), sgl_eval_benchmark(name)
    sampling, gen = lane.sampling, theirs.default_gen
    assert (sampling.min_p, sampling.repetition_penalty) == (gen.min_p, gen.repetition_penalty)
    assert sampling.seed_base is gen.seed is None
    assert sampling.thinking == (gen.chat_template_kwargs or {}).get("thinking")
    assert lane.repeats == theirs.default_n_repeats
    if name == "gsm8k":
        assert (sampling.temperature, sampling.top_p) == (gen.temperature, gen.top_p)
        assert sampling.max_tokens is gen.max_tokens is None


def test_few_shot_hashes_follow_from_gsm8k_itself():
    content = gsm8k_file().read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    prefix = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in rows[:5])
    for name, first in (("gsm8k-5shot", 0), ("gsm8k-heldout", 5), ("gsm8k-heldout-concurrent", 5)):
        lane = load_lane(name)
        assert sha256(content) == lane.dataset.sha256
        assert len(rows) == lane.dataset.count
        assert sha256(prefix) == lane.prompt.sha256
        asked = f"{prefix}Question: {rows[first]['question']}\nAnswer:"
        assert sha256(asked) == lane.prompt.first_sha256
    chat = load_lane("gsm8k")
    asked = render_prompt(vendored_prompt("math"), rows[0]["question"])
    assert sha256(asked) == chat.prompt.first_sha256


def test_arithmetic_makes_the_questions_of_its_hash():
    lane = load_lane("arithmetic")
    rows = arithmetic.generate(lane.dataset.count, lane.dataset.seed)
    assert rows_sha256(rows) == lane.dataset.sha256
    first = lane.prompt.template.format(problem=rows[0]["problem"])
    assert sha256(first) == lane.prompt.first_sha256
    assert rows_sha256(arithmetic.generate(96, 1)) != lane.dataset.sha256


@pytest.mark.parametrize("count", [1, 96, 1000])
def test_arithmetic_questions_are_distinct_and_their_answers_right(count):
    rows = arithmetic.generate(count, 3)
    assert len({row["problem"] for row in rows}) == len({row["id"] for row in rows}) == count
    for row in rows:
        left, operation, right = row["problem"].removeprefix("What is ").rstrip("?").split()
        left, right = int(left), int(right)
        want = {"+": left + right, "-": left - right, "*": left * right}[operation]
        assert row["expected_answer"] == str(want)


@pytest.mark.parametrize("count", [0, 1001])
def test_arithmetic_refuses_counts_it_cannot_make(count):
    with pytest.raises(ValueError, match="count"):
        arithmetic.generate(count, 0)


def test_the_two_heldout_lanes_differ_in_concurrency_alone():
    one, other = (
        load_lane(name).model_dump() for name in ("gsm8k-heldout", "gsm8k-heldout-concurrent")
    )
    apart = {key for key in one if one[key] != other[key]}
    assert apart == {"name", "description", "concurrency"}


@pytest.mark.parametrize(
    "changes, field, value",
    [
        ({"sampling__temperature": "hot"}, "sampling.temperature", "'hot'"),
        ({"sampling__temperature": -1}, "sampling.temperature", "-1"),
        ({"sampling__max_tokens": "512"}, "sampling.max_tokens", "'512'"),
        ({"sampling__top_p": 0}, "sampling.top_p", "0"),
        ({"sampling__reasoning_effort": "huge"}, "sampling.reasoning_effort", "'huge'"),
        ({"sampling__droppable": ["min_p"]}, "sampling.droppable", "'min_p'"),
        ({"sampling__tempratur": 1}, "sampling.tempratur", "1"),
        ({"repeats": True}, "repeats", "True"),
        ({"repeats": 4}, "repeats", "4"),
        ({"concurrency": 0}, "concurrency", "0"),
        ({"endpoint": "completions"}, "endpoint", "'completions'"),
        ({"scorer": "vibes"}, "scorer", "'vibes'"),
        ({"margin_pp": 0}, "margin_pp", "0"),
        ({"dataset__sha256": "abc"}, "dataset.sha256", "'abc'"),
        ({"dataset__count": 0}, "dataset.count", "0"),
        ({"dataset__shots": 96}, "dataset.shots", "96"),
        ({"dataset__shots": 5}, "dataset.shots", "5"),
        ({"dataset__scores_shots": False}, "dataset.scores_shots", "shots = 0"),
        ({"dataset__seed": ...}, "dataset.seed", "None"),
        ({"prompt__template": "no place"}, "prompt.template", "'no place'"),
        ({"prompt__template": "{problem}"}, "prompt.sha256", "fc246a84"),
        ({"prompt__kind": "few-shot"}, "prompt.template", "few-shot"),
        ({"timeouts": {"idle_s": 0}}, "timeouts.idle_s", "0"),
        ({"limits": {"errors": -1}}, "limits.errors", "-1"),
        ({"endpoint": "generate", "sampling__thinking": True}, "endpoint", "'generate'"),
        ({"description": ...}, "description", "is missing"),
        ({"published": "95%"}, "published", "'95%'"),
        ({"name": "Über Lane"}, "name", "'Über Lane'"),
        ({"name": "gsm8k"}, "name", "'gsm8k'"),
        ({"base": "gsm8k"}, "base", "'gsm8k'"),
    ],
)
def test_a_bad_lane_file_is_one_line_with_file_field_and_value(lane_file, changes, field, value):
    path = lane_file(**changes)
    with pytest.raises(ValueError) as caught:
        load_lane(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert path in message
    assert f" {field}: " in message
    assert value in message


@pytest.mark.parametrize(
    "content, told",
    [
        ("", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("name: a\nname: b\n", "'name' is given twice"),
        ("name: [\n", "is not YAML"),
        (b"\xff\xfe", "is not UTF-8"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_file_that_is_no_lane_at_all_is_one_line(tmp_path, content, told):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        load_lane(str(path))
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_lane_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"no lane 'gsm9k'.*gsm8k-5shot"):
        load_lane("gsm9k")
    with pytest.raises(ValueError, match="No such file"):
        load_lane(str(tmp_path / "none.yaml"))


def test_a_lane_of_ones_own_loads_from_its_file(lane_file):
    lane = load_lane(lane_file(margin_pp=2.5))
    assert (lane.name, lane.margin_pp) == ("mine", 2.5)
    assert lane.sha256 != load_lane("arithmetic").sha256


def test_documentation_is_not_hashed_and_everything_asked_is(lane_file):
    plain = load_lane(lane_file()).sha256
    documented = {"description": "other words", "published": [{"figure": "1", "protocol": "2"}]}
    assert load_lane(lane_file(**documented)).sha256 == plain
    for change in (
        {"margin_pp": 2.0},
        {"concurrency": 9},
        {"sampling__seed_base": 1},
        {"limits": {"errors": 1}},
        {"dataset__limit": 5},
        {"sampling__droppable": []},
    ):
        assert load_lane(lane_file(**change)).sha256 != plain, change


def test_a_modified_lane_is_named_hashed_and_published_apart():
    lane = load_lane("aime25")
    modified = lane.modified({"max_tokens": "256", "limit": "3"})
    assert modified.name == "aime25+modified(limit=3,max_tokens=256)"
    assert modified.name == lane.modified({"limit": "3", "max_tokens": "256"}).name
    assert (modified.sampling.max_tokens, modified.planned) == (256, 48)
    assert modified.sha256 != lane.sha256
    assert modified.is_modified
    assert not lane.is_modified
    assert lane.published
    assert not modified.published
    assert lane.planned == 480


@pytest.mark.parametrize(
    "field, text, value",
    [
        ("temperature", "1e-3", 0.001),
        ("sampling.temperature", "0.5", 0.5),
        ("stop", '["END"]', ["END"]),
        ("thinking", "false", False),
        ("seed_base", "null", None),
        ("reasoning_effort", "low", "low"),
    ],
)
def test_values_given_by_set_are_read_by_their_type(field, text, value):
    lane = load_lane("aime26-serial").modified({field: text})
    assert getattr(lane.sampling, field.removeprefix("sampling.")) == value


def test_setting_what_the_lane_has_already_modifies_nothing():
    lane = load_lane("aime25")
    assert lane.modified({"repeats": "16", "temperature": "1"}) is lane


@pytest.mark.parametrize(
    "overrides, told",
    [
        ({"margin_pp": "3"}, "margin_pp"),
        ({"scorer": "few-shot"}, "scorer"),
        ({"sha256": "0"}, "sha256"),
        ({"max_token": "3"}, "'max_token'"),
        ({"max_tokens": "many"}, "max_tokens.*'many'"),
        ({"max_tokens": "[1"}, r"'\[1'"),
        ({"max_tokens": "true"}, "max_tokens.*True"),
        ({"repeats": "0"}, "repeats.*0"),
        ({"limit": "0"}, "limit.*0"),
    ],
)
def test_what_may_not_be_set_is_refused_by_name(overrides, told):
    with pytest.raises(ValueError, match=told):
        load_lane("gsm8k").modified(overrides)


def test_a_modified_lane_is_not_modified_again():
    modified = load_lane("gsm8k").modified({"limit": "3"})
    with pytest.raises(ValueError, match="modified already"):
        modified.modified({"limit": "2"})


def test_required_fields_are_those_sent_and_not_droppable():
    sampling = load_lane("gsm8k").sampling
    assert sampling.required == ["temperature", "top_p"]
    assert sampling.sent == {
        "temperature": 0.0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_list_shows_every_lane_with_its_hashes_as_text_and_as_json():
    app = typer.Typer()
    app.command()(list_command)
    text = CliRunner().invoke(app, []).output
    listing = json.loads(CliRunner().invoke(app, ["--json"]).output)
    assert [lane["name"] for lane in listing["lanes"]] == lane_names()
    for lane in listing["lanes"]:
        for shown in (lane["name"], lane["sha256"], lane["dataset"]["sha256"]):
            assert shown in text


def test_the_lane_in_the_guide_loads(tmp_path):
    guide = LANES_DIR.parents[1] / "docs" / "accuracy.md"
    if not guide.exists():
        pytest.skip("installed without the checkout's docs")
    example = re.search(r"```yaml\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)[1]
    data, template = (line for line in example.splitlines() if "sha256: ..." in line)
    example = example.replace(data, f"  sha256: {sha256('any file')}")
    text = "{problem} Reply with the number only."
    assert f'"{text}"' in example
    example = example.replace(template, f"  sha256: {sha256(text)}")
    path = tmp_path / "mine.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_lane(str(path)).planned == 400
