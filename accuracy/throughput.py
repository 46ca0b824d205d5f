"""Decode throughput of one server or several arms: rounds, sweep, interleaving, receipts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy import runfolder
from draftproof.accuracy.asking import Asker, ServerGone, asking, now
from draftproof.accuracy.outputs import JsonOption, Outputs, SummaryOption, markdown_of
from draftproof.accuracy.probing import (
    COMPLETIONS,
    GENERATE,
    Served,
    Server,
    default_timeouts,
    learn,
    one_client,
    parse_keys,
    parse_servers,
    require_same_build,
)
from draftproof.accuracy.protocol import ServerFailed
from draftproof.accuracy.rates import Ratio, RoundRate, Timeline, overlap, ratio, spread
from draftproof.accuracy.reading import Answer, RequestFailed
from draftproof.accuracy.throughput_report import throughput_text, write_throughput
from draftproof.accuracy.workloads import DEFAULT_VOCABULARY, Workload, parse_lengths, random_ids
from draftproof.accuracy.workloads import texts as read_texts

SCHEMA = "draftproof.accuracy-throughput/1"
ROUNDS = "rounds.jsonl"

# GET answers on SGLang; vLLM has its own path, in its development mode only.
_FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")

# Without a count at each event so many of the tokens must have one; some tokens have no text.
_LEAST_EVENTS = 0.8


class NotMeasured(RuntimeError):
    """The server or its answers do not allow a measurement; nothing is said of its speed."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes
    ----------
    workload : Workload
    concurrency : list of int
        Users at a time, one sweep point each.
    rounds : int
        Kept rounds a launch and sweep point, behind one warm-up round that is not kept.
    """

    workload: Workload
    concurrency: list[int]
    rounds: int


@dataclass
class _Arm:
    """A server in one launch."""

    served: Served
    asker: Asker
    launch: str
    flush_path: str | None = None


async def measure(
    servers: Sequence[Server],
    model: str | None,
    api_keys: dict[str, str | None],
    plan: Plan,
    folder: Path,
    say: Any,
) -> None:
    """Measure one launch of each server, interleaved, and append its rounds to a folder.

    Parameters
    ----------
    servers : sequence of Server
    model : str or None
    api_keys : dict of label to str or None
    plan : Plan
    folder : Path
        New, or with rounds of earlier launches under the same plan.
    say : callable
        Takes a line of progress.

    Raises
    ------
    NotMeasured
        If a request fails or is put off, or an answer has not the length asked for.
    ValueError
        If the folder holds another plan, or a server is unfit.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(one_client(folder))
        stack.enter_context(_frozen_garbage())
        receipt = _open_receipt(folder, plan)
        arms = []
        for server in servers:
            asker = await stack.enter_async_context(
                asking(
                    server.url, api_keys[server.label], default_timeouts(), max(plan.concurrency)
                )
            )
            served = await learn(asker, server, model)
            number = sum(one["label"] == server.label for one in receipt["launches"]) + 1
            arm = _Arm(served, asker, f"{server.label}{number}")
            arm.flush_path = await _find_flush(arm)
            arms.append(arm)
        started = now()
        launches = [
            {
                "launch": arm.launch,
                **arm.served.receipt(),
                "path": _path(arm.served),
                "cache_flushed_by": arm.flush_path,
                "started": started,
                **receipts.environment(),
            }
            for arm in arms
        ]
        secrets = frozenset(key for key in api_keys.values() if key)
        receipt["launches"] += [receipts.redact(one, secrets) for one in launches]
        for users in plan.concurrency:
            for arm in arms:
                await _round(arm, plan, users, None)
            for number in range(plan.rounds):
                # A B B A A B B A: what drifts in time falls on all arms.
                for arm in arms if number % 2 == 0 else reversed(arms):
                    row = await _round(arm, plan, users, number)
                    with (folder / ROUNDS).open("a", encoding="utf-8") as rows:
                        rows.write(json.dumps(row) + "\n")
                    say(
                        f"{arm.launch}, {users} at a time, round {number + 1} of {plan.rounds}: "
                        f"{row['user_rate']:.1f} tok/s/user"
                    )
        for arm in arms:
            await require_same_build(arm.asker, arm.served)
        # Only a whole launch counts: the receipt names it last.
        runfolder.write_json(folder / runfolder.RECEIPT, receipt)


