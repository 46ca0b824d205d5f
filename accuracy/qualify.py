"""Bounded serving qualification: a list of gates in a YAML file, each pass, fail or not run."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy import runfolder
from draftproof.accuracy.asking import ServerGone, asking, now
from draftproof.accuracy.documents import Section, read_document
from draftproof.accuracy.gates import Bench, Failed, Gate, NotRun, Outcome, Reference
from draftproof.accuracy.lanes import Timeouts
from draftproof.accuracy.outputs import (
    Case,
    JsonOption,
    JUnitOption,
    Outputs,
    SummaryOption,
    markdown_of,
)
from draftproof.accuracy.probing import Server, default_timeouts, learn, parse_keys, parse_servers
from draftproof.accuracy.protocol import ServerFailed
from draftproof.accuracy.reading import RequestFailed
from draftproof.accuracy.report import Page, write_page
from draftproof.accuracy.report import Section as ReportSection

SCHEMA = "draftproof.accuracy-qualify/1"
QUALIFICATIONS_DIR = Path(__file__).with_name("qualifications")

# Requests under way at most; gates state their own concurrency below it.
_CONNECTIONS = 256


class Qualification(Section):
    """A file of gates."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    description: str
    timeouts: Timeouts = default_timeouts()
    gates: Annotated[list[Gate], Field(min_length=1)]


def qualification_names() -> list[str]:
    """Names of the qualifications that come with the package."""
    return sorted(path.stem for path in QUALIFICATIONS_DIR.glob("*.yaml"))


def load_qualification(name_or_path: str) -> Qualification:
    """Load a qualification by name or from a YAML file.

    Raises
    ------
    ValueError
        One line that names the file, the field and the value.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path).expanduser()
    elif name_or_path in qualification_names():
        path = QUALIFICATIONS_DIR / f"{name_or_path}.yaml"
    else:
        raise ValueError(
            f"qualification: no {name_or_path!r}; there are {', '.join(qualification_names())}, "
            "or give the path of a YAML file"
        )
    found = read_document(Qualification, path)
    names = [gate.name for gate in found.gates]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: gates: the name {name!r} is given twice")
    return found


async def qualify(
    qualification: Qualification,
    references: Path,
    server: Server,
    model: str | None,
    api_key: str | None,
    max_minutes: float | None,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Run all gates, one after the other.

    Parameters
    ----------
    references : Path
        Folder of stored references.
    max_minutes : float or None
        Bound of all gates together: what has not begun by then is not run.

    Returns
    -------
    dict
        `gates`: name, kind, status, reason, seconds and details of each; `counts` by status; the
        server, redacted.

    Raises
    ------
    ServerUnfit, ServerFailed, ServerGone
        If the server cannot be asked at all.
    """
    started, start_s = now(), time.monotonic()
    end_s = None if max_minutes is None else start_s + 60 * max_minutes
    gates: list[dict[str, Any]] = []
    async with asking(server.url, api_key, qualification.timeouts, _CONNECTIONS) as asker:
        served = await learn(asker, server, model)
        bench = Bench(asker, served, references)
        for gate in qualification.gates:
            began_s = time.monotonic()
            left_s = 60 * gate.max_minutes
            if end_s is not None:
                left_s = min(left_s, end_s - began_s)
            if asker.gone is not None:
                outcome = Outcome("not run", asker.gone)
            elif left_s <= 0:
                outcome = Outcome("not run", f"--max-minutes: {max_minutes:g} are over")
            else:
                outcome = await _run(gate, bench, left_s)
            seconds = time.monotonic() - began_s
            gates.append(
                {
                    "gate": gate.name,
                    "kind": gate.kind,
                    "status": outcome.status,
                    "reason": outcome.reason,
                    "seconds": seconds,
                    "details": outcome.details,
                }
            )
            say(f"{gate.name}: {outcome.status}: {outcome.reason} ({seconds:.1f} s)")
    content = {
        "schema": SCHEMA,
        "qualification": qualification.model_dump(mode="json"),
        "started": started,
        "ended": now(),
        "server": served.receipt(),
        "counts": dict(Counter(gate["status"] for gate in gates)),
        "gates": gates,
        **receipts.environment(),
    }
    secrets = frozenset({api_key} if api_key else ())
    redacted: dict[str, Any] = receipts.redact(content, secrets)
    return redacted


async def _run(gate: Gate, bench: Bench, left_s: float) -> Outcome:
    try:
        return await asyncio.wait_for(gate.run(bench), left_s)
    except Failed as failed:
        return Outcome("failed", str(failed))
    except NotRun as not_run:
        return Outcome("not run", str(not_run))
    except ServerGone as gone:
        return Outcome("failed", str(gone))
    except asyncio.TimeoutError:
        # A hang of the server is its fault, as is being too slow for the bound that was set.
        return Outcome("failed", f"did not end within {left_s:.0f} s")


