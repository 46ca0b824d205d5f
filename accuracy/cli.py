"""Command line of the accuracy lanes: `draftproof accuracy list | run | compare | ...`."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from draftproof.accuracy import runfolder
from draftproof.accuracy.asking import ServerGone
from draftproof.accuracy.compare import compare_command
from draftproof.accuracy.history import last_good_command, mend_command
from draftproof.accuracy.lanes import Lane, list_command, load_lane, overrides
from draftproof.accuracy.outputs import (
    Case,
    JsonOption,
    JUnitOption,
    Outputs,
    SummaryOption,
    markdown_of,
)
from draftproof.accuracy.prompts import PromptError
from draftproof.accuracy.protocol import ServerFailed, ServerUnfit
from draftproof.accuracy.qualify import qualify_command
from draftproof.accuracy.questions import DataError
from draftproof.accuracy.receipt import without_userinfo
from draftproof.accuracy.repeat import repeat_command
from draftproof.accuracy.report import write_run_summary
from draftproof.accuracy.run import Interrupted, Outcome, RunOptions, run_lane
from draftproof.accuracy.runfolder import FolderError
from draftproof.accuracy.runs import NO_MEASUREMENT
from draftproof.accuracy.throughput import throughput_command

RUN_SCHEMA = "draftproof.accuracy-run/1"
# The key of the second server of a plan, where it is another one.
_KEY_B = "OPENAI_API_KEY_B"

app = typer.Typer(
    name="accuracy",
    help="Does the model behind a server still answer as well?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("list")(list_command)
app.command("compare")(compare_command)
app.command("last-good")(last_good_command)
app.command("mend")(mend_command)
app.command("repeat")(repeat_command)
app.command("throughput")(throughput_command)
app.command("qualify")(qualify_command)


def main() -> None:
    """Run the accuracy commands on their own."""
    app(prog_name="draftproof accuracy")


@app.command("run")
def run_command(
    lane: Annotated[str, typer.Argument(help="A lane's name, or the path of a lane file.")],
    base_url: Annotated[
        list[str],
        typer.Option(help="The server, with or without /v1; two of them with --plan."),
    ],
    model: Annotated[
        list[str],
        typer.Option(
            help="Model id; needed if the server lists more than one. Two of them: one per server."
        ),
    ] = [],  # noqa: B006 - Typer's way to say "none by default"
    api_key: Annotated[
        list[str],
        typer.Option(
            help="Sent as a bearer token [env var: OPENAI_API_KEY]. Two servers take one each, "
            f"'' for none [second: {_KEY_B}]."
        ),
    ] = [],  # noqa: B006
    data: Annotated[
        Path | None, typer.Option(help="Read the lane's data set from this JSONL.")
    ] = None,
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Make it a modified lane; repeatable."),
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Where new run folders go.")] = Path(".draftproof/runs"),
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run folder; ask nothing twice.")
    ] = None,
    resume_anyway: Annotated[
        Path | None,
        typer.Option(help="The same though the server's build changed: it will be no measurement."),
    ] = None,
    label: Annotated[
        list[str],
        typer.Option(help="What you call this run, in every report. Two of them: one per server."),
    ] = [],  # noqa: B006
    max_minutes: Annotated[
        float | None, typer.Option(help="End a run as incomplete after so long.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="An unproven protocol is no measurement.")
    ] = False,
    order_seed: Annotated[
        int | None, typer.Option(min=0, help="Ask the questions in the order of this seed.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="ABBA", help="Order of several runs on servers A and B."),
    ] = None,
    json_file: JsonOption = None,
    junit_file: JUnitOption = None,
    summary_file: SummaryOption = None,
) -> None:
    """Ask a server a lane's questions and say how many it answers rightly.

    Exit 0: a measurement. 2: bad usage or input. 3: an error of our own. 4: not a measurement.
    """
    outputs = Outputs(json_file, junit_file, summary_file)
    try:
        asked = load_lane(lane).modified(overrides(changes))
        arms = _arms(plan, base_url, model, api_key, label)
        if max_minutes is not None and not 0 < max_minutes < float("inf"):
            raise ValueError(f"--max-minutes: must be above 0, got {max_minutes:g}")
        if resume is not None and resume_anyway is not None:
            raise ValueError("--resume: is given beside --resume-anyway; give one of them")
        if plan is not None and (resume or resume_anyway):
            raise ValueError(f"--plan: starts new runs, and --resume goes on, got {resume}")
        first = arms["A"]
        options = RunOptions(
            lane=asked,
            base_url=first.base_url,
            model=first.model,
            api_key=first.api_key,
            data=data,
            out=out,
            resume=resume or resume_anyway,
            takes_other_build=resume_anyway is not None,
            order_seed=order_seed,
            is_strict=strict,
            label=first.label,
            max_minutes=max_minutes,
            secrets=frozenset(arm.api_key for arm in arms.values() if arm.api_key),
            command=sys.argv,
        )
        if plan is None:
            runs = [_run(options, outputs)]
        elif first.base_url == arms["B"].base_url:
            raise typer.Exit(_tell_plan(plan))
        else:
            runs = _run_plan(options, arms, plan, outputs)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        runs = [Ran(None, 2, f"error: {error}")]
    code = max(run.code for run in runs)
    try:
        _write(outputs, lane, runs, code)
    except OSError as error:
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


@dataclass(frozen=True)
class Arm:
    """One server of a plan: where it is, and what it is asked with."""

    base_url: str
    model: str | None
    api_key: str | None
    label: str | None


@dataclass(frozen=True)
class Ran:
    """What came of one run: its outcome if there is one, its exit code, and what is said of it."""

    outcome: Outcome | None
    code: int
    text: str


def _arms(
    plan: str | None, base_url: list[str], model: list[str], api_key: list[str], label: list[str]
) -> dict[str, Arm]:
    """Say what belongs to server A and to server B; a plan may have the same for both."""
    if plan is None and len(base_url) != 1:
        raise ValueError(f"--base-url: several servers need --plan, got {base_url}")
    if plan is not None and (not plan or set(plan) != {"A", "B"}):
        raise ValueError(f"--plan: must be A and B in some order, such as ABBA, got {plan!r}")
    if len(base_url) > 2:
        raise ValueError(f"--plan: needs one server or two, got {base_url}")
    for option, given in (("--model", model), ("--api-key", api_key), ("--label", label)):
        if len(given) > len(base_url):
            raise ValueError(f"{option}: is given {len(given)} times for {len(base_url)} servers")
    servers = [base_url[0], base_url[-1]]
    keys: list[str | None] = [*api_key]
    if not keys:
        keys = [os.environ.get("OPENAI_API_KEY")]
        if not _is_same_server(*servers):
            keys.append(os.environ.get(_KEY_B))
    if len(keys) == 1 and not _is_same_server(*servers):
        # One's key is none of the other's business.
        raise ValueError("--api-key: two servers take one each ('' for none), got one")
    return {
        name: Arm(
            servers[n],
            model[min(n, len(model) - 1)] if model else None,
            keys[min(n, len(keys) - 1)] or None,
            label[min(n, len(label) - 1)] if label else None,
        )
        for n, name in enumerate("AB")
    }


def _is_same_server(one: str, other: str) -> bool:
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.netloc) == (second.scheme, second.netloc)


def _tell_plan(plan: str) -> int:
    """Say the order of a plan whose arms are one server."""
    typer.echo("one server: start arm A or B on it before each run, in this order")
    for number, arm in enumerate(plan, start=1):
        typer.echo(f"{number}. {arm}: the same command without --plan")
    typer.echo("then: draftproof accuracy compare A1,A2 B1,B2, with the runs' folders")
    return 0


def _run_plan(options: RunOptions, arms: dict[str, Arm], plan: str, outputs: Outputs) -> list[Ran]:
    """Run both arms in the plan's order; the first run that is no measurement ends it."""
    folders: dict[str, list[Path]] = {"A": [], "B": []}
    runs = []
    for name in plan:
        arm = arms[name]
        typer.echo(f"arm {name}: {without_userinfo(arm.base_url)}", err=True)
        ran = _run(dataclasses.replace(options, **dataclasses.asdict(arm)), outputs)
        runs.append(ran)
        if ran.outcome is None or ran.code:
            typer.echo(f"the plan ends here: run {name} is not a measurement", err=True)
            return runs
        folders[name].append(ran.outcome.folder)
    names = " ".join(",".join(map(str, folders[arm])) for arm in "AB")
    typer.echo(f"to compare: draftproof accuracy compare {names}", err=outputs.holds_stdout)
    return runs