def _open_receipt(folder: Path, plan: Plan) -> dict[str, Any]:
    """The folder's receipt; a new one if there is none yet."""
    stated = {
        "workload": plan.workload.name,
        "workload_sha256": plan.workload.sha256,
        "output_tokens": plan.workload.output_tokens,
        "concurrency": plan.concurrency,
    }
    path = folder / runfolder.RECEIPT
    if not path.exists():
        return {"schema": SCHEMA, "plan": stated, "launches": []}
    receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in stated.items():
        if receipt["plan"][name] != value:
            raise ValueError(
                f"--join: {folder} holds {name} {receipt['plan'][name]!r}, got {value!r}"
            )
    return receipt


def _path(served: Served) -> str:
    return GENERATE if served.has_generate else COMPLETIONS


async def _find_flush(arm: _Arm) -> str | None:
    for path in _FLUSH_PATHS:
        if (await arm.asker.client.post(path)).status == 200:
            return path
    return None


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Leave what there is by now out of every later collection: a look through it takes long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _round(arm: _Arm, plan: Plan, users: int, number: int | None) -> dict[str, Any]:
    """Send one round; `number` None is the warm-up."""
    if arm.flush_path is not None:
        reply = await arm.asker.client.post(arm.flush_path)
        if reply.status != 200:
            raise NotMeasured(f"{arm.launch}: {arm.flush_path} answers {reply.status}")
    started = now()
    with _no_garbage_collection():
        answers = await asyncio.gather(*(_ask(arm, plan.workload, user) for user in range(users)))
    timelines = [timeline for timeline, _ in answers]
    try:
        rate = RoundRate.of(timelines)
    except ValueError as error:
        raise NotMeasured(f"{arm.launch}: {error}") from error
    steps = [answer.spec_verify_ct for _, answer in answers]
    told = all(isinstance(step, int) and step > 0 for step in steps)
    return {
        "launch": arm.launch,
        "label": arm.served.server.label,
        "concurrency": users,
        "round": number,
        "started": started,
        **asdict(rate),
        "verify_steps": sum(steps) if told else None,
        "most_tokens_an_event": max(
            (one.tokens - one.first_tokens) / max(answer.events - 1, 1) for one, answer in answers
        ),
        "requests": [one._asdict() for one in timelines],
    }


async def _ask(arm: _Arm, workload: Workload, user: int) -> tuple[Timeline, Answer]:
    first: list[tuple[float, int]] = []
    last_s, is_counted = 0.0, False

    def observe(moment_s: float, answer: Answer) -> None:
        nonlocal last_s, is_counted
        last_s = moment_s
        if not first and answer.events:
            # Where events do not tell a count, each is taken for one token; the end checks it.
            is_counted = isinstance(answer.completion_tokens, int)
            first.append((moment_s, answer.completion_tokens if is_counted else answer.events))

    path = _path(arm.served)
    body = _body(arm.served.model, path, workload, user)
    sent_s = time.monotonic()
    asked = await arm.asker.ask(path, body, observe=observe)
    if asked.failure is not None:
        raise NotMeasured(f"{arm.launch}: {asked.failure}")
    if asked.attempts > 1:
        raise NotMeasured(
            f"{arm.launch}: a request was asked again after {', '.join(asked.retried)}; "
            "its time is no figure"
        )
    answer = asked.answer
    assert answer is not None
    tokens = answer.completion_tokens
    if tokens != workload.output_tokens:
        raise NotMeasured(
            f"{arm.launch}: asked for {workload.output_tokens} tokens, got {tokens} "
            f"(finish reason {answer.finish_reason})"
        )
    if not is_counted and answer.events < _LEAST_EVENTS * tokens:
        raise NotMeasured(
            f"{arm.launch}: {tokens} tokens came in {answer.events} events, and the server tells "
            "no count at each: how many came with the first is not known"
        )
    if not first:
        raise NotMeasured(f"{arm.launch}: no event of the stream brought a text")
    return Timeline(sent_s, first[0][0], first[0][1], last_s, tokens), answer


