"""Is greedy output the same text each time? Asks fixed prompts under a grid of conditions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy import repeatability, runfolder
from draftproof.accuracy.asking import Asker, Pool, ServerGone, asking, now
from draftproof.accuracy.documents import Section, read_document
from draftproof.accuracy.outputs import JsonOption, Outputs, SummaryOption, markdown_of
from draftproof.accuracy.probing import (
    CHAT,
    Served,
    Server,
    cached_tokens,
    chat_body,
    default_timeouts,
    learn,
    one_client,
    parse_keys,
    parse_servers,
    require_same_build,
    tokens_of,
)
from draftproof.accuracy.protocol import ServerFailed
from draftproof.accuracy.reading import RequestFailed
from draftproof.accuracy.repeat_report import repeat_text, write_repeat
from draftproof.accuracy.repeatability import AXES, Gap, Parting, Row

SCHEMA = "draftproof.accuracy-repeat/1"
COMPLETIONS_FILE = "completions.jsonl"
FIXTURES_FILE = Path(__file__).with_name("repeat.yaml")

# Values of each axis of the grid, in the order in which they are asked.
GRID = {
    "load": ("before", "after"),
    "prefix": ("fresh", "reused"),
    "logprobs": ("without", "with"),
    "asking": ("serial", "concurrent"),
}
# Likeliest tokens asked for beside the chosen one: in completions, and where texts part.
_TOP = 5
_TOP_AT_PARTING = 20
# Times that the gap at a parting is asked for, each with another number of neighbours.
_ASKS_AT_PARTING = 8
# Partings of one fixture whose gap is asked for; all are counted.
_PARTINGS_ASKED = 4
# Tokens that both candidates may share behind the prefix, where a text without tokens is cut.
_STEPS_AT_PARTING = 8
# The conditioning load: other prompts, asked at once.
_LOAD_REQUESTS = 32
_LOAD_TOKENS = 32


class Fixture(Section):
    """One prompt; of a control also its one right answer."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    prompt: str
    max_tokens: Annotated[int, Field(ge=1)]
    pad_words: Annotated[int, Field(ge=0)] = 0
    right: str | None = None
    read: Literal["number", "exact"] = "exact"

    def is_right(self, text: str) -> bool | None:
        """Whether a control's answer is right; None of a prompt that is none."""
        if self.right is None:
            return None
        if self.read == "exact":
            return text.strip() == self.right
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace("\u2212", "-"))
        return bool(numbers) and numbers[-1] == self.right


class Fixtures(Section):
    """The file of fixtures."""

    padding: str
    fixtures: Annotated[list[Fixture], Field(min_length=1)]

    def prompt(self, fixture: Fixture) -> str:
        """The text that is sent."""
        words = self.padding.split()
        padding = itertools.islice(itertools.cycle(words), fixture.pad_words)
        return f"{' '.join(padding)}\n\n{fixture.prompt}".lstrip()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of every boot.

    Attributes
    ----------
    fixtures : Fixtures
    grid : dict of axis to values
    requests : int
        Of each fixture under each condition.
    concurrency : int
        Of `asking: concurrent` and of the conditioning load.
    """

    fixtures: Fixtures
    grid: dict[str, tuple[str, ...]]
    requests: int
    concurrency: int


def parse_grid(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read `--grid AXIS=VALUE,...` options; an axis that is not named keeps all its values.

    Raises
    ------
    ValueError
        If an axis or a value is not of the grid.
    """
    grid: dict[str, tuple[str, ...]] = dict(GRID)
    for text in given:
        axis, _, values = text.partition("=")
        if axis not in GRID:
            raise ValueError(f"--grid: no axis {axis!r}; there are {', '.join(GRID)}")
        asked = values.split(",")
        for value in asked:
            if value not in GRID[axis]:
                raise ValueError(f"--grid: {axis} has {', '.join(GRID[axis])}, got {value!r}")
        grid[axis] = tuple(value for value in GRID[axis] if value in asked)
    return grid


