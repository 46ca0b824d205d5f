"""Command line of the accuracy lanes: `draftproof accuracy list | run | compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from draftproof.accuracy import runfolder
from draftproof.accuracy.lanes import Lane, list_command, load_lane
from draftproof.accuracy.protocol import ServerFailed
from draftproof.accuracy.run import Interrupted, Outcome, RunOptions, run_lane
from rich.console import Console

app = typer.Typer(
    name="accuracy",
    help="Does the model behind a server still answer as well?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("list")(list_command)


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
        chosen = load_lane(lane).modified(_changes(changes))
        if plan is not None:
            if resume is not None:
                raise ValueError(f"--plan: starts new runs, and --resume goes on, got {resume}")
            arms = _arms(plan, base_url)
            code = _run_plan(chosen, arms, base_url, out, model, api_key, data, strict, order_seed)
            raise typer.Exit(code)
        if len(base_url) != 1:
            raise ValueError(f"--base-url: several servers need --plan, got {base_url}")
        options = RunOptions(
            chosen, base_url[0], model, api_key, data, out, resume, order_seed, strict, sys.argv
        )
        raise typer.Exit(_run(options))
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


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


def _run(options: RunOptions) -> int:
    """Run once and say what came out; the exit code."""
    try:
        outcome = run_lane(options, Console(stderr=True))
    except (ServerFailed, Interrupted) as error:
        typer.echo(f"not a measurement: {error}", err=True)
        return 1
    typer.echo("\n".join(summary(options.lane, outcome)))
    return 0 if outcome.result["measurement"] else 1


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
