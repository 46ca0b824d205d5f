"""Questions, prompts and grades are those of the protocols, byte for byte where they are stated."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import random
import shutil
from pathlib import Path

import pytest
import sgl_eval
from sgl_eval.evals import _loader
from sgl_eval.evals._prompts import render_prompt, vendored_prompt

from draftproof.accuracy.grading import Grade, GradingProcess, grade_by_sgl_eval, grader
from draftproof.accuracy.lanes import lane_names, load_lane
from draftproof.accuracy.prompts import PromptError, few_shot_prefix, renderer
from draftproof.accuracy.questions import DataError, cache_path, load_questions
from draftproof.accuracy.receipt import environment
from draftproof.accuracy.tests.support import gsm8k_file

# Of the files of sgl-eval 0.1.3 that a score depends on; its interface is private.
SGL_EVAL_FILES = {
    "evals/_prompts.py": ("959fe42fd567e573f929addb418c4e0cf7f02921016923e19799d303f1df9157"),
    "_vendored/nemo_skills/evaluator/math.py": (
        "5cc1d84b40ab3be91e7656011eab2bed661c83fe603f15d24b13701a87999912"
    ),
    "_vendored/nemo_skills/math_grader.py": (
        "803deafc7dd0102d77a7f57ffc2fe10c2faa089854aaca9f9760dfafdfd75f62"
    ),
    "_vendored/nemo_skills/math_metrics.py": (
        "881fe3fe84f6552cf76b0fc44cf0e1a0a0cb211a932fb4a94d22db92c673e2dc"
    ),
    "_vendored/nemo_skills/_metrics_base.py": (
        "2aac16c9d6d30af1df67c5a8922b078dd559ab442d95bfb838cd8be87c6de4a5"
    ),
}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_sgl_evals_files_are_those_that_were_read() -> None:
    assert importlib.metadata.version("sgl-eval") == "0.1.3"
    assert environment()["sgl_eval_files"] == SGL_EVAL_FILES


def test_the_few_shot_texts_are_the_published_ones() -> None:
    data = gsm8k_file()
    lane, heldout = load_lane("gsm8k-5shot"), load_lane("gsm8k-heldout")
    questions = load_questions(lane, data)
    prefix = few_shot_prefix(questions.demonstrations)
    assert len(prefix.encode()) == 2216
    assert sha256(prefix) == "8d2a7823e8b2157917ae88db830fedc5e2a984e5ecabf4ae39380756d23f48b2"
    row_0 = renderer(lane, questions)(questions.questions[0])
    assert len(row_0.encode()) == 2516
    assert sha256(row_0) == "239293754edb5e2d547ccb32b43fbd975ae92f8fccd62c05014dd101d39278bd"
    rest = load_questions(heldout, data)
    assert (len(questions.questions), len(rest.questions)) == (1319, 1314)
    assert rest.questions[0].id == "gsm8k-5"
    row_5 = renderer(heldout, rest)(rest.questions[0])
    assert len(row_5.encode()) == 2437
    assert sha256(row_5) == "5d6b81e083f6f1bdaece2edaab62df2b5bba648bb241f18545b0f37905dbfc68"


def test_sgl_evals_data_is_looked_for_where_sgl_eval_keeps_it() -> None:
    # The module that knows these places is not loaded in a run: it brings httpx with it.
    assert _loader._VENDORED_DATASET_ROOT == sgl_eval.VENDORED_NS_ROOT / "dataset"
    assert Path.home() / ".cache" / "sgl_eval" == _loader._CACHE_ROOT


def test_gsm8k_is_prepared_as_sgl_eval_prepares_it() -> None:
    questions = load_questions(load_lane("gsm8k"), gsm8k_file())
    assert len(questions.questions) == 1319
    # The grader compares numbers: no work, no thousands separators.
    assert questions.questions[0].label == "18"
    assert {one.label for one in questions.questions} >= {"-10", "-3"}


def test_a_seeded_cache_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = load_lane("gsm8k-5shot")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be fetched .* give --data FILE, or put the file"):
        load_questions(lane)
    cached = cache_path(lane)
    cached.parent.mkdir()
    shutil.copy(gsm8k_file(), cached)
    assert load_questions(lane).source == str(cached)


@pytest.mark.parametrize("name", ["aime25", "aime26-serial"])
def test_sgl_evals_prompts_are_rendered_as_sgl_eval_renders_them(name: str) -> None:
    lane = load_lane(name)
    questions = load_questions(lane)
    render = renderer(lane, questions)
    theirs = _loader.load_bundled(lane.dataset.name)(None)
    path = vendored_prompt(lane.prompt.name)
    assert [one.id for one in questions.questions] == [one.id for one in theirs]
    assert [one.label for one in questions.questions] == [str(one.target) for one in theirs]
    for ours, their in zip(questions.questions, theirs, strict=True):
        assert render(ours) == render_prompt(path, problem=their.inputs["problem"])


def test_a_prompt_with_another_hash_is_refused() -> None:
    lane = load_lane("aime25")
    other = lane.model_copy(update={"prompt": lane.prompt.model_copy(update={"sha256": "0" * 64})})
    with pytest.raises(PromptError, match=r"sgl-eval's prompt 'math' has SHA-256 \w{64}, but lane"):
        renderer(other, load_questions(lane))


def test_every_lane_has_its_questions_and_prompts() -> None:
    for name in lane_names():
        lane = load_lane(name)
        data = gsm8k_file() if lane.dataset.name == "gsm8k" else None
        questions = load_questions(lane, data)
        render = renderer(lane, questions)
        assert len(questions.questions) == lane.dataset.scored
        assert len({render(one) for one in questions.questions}) == lane.dataset.scored


@pytest.mark.parametrize(
    ("scorer", "text", "label", "grade"),
    [
        ("sgl-eval-math", "so \\boxed{18}.", "18", Grade("18", True)),
        ("sgl-eval-math", "so \\boxed{1,234}", "1234", Grade("1,234", True)),
        ("sgl-eval-math", "\\boxed{7} or \\boxed{8}", "7", Grade("8", False)),
        ("sgl-eval-math", "so 18", "18", Grade(None, False)),
        ("sgl-eval-math", "\\boxed{018}", "18", Grade("018", True)),
        ("arithmetic", "7 + 5 = 12", "12", Grade("12", True)),
        ("few-shot", "#### 18.50", "a\n#### 18.5", Grade("18.5", True, ("50", False))),
        ("few-shot", "no", "a\n#### 18", Grade(None, False, (None, False))),
    ],
)
def test_the_grading_process_grades_as_the_scorer_does(
    scorer: str, text: str, label: str, grade: Grade
) -> None:
    async def ask() -> Grade:
        process = GradingProcess(scorer)
        try:
            await process.start()
            return await process.grade(text, label)
        finally:
            await process.stop()

    if scorer == "few-shot" and label.endswith("18.5"):
        # The published label rule reads 5 there, and the answer as 50.
        assert grader(scorer)(text, label).published == ("50", False)
    assert asyncio.run(ask()) == grade == grader(scorer)(text, label)


def _integers() -> list[int]:
    """Small ones, neighbours of powers of ten up to the longest that count as plain, and beyond."""
    near = [sign * 10**power + step for power in range(11) for sign in (1, -1) for step in (-1, 0)]
    return [*range(-3, 4), 12, 21, 102, 120, 201, 2024, *near, 333_333_333, 333_333_334]


def test_plain_integers_get_the_verdicts_of_sgl_evals_grader() -> None:
    grade = grader("sgl-eval-math")
    draw = random.Random(0)
    values = _integers()
    pairs = [(value, value) for value in values] + [(value, -value) for value in values]
    pairs += [(value, value + draw.choice((-1, 1))) for value in values]
    pairs += [tuple(draw.sample(values, 2)) for _ in range(100)]
    for answer, label in pairs:
        text = f"so \\boxed{{{answer}}}."
        got = grade(text, str(label))
        assert got == grade_by_sgl_eval(text, str(label)), (answer, label)
        assert got == Grade(str(answer), answer == label)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "18",
        "\\fbox{18}",
        "boxed{18}",
        "\\boxed",
        "\\boxed{}",
        "\\boxed{18",
        "\\boxed 18",
        "\\boxed {18}",
        "\\boxed{ 18}",
        "\\boxed{18 }",
        "\\boxed{+18}",
        "\\boxed{-18}",
        "\\boxed{\u221218}",
        "\\boxed{\u0661\u0668}",
        "\\boxed{018}",
        "\\boxed{-0}",
        "\\boxed{18.}",
        "\\boxed{18.0}",
        "\\boxed{18\\%}",
        "\\boxed{\\$18}",
        "\\boxed{1{,}8}",
        "\\boxed{{18}}",
        "\\boxed{18}{19}",
        "\\boxed{18}} and \\boxed{",
        "\\boxed{17} then \\boxed{18}",
        "\\boxed{18} then \\boxed{x}",
        "\\boxed{18} then \\boxedness",
        "\\boxed{\\boxed{18}}",
        "\\boxed{36/2}",
    ],
)
@pytest.mark.parametrize("label", ["18", "18.0", "018", "-18", " 18", "0", "A"])
def test_every_spelling_gets_the_verdict_of_sgl_evals_grader(text: str, label: str) -> None:
    assert grader("sgl-eval-math")(text, label) == grade_by_sgl_eval(text, label)


def test_a_grading_process_that_dies_is_started_anew() -> None:
    async def ask() -> Grade:
        process = GradingProcess("arithmetic")
        try:
            child = await process.start()
            child.kill()
            await child.wait()
            return await asyncio.wait_for(process.grade("It is 4.", "4"), 60)
        finally:
            await process.stop()

    assert asyncio.run(ask()) == Grade("4", True)


def test_an_answer_that_the_grader_cannot_bear_is_wrong_and_says_why() -> None:
    async def ask() -> list[Grade]:
        process = GradingProcess("arithmetic")
        try:
            await process.start()
            # A label that is no number is refused by the scorer.
            return [await process.grade("1", "one"), await process.grade("1", "1")]
        finally:
            await process.stop()

    refused, graded = asyncio.run(ask())
    assert not refused.correct
    assert refused.failure is not None
    assert refused.failure.startswith("ValueError: label: not a number")
    assert graded == Grade("1", True)