def _body(model: str, path: str, workload: Workload, user: int) -> dict[str, Any]:
    prompt, limit = workload.prompt(user), workload.output_tokens
    if path == GENERATE:
        sampling = {"temperature": 0.0, "max_new_tokens": limit, "ignore_eos": True}
        name = "text" if isinstance(prompt, str) else "input_ids"
        return {name: prompt, "sampling_params": sampling, "stream": True}
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": limit,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


# What was measured.


def read_rounds(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read a folder's rounds and receipt; rounds of launches that were broken off are left out.

    Raises
    ------
    ValueError
        If it holds no throughput measurement.
    """
    try:
        receipt = json.loads((folder / runfolder.RECEIPT).read_text(encoding="utf-8"))
        lines = (folder / ROUNDS).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        whole = {launch["launch"]: launch["started"] for launch in receipt["launches"]}
        rows = [row for row in rows if row["started"] >= whole.get(row["launch"], "9")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: holds no throughput measurement: {error}") from error
    return rows, receipt


def summarise(rows: Sequence[dict[str, Any]], receipt: dict[str, Any]) -> dict[str, Any]:
    """Sum up rounds: per arm and concurrency its figures, and each arm's ratio to the first.

    Returns
    -------
    dict
        `points`: label, concurrency, launches, rounds, `user_rate` (median of the rounds, tok/s),
        its range and `spread`, `ttft_s`, `output_rate`, `accept_length`. `ratios`: per concurrency,
        of `user_rate`, with its interval, whether the ranges overlap, and what may be claimed.
    """
    grouped: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["concurrency"], row["label"]].append(row)
    labels = list(dict.fromkeys(row["label"] for row in rows))
    points = [_point(*key, some) for key, some in grouped.items()]
    ratios = []
    for users in dict.fromkeys(row["concurrency"] for row in rows):
        for label in labels[1:]:
            a, b = grouped[users, labels[0]], grouped[users, label]
            if a and b:
                ratios.append({"concurrency": users, **_contrast(labels[0], label, a, b)})
    simulated = {
        one["label"]: one["simulated_acceptance"]
        for one in receipt["launches"]
        if one["simulated_acceptance"]
    }
    return {
        "schema": SCHEMA,
        "plan": receipt["plan"],
        "models": {one["label"]: one["model"] for one in receipt["launches"]},
        "points": points,
        "ratios": ratios,
        "simulated_acceptance": simulated,
        "flags": _flags(rows, receipt),
    }


def _point(users: int, label: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [row["user_rate"] for row in rows]
    steps = [row["verify_steps"] for row in rows if row["verify_steps"] is not None]
    tokens = sum(one["tokens"] for row in rows for one in row["requests"])
    return {
        "label": label,
        "concurrency": users,
        "launches": len({row["launch"] for row in rows}),
        "rounds": len(rows),
        "user_rate": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "spread": spread(rates),
        "ttft_s": statistics.median(row["ttft_s"] for row in rows),
        "output_rate": statistics.median(row["output_rate"] for row in rows),
        "accept_length": tokens / sum(steps) if len(steps) == len(rows) else None,
    }


def _contrast(
    first: str, other: str, a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    by_launch: list[dict[str, list[float]]] = []
    for rows in (a, b):
        launches: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            launches[row["launch"]].append(row["user_rate"])
        by_launch.append(launches)
    found = ratio(by_launch[0], by_launch[1])
    return {
        "of": other,
        "to": first,
        **found._asdict(),
        "ranges_overlap": overlap(*([row["user_rate"] for row in rows] for rows in (a, b))),
        "claim": claim(found),
    }


def claim(found: Ratio) -> str:
    """What a ratio allows to say: `faster`, `slower`, `no difference shown`, `one launch`."""
    if found.low is None:
        return "one launch: nothing is claimed"
    if found.is_gain:
        return "faster"
    return "slower" if found.is_loss else "no difference shown"


def _flags(rows: Sequence[dict[str, Any]], receipt: dict[str, Any]) -> list[str]:
    flags = []
    for launch in receipt["launches"]:
        if launch["cache_flushed_by"] is None:
            flags.append(
                f"{launch['launch']}: the server offers no flush, so prompts may come from its "
                "cache: its time to the first token is no figure of prefill"
            )
    if any(row["most_tokens_an_event"] > 1.5 for row in rows):
        flags.append("events carry several tokens each: counts come from the server's usage")
    starts = [launch["label"] for launch in receipt["launches"]]
    if len(set(starts)) > 1 and starts == sorted(starts) and len(starts) > 2:
        flags.append(f"the launches' order is {' '.join(starts)}: what drifts looks like a ratio")
    return flags


def throughput_command(
    server: Annotated[
        list[str],
        typer.Option(
            "--server",
            "--servers",
            "--base-url",
            metavar="[LABEL=]URL,...",
            help="A server; several are arms, interleaved.",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Model id, if a server lists several.")] = None,
    api_key: Annotated[
        list[str],
        typer.Option(metavar="[LABEL=]KEY", help="Sent as a bearer token, to its arm alone."),
    ] = [],  # noqa: B006 - Typer's way to say "none by default"
    workload: Annotated[
        str, typer.Option(metavar="IN/OUT", help="Tokens of random ids in, and out.")
    ] = "4096/1024",
    texts: Annotated[
        Path | None, typer.Option(help="Prompts of this JSONL instead; OUT still counts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random ids.")] = 0,
    vocabulary: Annotated[
        int, typer.Option(help="Random ids stay below this.")
    ] = DEFAULT_VOCABULARY,
    concurrency: Annotated[str, typer.Option(help="Users at a time, a sweep as 1,8,32.")] = "1",
    rounds: Annotated[int, typer.Option(min=1, help="Kept rounds a launch and point.")] = 5,
    out: Annotated[Path, typer.Option(help="Where new folders go.")] = Path(
        ".draftproof/throughput"
    ),
    join: Annotated[
        Path | None, typer.Option(help="Add a launch to this folder, after a restart.")
    ] = None,
    json_file: JsonOption = None,
    summary_file: SummaryOption = None,
) -> None:
    """How fast does a server decode, and is one arm faster than another?

    One call measures one launch of each server; restart and --join for the next, A B B A. A ratio
    has an interval from two launches an arm on. Exit 0: measured. 2: bad usage or input. 4: no
    measurement.
    """
    try:
        servers = parse_servers(server)
        keys = parse_keys(api_key, servers)
        users = _sweep(concurrency)
        lengths = parse_lengths(workload)
        if texts is None:
            load = random_ids(lengths, max(users), seed, vocabulary)
        else:
            load = read_texts(texts, lengths[1], max(users))
        folder = join or runfolder.unique(out, "throughput")
        say = functools.partial(typer.echo, err=True)
        asyncio.run(measure(servers, model, keys, Plan(load, users, rounds), folder, say))
        summary = summarise(*read_rounds(folder))
        runfolder.write_json(folder / runfolder.RESULT, summary)
        write_throughput(summary, folder)
        outputs = Outputs(json=json_file, summary=summary_file)
        lead, *lines = throughput_text(summary).splitlines()
        outputs.write(summary, [], markdown_of("Decode throughput", lead, lines))
    except (NotMeasured, RequestFailed, ServerFailed, ServerGone, KeyboardInterrupt) as error:
        typer.echo(f"not a measurement: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(4) from error
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(throughput_text(summary), err=outputs.holds_stdout)
    typer.echo(f"result: {folder / runfolder.RESULT}", err=outputs.holds_stdout)


def _sweep(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--concurrency: must be numbers above 0, as 1,8,32, got {text!r}")
    return [int(part) for part in parts]
