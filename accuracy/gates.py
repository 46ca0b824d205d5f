"""The gates of a serving qualification: what each asks, and when it passes, fails or is not run."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from draftproof.accuracy.asking import Asker, Pool, ServerGone
from draftproof.accuracy.documents import Section
from draftproof.accuracy.probing import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Served,
    cached_tokens,
    chat_body,
    tokens_of,
)
from draftproof.accuracy.reading import Answer, RequestFailed

Status = Literal["passed", "failed", "not run"]

_FILLER = "The grass on the hill was dry and the wind moved over it without a sound."
_PAD_WORD = " and"
# Attempts to hit a prompt length exactly.
_LENGTH_TRIES = 8
# What servers and models write around tool calls; none of it belongs into an answer.
_PROTOCOL_MARKS = (
    "<tool_call",
    "</tool_call",
    "<|tool",
    "<tool_response",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<function=",
    "<|im_start|>",
    "<|im_end|>",
)
# Gauges of a server's /metrics that tell memory.
_MEMORY_GAUGE = re.compile(
    r"^(?P<name>process_resident_memory_bytes|vllm:kv_cache_usage_perc|sglang:token_usage)"
    r"(?:\{[^}]*\})? (?P<value>\S+)$",
    re.MULTILINE,
)
_KV_GAUGES = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
# A pool that is this much fuller after a soak than before it has lost something.
_KV_LEFT = 0.02


@dataclass(frozen=True)
class Outcome:
    """What became of a gate: its status, why, and figures."""

    status: Status
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """The gate is failed, for this reason."""


class NotRun(Exception):
    """The gate cannot be run on this server, for this reason."""


@dataclass(frozen=True)
class Bench:
    """One server under qualification.

    Attributes
    ----------
    asker : Asker
    served : Served
    references : Path
        Folder of stored references.
    """

    asker: Asker
    served: Served
    references: Path

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Ask; a request that fails fails the gate."""
        asked = await self.asker.ask(path, body, keeps=True)
        if asked.failure is not None:
            raise Failed(f"a request failed: {asked.failure}")
        assert asked.answer is not None
        return asked.answer

    async def chat(self, prompt: Any, max_tokens: int, **fields: Any) -> Answer:
        """Ask for a greedy chat answer."""
        return await self.ask(CHAT, chat_body(self.served.model, prompt, max_tokens, **fields))

    async def refuses(self, path: str, body: dict[str, Any]) -> str | None:
        """How the server refuses a request (4xx), None if it takes it."""
        asked = await self.asker.ask(path, body)
        failure = asked.failure
        if failure is not None and re.fullmatch(r"http_4\d\d", failure.kind):
            return str(failure)
        return None

    async def prompt_tokens(self, prompt: str) -> int:
        """Length of a chat prompt, as the server counts it."""
        tokens = (await self.chat(prompt, 1)).prompt_tokens
        if not isinstance(tokens, int):
            raise NotRun("the server does not tell the prompt's tokens")
        return tokens

    async def filler(self, tokens: int) -> list[str]:
        """So many sentences that a prompt of them has nearly `tokens` tokens, and no more."""
        few, many = 8, 40
        short, long = [await self.prompt_tokens(" ".join([_FILLER] * n)) for n in (few, many)]
        each = (long - short) / (many - few)
        return [_FILLER] * max(0, int((tokens - short) / each) + few)


