"""The pipelines of ci/github: well formed, safe, and calling only what exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from draftproof.accuracy.cli import app as accuracy_app
from draftproof.ci import fuzz, issues
from draftproof.conformance.cli import app

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "ci" / "setup.sh"
WORKFLOWS = sorted((ROOT / "ci" / "github").glob("*.yml"))
GITLAB = sorted((ROOT / "ci" / "gitlab").glob("*.yml"))
ACTION = ROOT / "ci" / "verify" / "action.yml"

# What the variables of the pipelines stand for, to read a command as the shell would.
SAMPLES = {
    "ONLY": "--op c128_cleanup",
    "GITHUB_RUN_NUMBER": "7",
    "BASE_URL": "http://127.0.0.1:30000",
    "matrix.lane": "gsm8k",
    "LANE": "gsm8k",
    "SHARD": "1/2",
    "ARTIFACTS": "http://127.0.0.1/run",
    "SANITIZER": "compute-sanitizer",
    "PUBLISHED": "triton",
    "KNOWN": "known.toml",
    "DRAFTPROOF_SOURCE": "source",
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


def gitlab_scripts(path: Path) -> list[str]:
    """Every script of a GitLab file, as one text a job."""
    jobs = [job for job in load(path).values() if isinstance(job, dict) and "script" in job]
    return ["\n".join([*job["script"], *job.get("after_script", [])]) for job in jobs]


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
    for path in GITLAB:
        calls += [
            words for script in gitlab_scripts(path) for words in draftproof_arguments(script)
        ]
    for arguments in calls:
        parse(arguments)
    used = {arguments[0] for arguments in calls}
    assert used >= {"verify", "bench", "mutants", "accuracy", "history"}


def test_every_module_that_a_pipeline_runs_is_there() -> None:
    texts = [script for path in WORKFLOWS for script in scripts(load(path))]
    texts += [script for path in GITLAB for script in gitlab_scripts(path)]
    texts.append((ROOT / "ci" / "verify" / "run.sh").read_text())
    named = {name for text in texts for name in re.findall(r"-m (draftproof[\w.]+)", text)}
    assert named >= {f"draftproof.ci.{name}" for name in ("records", "summary", "fuzz", "issues")}
    for name in named:
        assert importlib.util.find_spec(name), name


def test_gitlab_runs_what_github_runs() -> None:
    def commands(texts: list[str]) -> set[tuple[str, ...]]:
        calls = (words for text in texts for words in draftproof_arguments(text))
        return {
            tuple(word for word in words if not word.startswith(("--op", "c128")))
            for words in calls
        }

    for path in GITLAB:
        twin = next(one for one in WORKFLOWS if one.name == path.name)
        assert commands(gitlab_scripts(path)) == commands(scripts(load(twin)))
        assert f"gitlab/{path.name}" in (ROOT / "ci" / "README.md").read_text()


def test_the_workflow_hands_on_every_input_that_the_action_takes() -> None:
    workflow = load(ROOT / "ci" / "github" / "verify.yml")
    action = load(ACTION)
    (step,) = [
        s for s in workflow["jobs"]["verify"]["steps"] if "draftproof-source" in s.get("uses", "")
    ]
    assert set(step["with"]) <= set(action["inputs"])
    assert set(step["with"]) <= set(triggers(workflow)["workflow_call"]["inputs"])
    environment = action["runs"]["steps"][0]["env"]
    script = (ROOT / "ci" / "verify" / "run.sh").read_text()
    for name in environment:
        assert re.search(rf"\b{name}\b", script), f"the script reads no {name}"


def test_no_pipeline_has_a_known_weakness() -> None:
    zizmor = Path(sys.executable).with_name("zizmor")
    if not zizmor.exists():
        pytest.skip("zizmor is not installed here")
    options = ["--offline", "--no-progress", "--config", str(ROOT / "ci" / "zizmor.yml")]
    files = [*map(str, WORKFLOWS), str(ACTION)]
    done = subprocess.run([zizmor, *options, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_workflow_is_malformed() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("actionlint is not installed here; the pull request's pipeline runs it")
    config = ["-config-file", str(ROOT / "ci" / "actionlint.yaml")]
    done = subprocess.run([actionlint, *config, *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- what the pipelines run

KERNEL = """
from draftproof.oracles.c128_cleanup import c128_cleanup as right

def c128_cleanup(states, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens):
    if ring_size == 100:
        raise RuntimeError("no such ring")
    right(states, req_pool_indices, seq_lens, accept_lens + 1, ring_size=ring_size,
          num_draft_tokens=num_draft_tokens)