def _run(options: RunOptions, outputs: Outputs) -> Ran:
    """Run once and say what came out."""
    try:
        outcome = run_lane(options, Console(stderr=True))
    except (ServerFailed, ServerGone, Interrupted) as error:
        text = f"not a measurement: {error}"
        typer.echo(text, err=True)
        return Ran(None, NO_MEASUREMENT, text)
    except (DataError, FolderError, PromptError, ServerUnfit):
        raise
    except Exception as error:
        # Whatever else it is, a ValueError of some library among it, is no fault of the input.
        traceback.print_exc()
        return Ran(None, 3, f"internal error: {type(error).__name__}: {error}")
    if outcome.result["status"] == "complete":
        write_run_summary(outcome.folder)
    text = "\n".join(summary(options.lane, outcome))
    typer.echo(text, err=outputs.holds_stdout)
    return Ran(outcome, 0 if outcome.result["measurement"] else NO_MEASUREMENT, text)


def _write(outputs: Outputs, lane: str, runs: list[Ran], code: int) -> None:
    told = [
        {
            "schema": RUN_SCHEMA,
            "exit_code": ran.code,
            "folder": str(ran.outcome.folder) if ran.outcome else None,
            "reason": None if ran.outcome else ran.text,
            "result": ran.outcome.result if ran.outcome else None,
        }
        for ran in runs
    ]
    plan = {"schema": "draftproof.accuracy-plan/1", "exit_code": code, "runs": told}
    cases = [
        Case(f"run {lane}", ran.text, error=None if ran.code == 0 else _verdict(ran))
        for ran in runs
    ]
    markdown = "\n\n".join(
        markdown_of(f"Accuracy: {lane}", _verdict(ran), ran.text.splitlines()) for ran in runs
    )
    outputs.write(told[0] if len(told) == 1 else plan, cases, markdown)