class _Gate(Section):
    """What all gates have: a name, and a bound."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    max_minutes: Annotated[float, Field(gt=0)] = 10.0

    async def run(self, bench: Bench) -> Outcome:
        """Run the gate.

        Raises
        ------
        Failed, NotRun
            With the reason.
        """
        raise NotImplementedError


class Retrieval(_Gate):
    """A key planted at several depths of a long prompt is told exactly.

    The prompt has the share `share` of what the server says it holds, at most `at_most_tokens`.
    """

    kind: Literal["retrieval"]
    depths: Annotated[list[float], Field(min_length=1)] = Field(default=[0.1, 0.5, 0.9])
    share: Annotated[float, Field(gt=0, lt=1)] = 0.9
    at_most_tokens: Annotated[int, Field(ge=64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 24
    question: str = "What is the key? Reply with the key only."

    async def run(self, bench: Bench) -> Outcome:
        context = bench.served.context
        if context is None and self.at_most_tokens is None:
            raise NotRun("the server does not tell how much it holds, and no length is set")
        lengths = [int(context * self.share)] if context else []
        target = min([*lengths, *([self.at_most_tokens] if self.at_most_tokens else [])])
        sentences = await bench.filler(target - 64)
        told = []
        for number, depth in enumerate(self.depths):
            key = str(104729 + 15485863 * (number + 1) % 899999)
            place = int(len(sentences) * depth)
            text = " ".join([*sentences[:place], f"The key is {key}.", *sentences[place:]])
            answer = await bench.chat(f"{text}\n\n{self.question}", self.max_tokens)
            told.append(
                {
                    "depth": depth,
                    "planted": key,
                    "answer": answer.text,
                    "prompt_tokens": answer.prompt_tokens,
                    "exact": re.findall(r"\d+", answer.text or "")[:1] == [key],
                }
            )
        missed = [one for one in told if not one["exact"]]
        if missed:
            one = missed[0]
            raise Failed(
                f"{len(missed)} of {len(told)} keys are not told exactly; at depth "
                f"{one['depth']:g} of {one['prompt_tokens']} tokens it is {one['planted']}, the "
                f"answer {one['answer']!r}"
            )
        return Outcome(
            "passed",
            f"{len(told)} keys told exactly in prompts of {told[0]['prompt_tokens']} tokens",
            {"depths": told},
        )


class Boundaries(_Gate):
    """Prompts one token shorter, as long and one longer than a chunk or page get the same answer.

    `sizes` null: the chunk and page sizes that the server tells.
    """

    kind: Literal["boundaries"]
    sizes: list[int] | None = None
    question: str
    right: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 8

    async def run(self, bench: Bench) -> Outcome:
        sizes = self.sizes
        if sizes is None:
            names = (("chunked_prefill_size",), ("page_size", "block_size"))
            told = [bench.served.figure(*some) for some in names]
            # A page of one token has no boundary to test.
            sizes = [size for size in told if size and size > 1]
        if not sizes:
            raise NotRun("the server tells no chunk or page size, and none is set")
        room = bench.served.context
        answers: dict[int, str] = {}
        least = await bench.prompt_tokens(self.question)
        for size, more in itertools.product(sizes, (-1, 0, 1)):
            # The smallest whole number of chunks or pages that holds the question.
            length = -(-(least + 3) // size) * size + more
            if room is not None and length + self.max_tokens > room:
                raise NotRun(f"a prompt of {length} tokens does not fit into {room}")
            prompt = await self._of_length(bench, length)
            answers[length] = (await bench.chat(prompt, self.max_tokens)).text or ""
        distinct = Counter(answers.values())
        details = {"answers": {str(length): text for length, text in answers.items()}}
        wrong = [
            length
            for length, text in answers.items()
            if self.right is not None and self.right not in re.findall(r"-?\w+", text)
        ]
        if wrong:
            raise Failed(
                f"at {wrong[0]} tokens the answer is {answers[wrong[0]]!r}, right is {self.right}"
            )
        if len(distinct) > 1:
            raise Failed(f"lengths {list(answers)} get {len(distinct)} answers: {answers}")
        return Outcome("passed", f"the same answer at {', '.join(map(str, answers))}", details)

    async def _of_length(self, bench: Bench, length: int) -> str:
        """A prompt of exactly so many tokens, the question last."""
        words = max(0, length - await bench.prompt_tokens(self.question))
        for _ in range(_LENGTH_TRIES):
            prompt = f"so{_PAD_WORD * words}\n{self.question}"
            off = length - await bench.prompt_tokens(prompt)
            if off == 0:
                return prompt
            words += off
            if words < 0:
                break
        raise NotRun(f"no prompt of exactly {length} tokens could be made")


class PrefixReuse(_Gate):
    """A fresh namespace reuses nothing, a reused one a whole number of blocks."""

    kind: Literal["prefix-reuse"]
    sentences: Annotated[int, Field(ge=8)] = 60
    block: Annotated[int, Field(ge=1)] | None = None

    async def run(self, bench: Bench) -> Outcome:
        prompt = " ".join([_FILLER] * self.sentences)
        salts = [secrets.token_hex(8) for _ in range(2)]
        told = [
            cached_tokens(await bench.chat(prompt, 1, cache_salt=salt))
            for salt in (salts[0], salts[0], salts[1])
        ]
        if None in told:
            raise NotRun("the server does not tell cached tokens")
        first, again, other = told
        if first or other:
            raise Failed(f"fresh namespaces report {first} and {other} cached tokens, not 0")
        if not again:
            raise Failed("the same prompt in the same namespace reuses nothing")
        block = self.block or bench.served.figure("page_size", "block_size") or 1
        if again % block:
            raise Failed(f"{again} cached tokens are no whole number of blocks of {block}")
        return Outcome("passed", f"0 fresh, {again} reused", {"cached": told, "block": block})


class StructuredCase(Section):
    """A prompt, the schema of its answer, and the answer."""

    prompt: str
    json_schema: dict[str, Any]
    expect: dict[str, Any]


async def _at_once_too(
    jobs: Sequence[Callable[[], Awaitable[str | None]]], concurrent: int
) -> tuple[int, list[str]]:
    """Do each job alone, then all of them again, so many at once; the faults that they tell."""
    faults = [fault for fault in [await job() for job in jobs] if fault]
    many = [job for _, job in zip(range(max(concurrent, len(jobs))), itertools.cycle(jobs))]
    faults += [fault for fault in await asyncio.gather(*(job() for job in many)) if fault]
    return len(jobs) + len(many), faults


class Structured(_Gate):
    """Answers under a JSON schema: chat whole and streamed, raw; serial and several at once."""

    kind: Literal["structured"]
    cases: Annotated[list[StructuredCase], Field(min_length=1)]
    ways: list[Literal["chat", "chat-stream", "raw"]] = Field(
        default=["chat", "chat-stream", "raw"]
    )
    concurrent: Annotated[int, Field(ge=1)] = 8
    max_tokens: Annotated[int, Field(ge=1)] = 128

    async def run(self, bench: Bench) -> Outcome:
        lacking = []
        jobs: list[Callable[[], Awaitable[str | None]]] = []
        for way in self.ways:
            why = await bench.refuses(*self._request(bench, way, self.cases[0]))
            if why is not None:
                lacking.append(f"{way}: {why}")
                continue
            jobs += [
                lambda way=way, case=case: self._fault(bench, way, case)  # type: ignore[misc]
                for case in self.cases
            ]
        if lacking:
            # A part that the server refuses is not passed, whatever the others do.
            raise NotRun("; ".join(lacking))
        asked, faults = await _at_once_too(jobs, self.concurrent)
        if faults:
            raise Failed(f"{len(faults)} of {asked} answers: {faults[0]}")
        return Outcome("passed", f"{asked} answers as expected", {"ways": self.ways})

    def _request(self, bench: Bench, way: str, case: StructuredCase) -> tuple[str, dict[str, Any]]:
        if way == "raw" and bench.served.has_generate:
            sampling = {
                "temperature": 0.0,
                "max_new_tokens": self.max_tokens,
                "json_schema": json.dumps(case.json_schema),
            }
            return GENERATE, {"text": case.prompt, "sampling_params": sampling, "stream": True}
        schema = {"name": "answer", "schema": case.json_schema, "strict": True}
        fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
        body = chat_body(bench.served.model, case.prompt, self.max_tokens, **fields)
        if way == "raw":
            del body["messages"]
            return COMPLETIONS, {**body, "prompt": case.prompt}
        return CHAT, _whole(body) if way == "chat" else body

    async def _fault(self, bench: Bench, way: str, case: StructuredCase) -> str | None:
        answer = await bench.ask(*self._request(bench, way, case))
        try:
            value = json.loads(answer.text or "")
        except ValueError:
            return f"{way}: is not JSON: {answer.text!r} (finish reason {answer.finish_reason})"
        if value != case.expect:
            return f"{way}: expected {case.expect}, got {value}"
        if answer.finish_reason != "stop":
            return f"{way}: finish reason {answer.finish_reason}"
        return None


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, not streamed."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


class ToolCase(Section):
    """A prompt and the call that it must lead to; `result` and `says` go on behind the call."""

    prompt: str
    choice: Literal["auto", "forced"] = "auto"
    call: str
    arguments: dict[str, Any]
    result: str | None = None
    says: str | None = None


class Tools(_Gate):
    """Tool calls: whole and streamed, auto and forced, after a result; serial and at once."""

    kind: Literal["tools"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)]
    cases: Annotated[list[ToolCase], Field(min_length=1)]
    concurrent: Annotated[int, Field(ge=1)] = 8
    max_tokens: Annotated[int, Field(ge=1)] = 256

    async def run(self, bench: Bench) -> Outcome:
        for case in self.cases:
            why = await bench.refuses(CHAT, self._body(bench, case))
            if why is not None:
                raise NotRun(f"tool choice {case.choice}: {why}")
        jobs: list[Callable[[], Awaitable[str | None]]] = [
            lambda case=case, streamed=streamed: self._fault(bench, case, streamed)  # type: ignore[misc]
            for case in self.cases
            for streamed in (False, True)
        ]
        asked, faults = await _at_once_too(jobs, self.concurrent)
        if faults:
            raise Failed(f"{len(faults)} of {asked} conversations: {faults[0]}")
        return Outcome("passed", f"{asked} conversations as expected")

    def _body(self, bench: Bench, case: ToolCase) -> dict[str, Any]:
        forced = {"type": "function", "function": {"name": case.call}}
        return chat_body(
            bench.served.model,
            case.prompt,
            self.max_tokens,
            tools=self.tools,
            tool_choice=forced if case.choice == "forced" else "auto",
        )

    async def _fault(self, bench: Bench, case: ToolCase, streamed: bool) -> str | None:
        body = self._body(bench, case)
        answer = await bench.ask(CHAT, body if streamed else _whole(body))
        way = f"{case.choice}, {'streamed' if streamed else 'whole'}"
        calls = tool_calls_of(answer)
        leaked = _leaked(answer.text)
        if leaked:
            return f"{way}: the answer leaks {leaked!r}: {answer.text!r}"
        if len(calls) != 1:
            return f"{way}: expected one call, got {calls or answer.text!r}"
        if answer.finish_reason not in ("tool_calls", "stop"):
            return f"{way}: finish reason {answer.finish_reason}"
        name, arguments = calls[0]
        try:
            given = json.loads(arguments)
        except ValueError:
            return f"{way}: arguments are not JSON: {arguments!r}"
        if (name, given) != (case.call, case.arguments):
            return f"{way}: expected {case.call}({case.arguments}), got {name}({given})"
        if case.result is None:
            return None
        messages = [
            {"role": "user", "content": case.prompt},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call-0",
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call-0", "content": case.result},
        ]
        body = {**body, "messages": messages, "tool_choice": "auto"}
        after = await bench.ask(CHAT, body if streamed else _whole(body))
        said = after.text or ""
        if tool_calls_of(after):
            return f"{way}: called again after the tool's result"
        if _leaked(said):
            return f"{way}: the answer after the result leaks {_leaked(said)!r}: {said!r}"
        if case.says is not None and case.says not in said:
            return f"{way}: after the result expected {case.says!r} in {said!r}"
        return None


def _leaked(text: str | None) -> str | None:
    return next((mark for mark in _PROTOCOL_MARKS if mark in (text or "")), None)


def tool_calls_of(answer: Answer) -> list[tuple[str, str]]:
    """Names and arguments of an answer's tool calls, put together from its pieces."""
    calls: dict[int, list[str]] = {}
    for event in answer.kept:
        for choice in event.get("choices") or ():
            said = choice.get("message") or choice.get("delta") or {}
            for place, call in enumerate(said.get("tool_calls") or ()):
                function = call.get("function") or {}
                parts = calls.setdefault(call.get("index", place), ["", ""])
                parts[0] += function.get("name") or ""
                parts[1] += function.get("arguments") or ""
    return [(name, arguments) for name, arguments in calls.values()]