class _Boot:
    """One boot of one server while its conditions are asked."""

    def __init__(
        self, number: int, served: Served, asker: Asker, plan: Plan, keep: Callable[[Row], None]
    ) -> None:
        self.number = number
        self.served = served
        self.asker = asker
        self.plan = plan
        self._keep = keep
        self.started = now()
        self._salt = secrets.token_hex(8)

    async def ask_phase(self, load: str) -> None:
        """Ask all conditions of one phase, before or after the load."""
        grid = self.plan.grid
        for prefix, logprobs, how in itertools.product(
            grid["prefix"], grid["logprobs"], grid["asking"]
        ):
            condition = dict(zip(AXES, (load, prefix, logprobs, how), strict=True))
            for fixture in self.plan.fixtures.fixtures:
                await self._ask_cell(fixture, condition)

    async def _ask_cell(self, fixture: Fixture, condition: dict[str, str]) -> None:
        if condition["prefix"] == "reused":
            # What reuses needs something to reuse: one request that is not counted.
            await self.asker.ask(CHAT, self._body(fixture, condition, 0) | {"max_tokens": 1})
        workers = self.plan.concurrency if condition["asking"] == "concurrent" else 1

        async def ask(number: int) -> None:
            asked = await self.asker.ask(CHAT, self._body(fixture, condition, number), keeps=True)
            answer = asked.answer
            self._keep(
                {
                    "boot": self.number,
                    "started": self.started,
                    "label": self.served.server.label,
                    **condition,
                    "fixture": fixture.name,
                    "number": number,
                    "model": None if answer is None else answer.model,
                    "text": None if answer is None else answer.text or "",
                    "finish_reason": None if answer is None else answer.finish_reason,
                    "tokens": None if answer is None else tokens_of(answer),
                    "cached_tokens": None if answer is None else cached_tokens(answer),
                    "error": None if asked.failure is None else str(asked.failure),
                }
            )

        pool = Pool(range(self.plan.requests), ask, workers)
        await pool.run()
        if pool.stopped is not None:
            raise ServerGone(pool.stopped)

    def _body(self, fixture: Fixture, condition: dict[str, str], number: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        # A salt is a namespace of the prefix cache: of its own for each request, or one for all.
        if condition["prefix"] == "fresh":
            fields["cache_salt"] = f"{self._salt}-{secrets.token_hex(8)}"
        else:
            fields["cache_salt"] = self._salt
        if condition["logprobs"] == "with":
            fields |= {"logprobs": True, "top_logprobs": _TOP}
        prompt = self.plan.fixtures.prompt(fixture)
        return chat_body(self.served.model, prompt, fixture.max_tokens, **fields)

    async def load(self) -> None:
        """The conditioning load; what it answers is not looked at."""

        async def ask(number: int) -> None:
            prompt = f"Write a paragraph about the number {1000 + 7 * number}."
            await self.asker.ask(CHAT, chat_body(self.served.model, prompt, _LOAD_TOKENS))

        await Pool(range(_LOAD_REQUESTS), ask, self.plan.concurrency).run()

    async def gaps_at(
        self, fixture: Fixture, parting: Parting, reference: str
    ) -> tuple[tuple[str, str] | None, list[Gap]]:
        """Ask what this server thinks of both candidates at the place where two texts part."""
        candidates, prefix = parting.candidates, parting.prefix
        if candidates is None:
            # Only the texts are known: walk along the tokens that both share.
            candidates, prefix = await self._walk(fixture, parting, reference)
        if candidates is None:
            return None, []
        prompt = self.plan.fixtures.prompt(fixture)

        async def gap(number: int) -> float | None:
            # Alone, then with more and more neighbours: batches are what varies in service.
            neighbours = [
                self.asker.ask(CHAT, chat_body(self.served.model, prompt, 4))
                for _ in range(number % self.plan.concurrency)
            ]
            token, *_ = await asyncio.gather(self._next_token(prompt, prefix), *neighbours)
            return token and repeatability.gap_between(token, *candidates)

        told = [await gap(number) for number in range(_ASKS_AT_PARTING)]
        label = self.served.server.label
        return candidates, [
            Gap(self.number, label, "asked", value) for value in told if value is not None
        ]

    async def _walk(
        self, fixture: Fixture, parting: Parting, reference: str
    ) -> tuple[tuple[str, str] | None, str]:
        """Find both candidates from the likeliest tokens, from the last word that both share."""
        shared = parting.prefix
        prefix = shared[: max(shared.rfind(" "), 0)]
        rests = [text[len(prefix) :] for text in (reference, parting.text)]
        for _ in range(_STEPS_AT_PARTING):
            token = await self._next_token(self.plan.fixtures.prompt(fixture), prefix)
            if token is None:
                return None, prefix
            likely = [text for text, _ in token[2] if text]
            best = [
                max((text for text in likely if rest.startswith(text)), key=len, default=None)
                for rest in rests
            ]
            if best[0] is None or best[1] is None:
                return None, prefix
            if best[0] != best[1]:
                return (best[0], best[1]), prefix
            prefix += best[0]
            rests = [rest[len(best[0]) :] for rest in rests]
        return None, prefix

    async def _next_token(self, prompt: str, prefix: str) -> list[Any] | None:
        """The token that the server would say behind a prefix, with its likeliest others."""
        messages = [{"role": "user", "content": prompt}]
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": _TOP_AT_PARTING}
        if prefix:
            messages.append({"role": "assistant", "content": prefix})
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        asked = await self.asker.ask(
            CHAT, chat_body(self.served.model, messages, 1, **fields), keeps=True
        )
        tokens = None if asked.answer is None else tokens_of(asked.answer)
        return tokens[0] if tokens else None


async def ask_boots(
    servers: Sequence[Server],
    model: str | None,
    api_keys: dict[str, str | None],
    plan: Plan,
    folder: Path,
    say: Callable[[str], Any],
) -> None:
    """Ask one boot of each server, and append what they said to a folder.

    Raises
    ------
    ValueError
        If the folder holds another plan, or a server is unfit.
    ServerFailed, ServerGone
        If a server fails.
    """
    with contextlib.ExitStack() as files:
        files.enter_context(one_client(folder))
        receipt = _open_receipt(folder, plan)
        rows = read_completions(folder) if receipt["boots"] else []
        out = files.enter_context((folder / COMPLETIONS_FILE).open("a", encoding="utf-8"))

        def keep(row: Row) -> None:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            rows.append(row)

        async with contextlib.AsyncExitStack() as stack:
            boots: list[_Boot] = []
            for server in servers:
                key, timeouts = api_keys[server.label], default_timeouts()
                # Neighbours at a parting are requests beside the one that is looked at.
                asker = await stack.enter_async_context(
                    asking(server.url, key, timeouts, plan.concurrency + 1)
                )
                served = await learn(asker, server, model)
                number = len(receipt["boots"]) + len(boots)
                boots.append(_Boot(number, served, asker, plan, keep))
            for load in plan.grid["load"]:
                for boot in boots:
                    if load == "after":
                        await boot.load()
                    await boot.ask_phase(load)
                    say(f"boot {boot.number} ({boot.served.server.label}): {load} load, asked")
            receipt["boots"] += [
                receipts.redact(
                    {
                        "boot": boot.number,
                        "started": boot.started,
                        **boot.served.receipt(),
                        **receipts.environment(),
                    },
                    frozenset(key for key in api_keys.values() if key),
                )
                for boot in boots
            ]
            receipt["gaps"] += await _ask_gaps(boots, plan, rows)
            for boot in boots:
                await require_same_build(boot.asker, boot.served)
        runfolder.write_json(folder / runfolder.RECEIPT, receipt)


async def _ask_gaps(
    boots: Sequence[_Boot], plan: Plan, rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Ask every boot for the gap at each parting of all texts so far."""
    found = []
    for fixture in plan.fixtures.fixtures:
        some = [row for row in repeatability.answered(rows) if row["fixture"] == fixture.name]
        texts = [text for text, _ in repeatability.distinct(some)]
        for other in texts[1 : 1 + _PARTINGS_ASKED]:
            parting = repeatability.parting(some, texts[0], other)
            for boot in boots:
                candidates, gaps = await boot.gaps_at(fixture, parting, texts[0])
                found += [
                    {
                        "fixture": fixture.name,
                        "reference": texts[0],
                        "other": other,
                        "candidates": candidates,
                        **gap._asdict(),
                    }
                    for gap in gaps
                ]
    return found


def _open_receipt(folder: Path, plan: Plan) -> dict[str, Any]:
    stated = {
        "fixtures": plan.fixtures.model_dump(mode="json"),
        "grid": {axis: list(values) for axis, values in plan.grid.items()},
        "requests": plan.requests,
        "concurrency": plan.concurrency,
    }
    path = folder / runfolder.RECEIPT
    if not path.exists():
        return {"schema": SCHEMA, "plan": stated, "boots": [], "gaps": []}
    receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in stated.items():
        if receipt["plan"][name] != value:
            raise ValueError(f"--join: {folder} was asked with another plan: {name} differs")
    return receipt


def read_completions(folder: Path) -> list[Row]:
    """Read the rows of the boots that the folder's receipt names.

    Raises
    ------
    ValueError
        If it holds none.
    """
    try:
        receipt = json.loads((folder / runfolder.RECEIPT).read_text(encoding="utf-8"))
        lines = (folder / COMPLETIONS_FILE).read_text(encoding="utf-8").splitlines()
        # A boot that was broken off left rows under the number that the next one took.
        whole = {(boot["boot"], boot["started"]) for boot in receipt["boots"]}
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if (row["boot"], row["started"]) in whole]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: holds no repeat measurement: {error}") from error


def summarise(rows: Sequence[Row], receipt: dict[str, Any]) -> dict[str, Any]:
    """Sum up what all boots said, by fixture.

    Returns
    -------
    dict
        `spreads` per label; per fixture its distinct texts with counts, the conditions, the
        partings (place, candidates, gaps, kind), agreement of the boots, and for a control how
        many answers are right; `parity` where there are several labels.
    """
    spreads = repeatability.spreads(rows)
    labels = list(dict.fromkeys(boot["label"] for boot in receipt["boots"]))
    # An arm whose spread is not known lends none to the others.
    asked = _spread_of_asked(receipt["gaps"])
    widest = {
        label: max(spreads.get(label, 0.0), asked.get(label, 0.0))
        for label in labels
        if label in spreads or label in asked
    }
    spread = max(widest.values(), default=0.0)
    fixtures, all_partings = [], []
    for content in receipt["plan"]["fixtures"]["fixtures"]:
        fixture = Fixture.model_validate(content)
        some = [row for row in rows if row["fixture"] == fixture.name]
        good = repeatability.answered(some)
        texts = repeatability.distinct(good)
        partings = [
            _parting(good, texts[0][0], other, receipt["gaps"], fixture.name, spread)
            for other, _ in texts[1:]
        ]
        all_partings += partings
        right = [fixture.is_right(row["text"]) for row in good]
        fixtures.append(
            {
                "fixture": fixture.name,
                "requests": len(some),
                "failed": len(some) - len(good),
                "texts": [{"text": text, "count": count} for text, count in texts],
                "right": None if fixture.right is None else sum(map(bool, right)),
                "partings": partings,
                "boots": repeatability.boot_agreement(good),
                "cells": repeatability.cells(some),
            }
        )
    failed = sum(row["error"] is not None for row in rows)
    return {
        "schema": SCHEMA,
        "plan": {name: receipt["plan"][name] for name in ("grid", "requests", "concurrency")},
        "boots": [
            {name: boot[name] for name in ("boot", "label", "base_url", "model")}
            for boot in receipt["boots"]
        ],
        "spreads": widest,
        "fixtures": fixtures,
        "parity": repeatability.parity(all_partings, failed) if len(labels) > 1 else None,
        "flags": _flags(rows, receipt, widest, labels),
    }


def _spread_of_asked(gaps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Widest range of an arm's repeated asks at one parting."""
    grouped: dict[tuple[str, str, str, str], list[float]] = {}
    for gap in gaps:
        key = (gap["label"], gap["fixture"], gap["reference"], gap["other"])
        grouped.setdefault(key, []).append(gap["value"])
    widest: dict[str, float] = {}
    for (label, *_), values in grouped.items():
        widest[label] = max(widest.get(label, 0.0), max(values) - min(values))
    return widest


def _parting(
    rows: Sequence[Row],
    reference: str,
    other: str,
    asked: Sequence[dict[str, Any]],
    fixture: str,
    spread: float,
) -> dict[str, Any]:
    found = repeatability.parting(rows, reference, other)
    told = [
        gap
        for gap in asked
        if gap["fixture"] == fixture and {gap["reference"], gap["other"]} == {reference, other}
    ]
    # A later boot may have made another text the most frequent: then the signs turn.
    found.gaps.extend(
        Gap(
            gap["boot"],
            gap["label"],
            gap["how"],
            gap["value"] if gap["reference"] == reference else -gap["value"],
        )
        for gap in told
    )
    candidates = found.candidates
    if candidates is None and told:
        one, two = told[0]["candidates"]
        candidates = (one, two) if told[0]["reference"] == reference else (two, one)
    return {
        "text": other,
        "count": found.count,
        "labels": sorted({row["label"] for row in rows if row["text"] == other}),
        "characters": found.characters,
        "token": found.token,
        "candidates": candidates,
        "gaps": [gap._asdict() for gap in found.gaps],
        "medians": found.medians(),
        "kind": found.kind(spread),
    }


def _flags(
    rows: Sequence[Row], receipt: dict[str, Any], spreads: dict[str, float], labels: list[str]
) -> list[str]:
    flags = []
    for label in labels:
        if label not in spreads:
            flags.append(
                f"{label}: no spread is known (no two completions with log probabilities shared a "
                "prefix), so no parting can be called a near tie for its sake"
            )
    for value, wanted in (("fresh", 0), ("reused", 1)):
        cached = [row["cached_tokens"] for row in rows if row["prefix"] == value]
        told = [count for count in cached if count is not None]
        if cached and not told:
            flags.append(f"unproven: prefix {value} (the server does not tell cached tokens)")
        elif wanted == 0 and any(told):
            flags.append(f"prefix fresh was not fresh: up to {max(told)} tokens came from a cache")
        elif wanted == 1 and told and not any(told):
            flags.append("prefix reused was never reused: no token came from a cache")
    for boot in receipt["boots"]:
        named = {row["model"] for row in rows if row["boot"] == boot["boot"] and row["model"]}
        if named - {boot["model"]}:
            flags.append(
                f"boot {boot['boot']}: answers name {sorted(named)}, not {boot['model']!r}"
            )
        if boot["simulated_acceptance"]:
            flags.append(
                f"{boot['label']}: simulated acceptance ({boot['simulated_acceptance']}): its "
                "texts are not the model's"
            )
    return flags


def repeat_command(
    server: Annotated[
        list[str],
        typer.Option(
            "--server",
            "--servers",
            "--base-url",
            metavar="[LABEL=]URL,...",
            help="A server; several are arms (speculation off, on).",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Model id, if a server lists several.")] = None,
    api_key: Annotated[
        list[str],
        typer.Option(metavar="[LABEL=]KEY", help="Sent as a bearer token, to its arm alone."),
    ] = [],  # noqa: B006 - Typer's way to say "none by default"
    requests: Annotated[
        int, typer.Option(min=2, help="Of each fixture under each condition.")
    ] = 20,
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="AXIS=VALUE,...", help="Only these; axes load, prefix, logprobs, asking."
        ),
    ] = [],  # noqa: B006
    concurrency: Annotated[int, typer.Option(min=2, help="Of concurrent asking.")] = 8,
    fixtures: Annotated[
        Path, typer.Option(help="Prompts and controls of your own.")
    ] = FIXTURES_FILE,
    out: Annotated[Path, typer.Option(help="Where new folders go.")] = Path(".draftproof/repeat"),
    join: Annotated[
        Path | None, typer.Option(help="Add a boot to this folder, after a restart.")
    ] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="Exit 1 unless texts are equal up to near ties.")
    ] = False,
    json_file: JsonOption = None,
    summary_file: SummaryOption = None,
) -> None:
    """Is greedy output the same text each time, and if not, where does it part?

    One call asks one boot of each server; restart and --join for the next, A B B A. Exit 0: told.
    1: with --parity, texts that part beyond near ties, or where that is not told. 2: bad usage or
    input. 4: no measurement.
    """
    try:
        servers = parse_servers(server)
        if parity and len(servers) < 2 and join is None:
            raise ValueError(f"--parity: needs two arms, got {server}")
        plan = Plan(read_document(Fixtures, fixtures), parse_grid(grid), requests, concurrency)
        keys = parse_keys(api_key, servers)
        folder = join or runfolder.unique(out, "repeat")
        say = functools.partial(typer.echo, err=True)
        asyncio.run(ask_boots(servers, model, keys, plan, folder, say))
        receipt = json.loads((folder / runfolder.RECEIPT).read_text(encoding="utf-8"))
        summary = summarise(read_completions(folder), receipt)
        runfolder.write_json(folder / runfolder.RESULT, summary)
        write_repeat(summary, folder)
        outputs = Outputs(json=json_file, summary=summary_file)
        lead, *lines = repeat_text(summary).splitlines()
        outputs.write(summary, [], markdown_of("Repeatability", lead, lines))
    except (RequestFailed, ServerFailed, ServerGone, KeyboardInterrupt) as error:
        typer.echo(f"not a measurement: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(4) from error
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(repeat_text(summary), err=outputs.holds_stdout)
    typer.echo(f"result: {folder / runfolder.RESULT}", err=outputs.holds_stdout)
    if all(one["failed"] == one["requests"] for one in summary["fixtures"]):
        typer.echo("not a measurement: every request failed", err=True)
        raise typer.Exit(4)
    if parity and summary["parity"] is None:
        typer.echo(f"error: --parity: needs two arms, {folder} has one", err=True)
        raise typer.Exit(2)
    if parity and summary["parity"] not in ("equal", "equal up to near ties"):
        raise typer.Exit(1)