def _verdict(ran: Ran) -> str:
    """The one line that says what came of a run."""
    if ran.outcome is None:
        return ran.text
    return summary_head(ran.outcome.result)


def summary_head(result: dict[str, Any]) -> str:
    """The score with its interval and its doubts, or that it is no measurement and why."""
    if not result["measurement"]:
        return f"not a measurement: {'; '.join(result['not_a_measurement'])}"
    interval = result["interval"]
    doubts = f"; BUT {'; '.join(result['doubts'])}" if result["doubts"] else ""
    low, high = 100 * interval["low"], 100 * interval["high"]
    return (
        f"score {100 * result['score']:.2f}% ({result['counts']['correct']} of "
        f"{result['counts']['planned']}), {100 * interval['level']:g}% interval "
        f"{low:.2f} to {high:.2f} ({interval['method']}){doubts}"
    )


def summary(lane: Lane, outcome: Outcome) -> list[str]:
    """Say in a few lines what a run found; no score unless it is a measurement."""
    result = outcome.result
    counts: dict[str, Any] = result["counts"]
    lines = [f"lane {lane.name}" + (f", label {result['label']}" if result["label"] else "")]
    if result["measurement"]:
        lines.append(summary_head(result))
        lines += [
            f"{name} {100 * value:.2f}%"
            for name, value in result["metrics"].items()
            if name.startswith(("pass@", "majority@", "score_")) and name != "pass@1"
        ]
    else:
        lines += [f"not a measurement: {reason}" for reason in result["not_a_measurement"]]
    lines.append(
        f"planned {counts['planned']}, landed {counts['landed']}: correct {counts['correct']}, "
        f"wrong {counts['wrong']}, no answer {counts['no_answer']}, empty {counts['empty']}, "
        f"truncated {counts['truncated']}, stopped by a stop word {counts['stopped_by_word']}, "
        f"odd ends {_of_kinds(counts['odd_ends'])}, errors {_of_kinds(counts['errors'])}"
    )
    paused = f", {counts['paused_s']:.1f} s of pauses for a busy server" * bool(counts["paused_s"])
    lines.append(
        f"attempts {counts['attempts']}, asked again {_of_kinds(counts['retried'])}{paused}"
    )
    if result["accept_length"] is not None:
        lines.append(f"accept length {result['accept_length']:.3f}")
    lines += [f"note: {flag}" for flag in result["flags"]]
    if result["resumable"]:
        lines.append(f"to go on: the same command with --resume {outcome.folder}")
    lines.append(f"result: {outcome.folder / runfolder.RESULT}")
    return lines


def _of_kinds(counts: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    return f"{sum(counts.values())}{f' ({kinds})' if kinds else ''}"
