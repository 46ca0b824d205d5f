"""Turn questions into the texts that are sent: sgl-eval's rendering, few-shot text, a template."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.questions import Question, QuestionSet, sgl_eval_module

# Stands for the question while sgl-eval renders its prompt once; no prompt file contains it.
_PLACEHOLDER = "\x00problem\x00"


class PromptError(ValueError):
    """The prompt is not the one that the lane states."""


def few_shot_prefix(demonstrations: list[Question]) -> str:
    """Write the demonstrations, answers whole: the calculator marks and the "####" stay."""
    return "".join(f"Question: {one.problem}\nAnswer: {one.label}\n\n" for one in demonstrations)


def renderer(lane: Lane, questions: QuestionSet) -> Callable[[Question], str]:
    """Make the function that renders a lane's questions.

    Parameters
    ----------
    lane : Lane
        Says which prompt, and its SHA-256.
    questions : QuestionSet
        The lane's questions; the demonstrations stand in every few-shot text.

    Returns
    -------
    callable
        Question to text, before any chat template of the server. sgl-eval's prompt file is read
        and parsed once, here.

    Raises
    ------
    PromptError
        If a hash that the lane states is not the prompt's.
    """
    if lane.prompt.kind == "few-shot":
        prefix = few_shot_prefix(questions.demonstrations)
        _check("the demonstrations", prefix.encode(), lane.prompt.sha256, lane)

        def render(question: Question) -> str:
            return f"{prefix}Question: {question.problem}\nAnswer:"
    else:
        template, mark = _template(lane)

        # str.format puts the question into sgl-eval's template as it is, so this gives its text.
        def render(question: Question) -> str:
            return template.replace(mark, question.problem)

    if lane.prompt.first_sha256:
        first = render(questions.questions[0]).encode()
        _check("the first question's text", first, lane.prompt.first_sha256, lane)
    return render


def _template(lane: Lane) -> tuple[str, str]:
    if lane.prompt.template is not None:
        return lane.prompt.template, "{problem}"
    theirs = sgl_eval_module("evals/_prompts.py")
    path = theirs.vendored_prompt(lane.prompt.name)
    if not path.is_file():
        raise PromptError(f"prompt: sgl-eval has no prompt {lane.prompt.name!r}")
    _check(f"sgl-eval's prompt {lane.prompt.name!r}", path.read_bytes(), lane.prompt.sha256, lane)
    return theirs.render_prompt(path, problem=_PLACEHOLDER), _PLACEHOLDER


def _check(what: str, content: bytes, stated: str, lane: Lane) -> None:
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != stated:
        raise PromptError(
            f"prompt: {what} has SHA-256 {sha256}, but lane {lane.name} states {stated}"
        )