"""


def test_the_action_verifies_a_kernel_of_an_empty_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["git", "-C", str(repository), "init", "-q"], check=True)
    (repository / "my_kernel.py").write_text(KERNEL)
    ours = ("PYTEST", "DRAFTPROOF", "TRITON_INTERPRET", "GITHUB")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env = {
        **clean,
        "PYTHON": sys.executable,
        "IMPL": "my_kernel.py",
        "OPS": "c128_cleanup",
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "verify" / "run.sh")],
        cwd=repository,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "my_kernel.py FAILS" in summary
    assert ":x:" in summary
    errors = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    # Each op and check once: on the line that raised, else on the op's function.
    assert len(errors) == len({line.split("title=")[1].split(":")[0] for line in errors})
    assert {line.split(",")[1] for line in errors} <= {"line=4", "line=6"}
    assert all("file=my_kernel.py" in line for line in errors)
    (given,) = (tmp_path / "output").read_text().splitlines()
    report = Path(given.removeprefix("report="))
    assert json.loads(report.read_text())["totals"]["failed"]
    assert "<svg" in (repository / "draftproof.html").read_text()


def test_every_op_is_fuzzed_in_exactly_one_shard() -> None:
    ops = [f"op{n}" for n in range(7)]
    shards = [fuzz.shard_of(ops, f"{n}/3") for n in (1, 2, 3)]
    assert sorted(op for shard in shards for op in shard) == ops
    for bad in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(ValueError, match="--shard"):
            fuzz.shard_of(ops, bad)


def test_a_night_replays_what_is_kept_keeps_what_fails_and_takes_seeds_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def stand_in(*arguments: str) -> int:
        ran.append(arguments)
        if arguments[0] == "replay":
            return 0
        case = tmp_path / f"case-{len(ran)}.json"
        case.write_text("{}")
        result = {"status": "failed", "known": None, "case_file": str(case)}
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"results": [result]}))
        return 1

    monkeypatch.setattr(fuzz, "draftproof", stand_in)
    where = ["--kept", str(tmp_path / "kept"), "--json", str(tmp_path / "json")]
    night = ["--shard", "1/2", "--seeds", "2", *where, "--", "--impl=oracle"]
    assert fuzz.main(["--seed", "7", *night]) == 1
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"case-1.json", "case-2.json"}
    assert fuzz.main(["--seed", "8", *night]) == 1
    seeds = [words[words.index("--seed") + 1] for words in ran if words[0] == "verify"]
    assert len(set(seeds)) == 4
    assert [words[0] for words in ran] == ["verify"] * 2 + ["replay"] * 2 + ["verify"] * 2
    assert all("--impl=oracle" in words for words in ran)


def test_a_failure_gets_one_issue_however_many_nights_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        {
            "op": "an_op",
            "check": "fuzz",
            "case": name,
            "implementation": "us",
            "status": "failed",
            "detail": "out: 1 of 2 elements are wrong",
            "case_file": "x/case.json",
        }
        for name in ("old", "new")
    ]
    report = tmp_path / "report.json"
    document = {"schema": "draftproof.verify/1", "environment": {"seed": 7}, "results": results}
    report.write_text(json.dumps(document))
    calls: list[tuple[tuple[str, ...], str | None]] = []

    def stand_in(*arguments: str, given: str | None = None) -> str:
        calls.append((arguments, given))
        return json.dumps([{"title": "an_op / fuzz / old fails for us"}])

    monkeypatch.setattr(issues, "gh", stand_in)
    assert issues.main([str(report), "--artifacts", "a page"]) == 0
    created = [(words, given) for words, given in calls if words[:2] == ("issue", "create")]
    ((words, given),) = created
    assert "an_op / fuzz / new fails for us" in words
    assert "seed 7" in str(given)
    assert "case.json" in str(given)
    assert "1 failures have an open issue" in capsys.readouterr().out


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


def test_pull_requests_run_on_the_oldest_and_the_newest_python() -> None:
    jobs = load(ROOT / "ci" / "github" / "pull-request.yml")["jobs"]
    accepted = re.findall(r"^ +(3\.\d+(?: \| 3\.\d+)*)\) exec", SETUP.read_text(), re.MULTILINE)
    ((oldest, *_, newest),) = [found.split(" | ") for found in accepted]
    assert jobs["check"]["strategy"]["matrix"]["python"] == [oldest, newest]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_pipeline_is_explained(path: Path) -> None:
    assert path.name in (ROOT / "ci" / "README.md").read_text()


def test_the_check_of_a_checkout_calls_the_command_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert any(re.match(r"make test\b", line) for line in lines)