class Reference(_Gate):
    """First token and continuation agree with a stored reference.

    `file` is a JSON object of prompt to `{"first": token, "text": continuation}`; the command's
    `--write-reference` makes it on a server that is trusted.
    """

    kind: Literal["reference"]
    file: str
    prompts: Annotated[list[str], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 32
    least_first: Annotated[float, Field(gt=0, le=1)] = 1.0
    least_texts: Annotated[float, Field(gt=0, le=1)] = 1.0

    async def observe(self, bench: Bench) -> dict[str, dict[str, str]]:
        """What this server says to each prompt."""
        told = {}
        for prompt in self.prompts:
            answer = await bench.chat(prompt, self.max_tokens, logprobs=True, top_logprobs=1)
            tokens = tokens_of(answer)
            if tokens is None:
                raise NotRun("the server does not tell tokens (no log probabilities)")
            told[prompt] = {"first": tokens[0][0], "text": answer.text or ""}
        return told

    async def run(self, bench: Bench) -> Outcome:
        path = bench.references / self.file
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotRun(f"no stored reference at {path}") from error
        lacking = [prompt for prompt in self.prompts if prompt not in stored]
        if lacking:
            raise NotRun(f"{path}: has no reference for {lacking[0]!r}")
        told = await self.observe(bench)
        total = len(told)
        first = sum(told[prompt]["first"] == stored[prompt]["first"] for prompt in told)
        texts = sum(told[prompt]["text"] == stored[prompt]["text"] for prompt in told)
        said = f"first tokens equal {first} of {total}, continuations {texts} of {total}"
        if first < self.least_first * total or texts < self.least_texts * total:
            raise Failed(said)
        return Outcome("passed", said, {"told": told})


class Control(Section):
    """A prompt with one right answer, which must be a word of the answer."""

    prompt: str
    right: str

    def is_right(self, answer: Answer) -> bool:
        """Whether the right answer stands in an answer as a word."""
        return self.right in re.findall(r"-?\w+", answer.text or "")


class Mixed(_Gate):
    """Long prompts arrive while short ones decode: all answers whole and right, no long silence."""

    kind: Literal["mixed-load"]
    controls: Annotated[list[Control], Field(min_length=1)]
    decoding: Annotated[int, Field(ge=1)] = 4
    decode_tokens: Annotated[int, Field(ge=2)] = 128
    long_prompts: Annotated[int, Field(ge=1)] = 4
    long_sentences: Annotated[int, Field(ge=1)] = 100
    longest_pause_s: Annotated[float, Field(gt=0)] = 30.0

    async def run(self, bench: Bench) -> Outcome:
        pauses: list[float] = []

        async def decode(number: int) -> None:
            moments = [time.monotonic()]
            body = chat_body(
                bench.served.model,
                f"Count from {number + 1} upwards, one number a line.",
                self.decode_tokens,
            )
            asked = await bench.asker.ask(
                CHAT, body, observe=lambda moment_s, _: moments.append(moment_s)
            )
            if asked.failure is not None:
                raise Failed(f"a decoding request failed: {asked.failure}")
            # The first is the wait for its own prefill.
            pauses.extend(two - one for one, two in itertools.pairwise(moments[1:]))

        async def prefill(number: int) -> None:
            control = self.controls[number % len(self.controls)]
            # Each begins with a text of its own, so that none comes from a prefix cache.
            text = " ".join([f"Report {secrets.token_hex(8)}.", *[_FILLER] * self.long_sentences])
            answer = await bench.chat(f"{text}\n\n{control.prompt}", 16)
            if not control.is_right(answer):
                raise Failed(f"{control.prompt!r} behind a long prompt: {answer.text!r}")

        await asyncio.gather(
            *(decode(number) for number in range(self.decoding)),
            *(prefill(number) for number in range(self.long_prompts)),
        )
        longest = max(pauses, default=0.0)
        if longest > self.longest_pause_s:
            raise Failed(f"a stream paused for {longest:.1f} s, at most {self.longest_pause_s:g}")
        return Outcome("passed", f"all whole and right; longest pause of a stream {longest:.2f} s")


class Soak(_Gate):
    """Controls asked for some minutes: failures, hangs, capped outputs, throughput, memory."""

    kind: Literal["soak"]
    controls: Annotated[list[Control], Field(min_length=1)]
    minutes: Annotated[float, Field(gt=0)]
    concurrency: Annotated[int, Field(ge=1)] = 8
    max_tokens: Annotated[int, Field(ge=1)] = 64
    most_capped: Annotated[float, Field(ge=0, le=1)] = 0.0
    most_wrong: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Output tokens a second of the last third over those of the first.
    least_kept: Annotated[float, Field(gt=0)] = 0.7
    # A soak that is bounded by the same number as other gates would never end in time.
    max_minutes: Annotated[float, Field(gt=0)] = 24 * 60.0

    async def run(self, bench: Bench) -> Outcome:
        started = time.monotonic()
        end = started + 60 * self.minutes
        counts: Counter[str] = Counter()
        landed: list[tuple[float, int]] = []
        before = await _memory(bench)
        gauges = [before]

        def jobs() -> Any:
            number = 0
            while time.monotonic() < end:
                yield number
                number += 1

        async def ask(number: int) -> None:
            control = self.controls[number % len(self.controls)]
            asked = await bench.asker.ask(
                CHAT, chat_body(bench.served.model, control.prompt, self.max_tokens)
            )
            counts["asked"] += 1
            if asked.failure is not None:
                hung = asked.failure.kind in ("stalled", "timeout")
                counts["hung" if hung else f"failed: {asked.failure.kind}"] += 1
                return
            answer = asked.answer
            assert answer is not None
            counts["capped"] += answer.finish_reason == "length"
            counts["wrong"] += not control.is_right(answer)
            counts["asked again"] += asked.attempts > 1
            landed.append((time.monotonic(), answer.completion_tokens or answer.events))
            if number % 100 == 99:
                gauges.append(await _memory(bench))

        pool = Pool(jobs(), ask, self.concurrency)
        await pool.run()
        if pool.stopped is not None:
            raise ServerGone(pool.stopped)
        gauges.append(await _memory(bench))
        details = {
            "counts": dict(counts),
            "memory": _ranges(gauges),
            **self._rates(started, landed),
        }
        self._judge(counts, details, before, gauges[-1])
        return Outcome(
            "passed",
            f"{counts['asked']} requests in {self.minutes:g} min, median "
            f"{details['median_rate']:.1f} output tok/s, last third over first "
            f"{details['kept']:.2f}",
            details,
        )

    def _rates(self, started: float, landed: list[tuple[float, int]]) -> dict[str, Any]:
        """Output tokens a second in nine windows of the soak, by when answers landed."""
        width = 60 * self.minutes / 9
        sums = [0.0] * 9
        for moment, tokens in landed:
            sums[min(int((moment - started) / width), 8)] += tokens
        rates = [one / width for one in sums]
        first, last = statistics.fmean(rates[:3]), statistics.fmean(rates[-3:])
        return {
            "rates": rates,
            "median_rate": statistics.median(rates),
            "kept": last / first if first else 0.0,
        }

    def _judge(
        self,
        counts: Counter[str],
        details: dict[str, Any],
        before: dict[str, float],
        after: dict[str, float],
    ) -> None:
        faults = [
            f"{count} {name}"
            for name, count in counts.items()
            if count and (name == "hung" or name.startswith("failed"))
        ]
        answered = max(counts["asked"], 1)
        for name, most in (("capped", self.most_capped), ("wrong", self.most_wrong)):
            if counts[name] > most * answered:
                faults.append(f"{counts[name]} of {answered} {name}, at most {most:g}")
        if details["kept"] < self.least_kept:
            faults.append(
                f"throughput of the last third is {details['kept']:.2f} of the first, at least "
                f"{self.least_kept:g}"
            )
        for name in _KV_GAUGES:
            if name in before and after.get(name, 0.0) > before[name] + _KV_LEFT:
                faults.append(f"{name} is {after[name]:g} after the soak, it was {before[name]:g}")
        if faults:
            raise Failed(f"{'; '.join(faults)} (of {answered} requests)")


async def _memory(bench: Bench) -> dict[str, float]:
    """Gauges of memory that the server's /metrics tell; empty if it tells none."""
    try:
        reply = await bench.asker.client.get("/metrics")
    except RequestFailed:
        return {}
    if reply.status != 200:
        return {}
    found = _MEMORY_GAUGE.finditer(reply.body.decode("utf-8", "replace"))
    return {match["name"]: float(match["value"]) for match in found}


def _ranges(gauges: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Floor and ceiling of each gauge."""
    names = {name for one in gauges for name in one}
    values = {name: [one[name] for one in gauges if name in one] for name in sorted(names)}
    return {name: [min(told), max(told)] for name, told in values.items()}


class Pressure(_Gate):
    """Distinct long prompts that together exceed the KV pool, at once: every answer exact.

    `pool_tokens` null: what the server tells of its pool.
    """

    kind: Literal["kv-pressure"]
    pool_tokens: Annotated[int, Field(ge=1)] | None = None
    times: Annotated[float, Field(gt=1)] = 1.5
    prompt_tokens: Annotated[int, Field(ge=128)] = 2048
    most_prompts: Annotated[int, Field(ge=2)] = 4096
    max_tokens: Annotated[int, Field(ge=1)] = 24
    question: str = "What is the key? Reply with the key only."

    async def run(self, bench: Bench) -> Outcome:
        pool = self.pool_tokens or await self._pool(bench)
        if pool is None:
            raise NotRun("the server does not tell its pool of tokens, and none is set")
        count = int(pool * self.times / self.prompt_tokens) + 1
        if count > self.most_prompts:
            raise NotRun(f"a pool of {pool} tokens needs {count} prompts, {self.most_prompts} set")
        sentences = await bench.filler(self.prompt_tokens - 64)
        missed = []

        async def ask(number: int) -> None:
            key = str(100003 + 7919 * number % 899989)
            place = len(sentences) // 2
            text = " ".join(
                [f"Report {number}.", *sentences[:place], f"The key is {key}.", *sentences[place:]]
            )
            answer = await bench.chat(f"{text}\n\n{self.question}", self.max_tokens)
            if re.findall(r"\d+", answer.text or "")[:1] != [key]:
                missed.append((number, key, answer.text))

        await asyncio.gather(*(ask(number) for number in range(count)))
        if missed:
            number, key, said = missed[0]
            raise Failed(
                f"{len(missed)} of {count} keys are not told exactly: prompt {number} has "
                f"{key}, the answer is {said!r}"
            )
        return Outcome("passed", f"{count} keys exact from a pool of {pool} tokens")

    async def _pool(self, bench: Bench) -> int | None:
        told = bench.served.figure("max_total_num_tokens")
        if told is not None:
            return told
        try:
            metrics = (await bench.asker.client.get("/metrics")).body.decode("utf-8", "replace")
        except RequestFailed:
            return None
        line = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
        sizes = dict(re.findall(r'(num_gpu_blocks|block_size)="(\d+)"', line[1] if line else ""))
        return int(sizes["num_gpu_blocks"]) * int(sizes["block_size"]) if len(sizes) == 2 else None


Gate = Annotated[
    Retrieval | Boundaries | PrefixReuse | Structured | Tools | Reference | Mixed | Soak | Pressure,
    Field(discriminator="kind"),
]
