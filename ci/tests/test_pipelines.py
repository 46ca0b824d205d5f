"""The pipelines of ci/github: well formed, safe, and calling only what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from draftproof.accuracy.cli import app as accuracy_app
from draftproof.conformance.cli import app

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "ci" / "setup.sh"
WORKFLOWS = sorted((ROOT / "ci" / "github").glob("*.yml"))

# What the variables of the pipelines stand for, to read a command as the shell would.
SAMPLES = {
    "ONLY": "--op c128_cleanup",
    "GITHUB_RUN_NUMBER": "7",
    "BASE_URL": "http://127.0.0.1:30000",
    "matrix.lane": "gsm8k",
}


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def triggers(workflow: dict[Any, Any]) -> dict[str, Any]:
    """The `on:` of a workflow, a key that YAML reads as the truth value."""
    return workflow[True]


def scripts(workflow: dict[Any, Any]) -> list[str]:
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


def shell_words(line: str) -> list[str]:
    """Words of one command, variables replaced by samples; an unknown one is a KeyError."""
    line = re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", lambda m: SAMPLES[m[1]], line)
    return shlex.split(re.sub(r"\$(\w+)", lambda m: SAMPLES[m[1]], line))


def draftproof_arguments(script: str) -> list[list[str]]:
    """Arguments of every call of draftproof in a script, through make or not."""
    calls = []
    for line in script.splitlines():
        words = shell_words(line)
        if words and Path(words[0]).name == "draftproof":
            calls.append(words[1:])
        elif words[:1] == ["make"] and words[1] in ("verify", "bench"):
            given = [w.removeprefix("ARGS=") for w in words[2:] if w.startswith("ARGS=")]
            calls.append([words[1], *shlex.split(" ".join(given))])
    return calls


def parse(arguments: list[str]) -> None:
    """Let the real command line read the arguments, without running anything."""
    front = app
    if arguments[0] == "accuracy":
        front, arguments = accuracy_app, arguments[1:]
    command: Any = typer.main.get_command(front)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    command.make_context(name, list(arguments))


@pytest.mark.parametrize(
    "line",
    [
        "draftproof verify --profil full",
        "draftproof verify --profile everything",
        'make bench ARGS="--seed 3"',
        "draftproof verfy",
        "draftproof accuracy run gsm8k --url http://127.0.0.1",
    ],
)
def test_a_call_that_the_command_line_would_refuse_is_seen(line: str) -> None:
    (arguments,) = draftproof_arguments(line)
    # Typer's usage errors come from click or from its own copy of click.
    with pytest.raises(Exception) as refused:  # noqa: PT011, RUF100
        parse(arguments)
    assert isinstance(refused.value, AssertionError) or hasattr(refused.value, "format_message")


def test_there_is_a_pipeline_for_a_pull_request_a_gpu_and_the_night() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"pull-request", "gpu", "nightly"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_names_its_runner_and_its_time_limit(path: Path) -> None:
    workflow = load(path)
    assert triggers(workflow)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert job["timeout-minutes"] > 0, name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), f"{name}: {step}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_self_hosted_runner_runs_the_code_of_a_fork(path: Path) -> None:
    workflow = load(path)
    hosted = [job["runs-on"] for job in workflow["jobs"].values()]
    if {"pull_request", "pull_request_target"} & set(triggers(workflow)):
        assert not any("self-hosted" in runner for runner in hosted)


def test_every_call_of_draftproof_uses_what_the_command_line_has() -> None:
    calls = [
        arguments
        for path in WORKFLOWS
        for script in scripts(load(path))
        for arguments in draftproof_arguments(script)
    ]
    for arguments in calls:
        parse(arguments)
    assert {arguments[0] for arguments in calls} >= {"verify", "bench", "mutants", "accuracy"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_make_target_and_file_that_a_pipeline_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for script in scripts(load(path)):
        for line in script.splitlines():
            words = shell_words(line)
            if words[0] == "make":
                assert words[1] in targets, line
            elif words[0] in ("bash", "sh"):
                assert (ROOT / words[1]).is_file(), line


def test_pull_requests_run_on_every_supported_python() -> None:
    jobs = load(ROOT / "ci" / "github" / "pull-request.yml")["jobs"]
    accepted = re.findall(r"^ +(3\.\d+(?: \| 3\.\d+)*)\) exec", SETUP.read_text(), re.MULTILINE)
    assert [jobs["check"]["strategy"]["matrix"]["python"]] == [a.split(" | ") for a in accepted]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_pipeline_is_explained(path: Path) -> None:
    assert path.name in (ROOT / "ci" / "README.md").read_text()


def test_the_check_of_a_checkout_calls_the_command_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert any(re.match(r"make test\b", line) for line in lines)
