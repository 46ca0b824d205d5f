"""Command line of the accuracy lanes: `draftproof accuracy list | run | compare`."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from draftproof.accuracy import runfolder
from draftproof.accuracy.asking import ServerGone
from draftproof.accuracy.compare import compare_command
from draftproof.accuracy.lanes import Lane, list_command, load_lane
from draftproof.accuracy.prompts import PromptError
from draftproof.accuracy.protocol import ServerFailed, ServerUnfit
from draftproof.accuracy.questions import DataError
from draftproof.accuracy.receipt import without_userinfo
from draftproof.accuracy.report import write_run_summary
from draftproof.accuracy.run import Interrupted, Outcome, RunOptions, run_lane
from draftproof.accuracy.runfolder import FolderError

app = typer.Typer(
    name="accuracy",
    help="Does the model behind a server still answer as well?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("list")(list_command)
app.command("compare")(compare_command)


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
        str | None, typer.Option(help="Model id; needed if the server lists more than one.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Read the lane's data set from this JSONL.")
    ] = None,
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Make it a modified lane; repeatable."),
    ] = [],  # noqa: B006 - Typer's way to say "none by default"
    out: Annotated[Path, typer.Option(help="Where new run folders go.")] = Path(".draftproof/runs"),
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run folder; ask nothing twice.")
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
) -> None:
    """Ask a server a lane's questions and say how many it answers rightly.

    Exit 0: a measurement. 1: not a measurement. 2: bad usage or input. 3: an error of our own.
    """
    try:
        options = RunOptions(
            lane=load_lane(lane).modified(_changes(changes)),
            base_url=base_url[0],
            model=model,
            api_key=api_key,
            data=data,
            out=out,
            resume=resume,
            takes_other_build=False,
            order_seed=order_seed,
            is_strict=strict,
            label=None,
            max_minutes=None,
            secrets=frozenset(),
            command=sys.argv,
        )
        if plan is None:
            if len(base_url) != 1:
                raise ValueError(f"--base-url: several servers need --plan, got {base_url}")
            _, code = _run(options)
        elif resume is not None:
            raise ValueError(f"--plan: starts new runs, and --resume goes on, got {resume}")
        else:
            code = _run_plan(options, _arms(plan, base_url), plan)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


def _changes(given: list[str]) -> dict[str, str]:
    changes = {}
    for change in given:
        field, equals, value = change.partition("=")
        if not equals or not field:
            raise ValueError(f"--set: must be FIELD=VALUE, got {change!r}")
        if field in changes:
            raise ValueError(f"--set: {field} is set twice")
        changes[field] = value
    return changes


def _arms(plan: str, base_url: list[str]) -> dict[str, str]:
    """Map A and B to their servers; a plan for one server at a time has the same for both."""
    if not plan or set(plan) != {"A", "B"}:
        raise ValueError(f"--plan: must be A and B in some order, such as ABBA, got {plan!r}")
    if len(base_url) > 2:
        raise ValueError(f"--plan: needs one server or two, got {base_url}")
    return {"A": base_url[0], "B": base_url[-1]}


def _run_plan(options: RunOptions, arms: dict[str, str], plan: str) -> int:
    """Run both arms in the plan's order, or say the order if both are the same server."""
    if arms["A"] == arms["B"]:
        typer.echo("one server: start arm A or B on it before each run, in this order")
        for number, arm in enumerate(plan, start=1):
            typer.echo(f"{number}. {arm}: the same command without --plan")
        typer.echo("then: draftproof accuracy compare A1,A2 B1,B2, with the runs' folders")
        return 0
    folders: dict[str, list[Path]] = {"A": [], "B": []}
    for arm in plan:
        typer.echo(f"arm {arm}: {without_userinfo(arms[arm])}", err=True)
        folder, code = _run(dataclasses.replace(options, base_url=arms[arm]))
        if folder is None or code:
            typer.echo(f"the plan ends here: run {arm} is not a measurement", err=True)
            return code
        folders[arm].append(folder)
    names = " ".join(",".join(map(str, folders[arm])) for arm in "AB")
    typer.echo(f"to compare: draftproof accuracy compare {names}")
    return 0


def _run(options: RunOptions) -> tuple[Path | None, int]:
    """Run once and say what came out; the run's folder, if one was made, and the exit code."""
    try:
        outcome = run_lane(options, Console(stderr=True))
    except (ServerFailed, ServerGone, Interrupted) as error:
        typer.echo(f"not a measurement: {error}", err=True)
        return None, 1
    except (DataError, FolderError, PromptError, ServerUnfit):
        raise
    except Exception:
        # Whatever else it is, a ValueError of some library among it, is no fault of the input.
        traceback.print_exc()
        return None, 3
    if outcome.result["status"] == "complete":
        write_run_summary(outcome.folder)
    typer.echo("\n".join(summary(options.lane, outcome)))
    return outcome.folder, 0 if outcome.result["measurement"] else 1


def summary(lane: Lane, outcome: Outcome) -> list[str]:
    """Say in a few lines what a run found; no score unless it is a measurement."""
    result = outcome.result
    counts: dict[str, Any] = result["counts"]
    lines = [f"lane {lane.name}"]
    if result["measurement"]:
        interval = result["interval"]
        lines.append(
            f"score {100 * result['score']:.2f}% ({counts['correct']} of {counts['planned']}), "
            f"{100 * interval['level']:g}% interval {100 * interval['low']:.2f} to "
            f"{100 * interval['high']:.2f} ({interval['method']})"
        )
        lines += [
            f"{name} {100 * value:.2f}%"
            for name, value in result["metrics"].items()
            if name.startswith(("pass@", "majority@", "score_")) and name != "pass@1"
        ]
    else:
        lines += [f"not a measurement: {reason}" for reason in result["not_a_measurement"]]
    errors = sum(counts["errors"].values())
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts["errors"].items())
    lines.append(
        f"planned {counts['planned']}, landed {counts['landed']}: correct {counts['correct']}, "
        f"wrong {counts['wrong']}, no answer {counts['no_answer']}, empty {counts['empty']}, "
        f"truncated {counts['truncated']}, stopped by a stop word {counts['stopped_by_word']}, "
        f"errors {errors}{f' ({kinds})' if kinds else ''}"
    )
    if result["accept_length"] is not None:
        lines.append(f"accept length {result['accept_length']:.3f}")
    lines += [f"note: {flag}" for flag in result["flags"]]
    if result["status"] == "incomplete":
        lines.append(f"to go on: the same command with --resume {outcome.folder}")
    lines.append(f"result: {outcome.folder / runfolder.RESULT}")
    return lines