async def write_reference(
    qualification: Qualification,
    references: Path,
    server: Server,
    model: str | None,
    api_key: str | None,
) -> list[Path]:
    """Store what this server says as the reference of each gate that compares with one."""
    written = []
    async with asking(server.url, api_key, qualification.timeouts, _CONNECTIONS) as asker:
        bench = Bench(asker, await learn(asker, server, model), references)
        for gate in qualification.gates:
            if isinstance(gate, Reference):
                told = await gate.observe(bench)
                path = references / gate.file
                path.parent.mkdir(parents=True, exist_ok=True)
                runfolder.write_json(path, told)
                written.append(path)
    return written


def qualify_text(found: dict[str, Any]) -> str:
    """Write what came out as lines for a terminal."""
    return "\n".join(
        [
            _lead(found),
            *(f"{gate['gate']}: {gate['status']}: {gate['reason']}" for gate in found["gates"]),
        ]
    )


def _lead(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(found["counts"].items()))
    simulated = found["server"]["simulated_acceptance"]
    lead = f"{found['qualification']['name']} on {found['server']['model']}: {counts}"
    return f"{lead}; simulated acceptance: {simulated}" if simulated else lead


def write_qualification(found: dict[str, Any], folder: Path) -> None:
    """Write `summary.md` and `summary.html` into a folder."""
    gates = ReportSection(
        "Gates",
        ["What a server lacks is not run, and not passed."],
        ["gate", "kind", "status", "seconds", "reason"],
        [
            [gate["gate"], gate["kind"], gate["status"], f"{gate['seconds']:.1f}", gate["reason"]]
            for gate in found["gates"]
        ],
    )
    counts = found["counts"]
    tone = "bad" if counts.get("failed") else "good" if not counts.get("not run") else "unsure"
    write_page(Page("Serving qualification", _lead(found), tone, [gates], None), folder)


def _cases(found: dict[str, Any]) -> list[Case]:
    """The gates as lines of a JUnit file; one that is not run is no failure, and says so."""
    return [
        Case(
            f"{found['qualification']['name']} {gate['gate']}",
            f"{gate['status']}: {gate['reason']}",
            failure=gate["reason"] if gate["status"] == "failed" else None,
            seconds=gate["seconds"],
        )
        for gate in found["gates"]
    ]


def exit_code(counts: dict[str, int], is_strict: bool) -> int:
    """1 if a gate failed, or with `is_strict` was not run; 4 if none was run at all."""
    if counts.get("failed"):
        return 1
    if not counts.get("passed"):
        return 4
    return int(is_strict and bool(counts.get("not run")))


def qualify_command(
    qualification: Annotated[
        str, typer.Argument(help="Name of a qualification, or the path of a YAML file.")
    ],
    server: Annotated[
        str, typer.Option("--server", "--base-url", metavar="URL", help="The server.")
    ],
    model: Annotated[str | None, typer.Option(help="Model id, if it lists several.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token."),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Bound of all gates together; the rest is not run.")
    ] = None,
    references: Annotated[
        Path, typer.Option(help="Folder of the stored references that gates compare with.")
    ] = Path(".draftproof/references"),
    write: Annotated[
        bool,
        typer.Option("--write-reference", help="Store this server's answers as references."),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a gate was not run.")] = False,
    out: Annotated[Path, typer.Option(help="Where new folders go.")] = Path(".draftproof/qualify"),
    json_file: JsonOption = None,
    junit_file: JUnitOption = None,
    summary_file: SummaryOption = None,
) -> None:
    """Does a server serve: long prompts, boundaries, caches, tools, schemas, load, soak?

    Exit 0: no gate failed. 1: a gate failed. 2: bad usage or input. 4: nothing could be run.
    """
    try:
        if max_minutes is not None and max_minutes <= 0:
            raise ValueError(f"--max-minutes: must be above 0, got {max_minutes:g}")
        loaded = load_qualification(qualification)
        (one,) = parse_servers([server])
        key = parse_keys([api_key] if api_key else [], [one])[one.label]
        if write:
            for path in asyncio.run(write_reference(loaded, references, one, model, key)):
                typer.echo(f"reference: {path}")
            return
        say = functools.partial(typer.echo, err=True)
        found = asyncio.run(qualify(loaded, references, one, model, key, max_minutes, say))
        target = runfolder.unique(out, "qualify")
        runfolder.write_json(target / runfolder.RESULT, found)
        write_qualification(found, target)
        outputs = Outputs(json_file, junit_file, summary_file)
        lead, *lines = qualify_text(found).splitlines()
        outputs.write(found, _cases(found), markdown_of("Serving qualification", lead, lines))
    except (Failed, NotRun, RequestFailed, ServerFailed, ServerGone, KeyboardInterrupt) as error:
        typer.echo(f"not a measurement: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(4) from error
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(qualify_text(found), err=outputs.holds_stdout)
    typer.echo(f"result: {target / runfolder.RESULT}", err=outputs.holds_stdout)
    raise typer.Exit(exit_code(found["counts"], strict))
