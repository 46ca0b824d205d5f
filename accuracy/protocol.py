"""What a lane sends, and the checks before the first request: does the server do what was asked?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from draftproof.accuracy import builds
from draftproof.accuracy.asking import Asker
from draftproof.accuracy.builds import TELLING_PATHS
from draftproof.accuracy.lanes import Lane
from draftproof.accuracy.reading import Answer, RequestFailed
from draftproof.accuracy.rows import Row

# How a lane's sampling fields are spelt by the two endpoints.
_CHAT_NAMES = {"seed_base": "seed", "thinking": "chat_template_kwargs"}
_GENERATE_NAMES = {"max_tokens": "max_new_tokens", "seed_base": "sampling_seed"}

# Tokens asked for while checking: enough to see reasoning begin and a stream grow.
_PROBE_TOKENS = 16

# Fields without a visible effect may have been ignored, and the score then means something else.
MUST_BE_PROVEN = ("thinking", "reasoning_effort")

State = Literal["accepted", "rejected", "proven", "ignored"]


class ServerUnfit(ValueError):
    """The server cannot do what was asked: nothing answers, no such model, a field is refused."""


class ServerFailed(RuntimeError):
    """The server is there and fails at a plain request."""


@dataclass
class FieldFinding:
    """What is known of one sampling field.

    `accepted`: the server answered 200, which proves little. `rejected`: it refused the field, and
    the lane let it be dropped. `proven`: its effect was seen. `ignored`: its effect was missing.
    """

    value: Any
    state: State
    evidence: str


@dataclass
class Protocol:
    """How requests are written for one server.

    Parameters
    ----------
    lane : Lane
        Its sampling fields are sent.
    model : str
        Model id.
    dropped : set of str
        Sampling fields, or `stream` and `stream_options`, that the server rejected.
    """

    lane: Lane
    model: str
    dropped: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        return "/generate" if self.lane.endpoint == "generate" else "/v1/chat/completions"

    def names(self) -> list[str]:
        """Names of all fields that a request carries besides model and prompt."""
        transport = ["stream"]
        if self.lane.endpoint == "chat" and "stream" not in self.dropped:
            transport.append("stream_options")
        return [name for name in (*self.lane.sampling.sent, *transport) if name not in self.dropped]

    def body(
        self,
        prompt: str,
        repeat: int = 0,
        names: list[str] | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Write one request.

        Parameters
        ----------
        prompt : str
            The rendered question.
        repeat : int
            Number of the repeat; the seed is `seed_base + repeat`.
        names : list of str, optional
            Only these of `names()`.
        max_tokens : int, optional
            Instead of the lane's limit.
        """
        names = self.names() if names is None else names
        sampling: dict[str, Any] = {}
        for name, value in self.lane.sampling.sent.items():
            if name in names:
                sampling.update(self._spelt(name, value, repeat))
        if max_tokens is not None:
            sampling.update(self._spelt("max_tokens", max_tokens, repeat))
        if self.lane.endpoint == "generate":
            body: dict[str, Any] = {"text": prompt, "sampling_params": sampling}
        else:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": self.model, "messages": messages, **sampling}
        if "stream" in names:
            body["stream"] = True
            if "stream_options" in names:
                body["stream_options"] = {"include_usage": True}
        return body

    def sampling_sent(self) -> dict[str, Any]:
        """The sampling fields as the server sees them, for repeat 0."""
        body = self.body("")
        return body.get("sampling_params") or {
            name: value for name, value in body.items() if name not in ("model", "messages")
        }

    def _spelt(self, name: str, value: Any, repeat: int) -> dict[str, Any]:
        if name == "seed_base":
            value += repeat
        if self.lane.endpoint == "generate":
            return {_GENERATE_NAMES.get(name, name): value}
        if name == "thinking":
            value = {"thinking": value}
        return {_CHAT_NAMES.get(name, name): value}


@dataclass
class Findings:
    """What the checks found out.

    Attributes
    ----------
    protocol : Protocol
        Without the fields that the server rejected.
    model : dict
        `id`, `root`, `revision`, `weight_version` and `context` (tokens), as far as told.
    told : dict
        What the server says of itself, by path; not yet redacted.
    build : dict
        What of it tells the build; see `draftproof.accuracy.builds`.
    fields : dict of str to FieldFinding
        Every sampling field of the lane, and the fields of streaming.
    flags : list of str
        What a reader of the result must know.
    """

    protocol: Protocol
    model: dict[str, Any]
    told: dict[str, Any]
    build: dict[str, Any]
    fields: dict[str, FieldFinding]
    flags: list[str]


async def check_server(
    asker: Asker, lane: Lane, prompts: list[str], warm_up: str | None, model: str | None
) -> Findings:
    """Check the server against the lane before anything is measured.

    Parameters
    ----------
    asker : Asker
        Its client's `is_cumulative` is set to what the server's `/generate` stream does.
    lane : Lane
        What will be asked.
    prompts : list of str
        All rendered questions.
    warm_up : str or None
        A text to send once without asking for tokens, as the few-shot protocol does.
    model : str or None
        Model id; None takes the server's only one.

    Raises
    ------
    ServerUnfit
        If the server, the model, the context or a required field is not to be had, or the server
        simulates the acceptance of drafts.
    ServerFailed
        If the server fails at a plain request.
    ServerGone
        If it is there no more.
    """
    told, build = await _told(asker)
    found = _model(told, model)
    protocol = Protocol(lane, found["id"])
    longest = max(prompts, key=len)
    answer, rejected = await _accepted_fields(asker, protocol, longest)
    fields = {
        name: FieldFinding(lane.sampling.sent.get(name, True), "accepted", "answered 200")
        for name in protocol.names()
    }
    for name, why in rejected.items():
        fields[name] = FieldFinding(lane.sampling.sent.get(name, True), "rejected", why)
    flags = [f"dropped: {name} (the server rejects it)" for name in rejected]
    if not found["listed"]:
        flags.append("unknown: whether the model id exists (the server lists no models)")
    _look_at_limit(fields, answer, flags)
    _check_context(lane, found, answer, flags)
    for name in MUST_BE_PROVEN:
        if fields.get(name) and fields[name].state == "accepted":
            await _prove_by_prompt(asker, protocol, name, longest, answer, fields[name])
    await _check_start(asker, protocol, prompts[0])
    if warm_up is not None:
        await _warm_up(asker, protocol, warm_up, flags)
    return Findings(protocol, found, told, build, fields, flags)


def prove_by_answers(fields: dict[str, FieldFinding], rows: list[Row]) -> None:
    """Mark the fields whose effect the run's own answers show."""
    for row in rows:
        _prove(fields, "stop", row.matched is not None, "an answer ended at a stop word")
        thinking = fields.get("thinking")
        if thinking and thinking.value:
            _prove(fields, "thinking", row.has_reasoning, "reasoning text")
        limit = fields.get("max_tokens")
        if limit and row.finish_reason == "length" and row.usage is not None:
            is_limit = row.usage.completion_tokens == limit.value
            _prove(fields, "max_tokens", is_limit, "an answer ended at the limit")


def unproven(fields: dict[str, FieldFinding]) -> list[str]:
    """List the fields that change what a score means and had no visible effect."""
    return [
        name
        for name, finding in fields.items()
        if finding.state == "ignored" or (name in MUST_BE_PROVEN and finding.state != "proven")
    ]


def _prove(fields: dict[str, FieldFinding], name: str, seen: bool, evidence: str) -> None:
    finding = fields.get(name)
    if seen and finding is not None and finding.state == "accepted":
        fields[name] = dataclasses.replace(finding, state="proven", evidence=evidence)


async def _told(asker: Asker) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server tells of itself, its list of models among it, and its build."""
    try:
        listing = await asker.get("/v1/models")
    except RequestFailed as failure:
        raise ServerUnfit(
            f"--base-url: no server answers at {asker.client.root}: {failure.detail}"
        ) from failure
    if listing.status in (401, 403):
        raise ServerUnfit(f"--api-key: the server answers {listing.status} to /v1/models")
    if listing.status == 429 or listing.status >= 500:
        raise ServerFailed(f"the server answers http_{listing.status} to /v1/models")
    try:
        told, build = await builds.tell(asker.client)
    except RequestFailed as failure:
        raise ServerFailed(f"the server tells nothing of itself: {failure.detail}") from failure
    simulated = builds.simulated_acceptance(told)
    if simulated:
        raise ServerUnfit(
            f"--base-url: the server simulates the acceptance of drafts ({simulated}): its answers "
            "say nothing about the model"
        )
    models = builds.as_json(listing) if listing.status == 200 else f"status {listing.status}"
    return {"/v1/models": models, **told}, build


def _model(told: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Find the model among what the server told, and what else it told about it."""
    listing = told["/v1/models"]
    cards = listing.get("data") if isinstance(listing, dict) else None
    cards = [card for card in cards or [] if isinstance(card, dict) and card.get("id")]
    ids = [card["id"] for card in cards]
    if model is None and len(ids) != 1:
        lists = f"lists {ids or 'no model'}"
        if isinstance(listing, str):
            lists = f"answers /v1/models with {listing}"
        raise ServerUnfit(f"--model: is needed, the server {lists}")
    if model is not None and ids and model not in ids:
        raise ServerUnfit(f"--model: the server has no {model!r}, it lists {ids}")
    model = model or ids[0]
    card: dict[str, Any] = next((card for card in cards if card["id"] == model), {})
    info: dict[str, Any] = {}
    for path in reversed(TELLING_PATHS):
        if isinstance(told.get(path), dict):
            info.update(told[path])
    context = card.get("max_model_len") or info.get("context_length")
    return {
        "id": model,
        "listed": bool(ids),
        "root": card.get("root") or info.get("model_path"),
        "revision": info.get("revision"),
        "weight_version": info.get("weight_version"),
        "context": context if isinstance(context, int) else None,
    }


async def _accepted_fields(
    asker: Asker, protocol: Protocol, prompt: str
) -> tuple[Answer, dict[str, str]]:
    """Find the fields that the server rejects; drop those that may be dropped."""
    try:
        return await _probe(asker, protocol, prompt), {}
    except RequestFailed as failure:
        if failure.kind not in ("http_400", "http_422"):
            raise _as_server_error(failure) from failure
        together = failure
    try:
        await _probe(asker, protocol, prompt, names=[])
    except RequestFailed as failure:
        raise ServerFailed(
            f"the server refuses a plain request: {failure.kind}: {failure.detail}"
        ) from failure
    rejected: dict[str, str] = {}
    for name in protocol.names():
        if name == "stream_options" and "stream" in rejected:
            continue
        names = ["stream", name] if name == "stream_options" else [name]
        try:
            await _probe(asker, protocol, prompt, names=names)
        except RequestFailed as failure:
            if failure.kind not in ("http_400", "http_422"):
                raise _as_server_error(failure) from failure
            if name in protocol.lane.sampling.required:
                raise ServerUnfit(
                    f"lane {protocol.lane.name}: the server rejects the required field {name!r}: "
                    f"{failure.kind}: {failure.detail}"
                ) from failure
            rejected[name] = f"{failure.kind}: {failure.detail}"
    if not rejected:
        raise ServerUnfit(
            f"lane {protocol.lane.name}: the server takes every field alone, but rejects them "
            f"together: {together.kind}: {together.detail}"
        )
    protocol.dropped |= set(rejected)
    try:
        return await _probe(asker, protocol, prompt), rejected
    except RequestFailed as failure:
        raise _as_server_error(failure) from failure


async def _probe(
    asker: Asker, protocol: Protocol, prompt: str, names: list[str] | None = None
) -> Answer:
    limit = protocol.lane.sampling.max_tokens or _PROBE_TOKENS
    body = protocol.body(prompt, names=names, max_tokens=min(limit, _PROBE_TOKENS))
    try:
        return await _ask(asker, protocol, body)
    except RequestFailed as failure:
        if failure.kind != "garbage" or not asker.client.is_cumulative:
            raise
    # Garbage it may be, or a stream of pieces where whole texts so far were expected.
    asker.client.is_cumulative = False
    return await _ask(asker, protocol, body)


async def _ask(
    asker: Asker, protocol: Protocol, body: dict[str, Any], only_start: bool = False
) -> Answer:
    """Ask as the run will ask, with its patience."""
    asked = await asker.ask(protocol.path, body, only_start)
    if asked.failure is not None:
        raise asked.failure
    if asked.answer is None:
        raise RuntimeError("a request brought neither an answer nor a failure")
    return asked.answer


def _as_server_error(failure: RequestFailed) -> Exception:
    if failure.kind in ("http_401", "http_403"):
        return ServerUnfit(f"--api-key: the server refuses it: {failure.kind}: {failure.detail}")
    if failure.kind == "http_404":
        return ServerUnfit(
            f"the server does not know the endpoint or the model: {failure.kind}: {failure.detail}"
        )
    return ServerFailed(f"the server fails at a first request: {failure.kind}: {failure.detail}")


def _look_at_limit(fields: dict[str, FieldFinding], answer: Answer, flags: list[str]) -> None:
    finding = fields.get("max_tokens")
    if finding is None or not isinstance(answer.completion_tokens, int):
        return
    asked = min(finding.value, _PROBE_TOKENS)
    if answer.completion_tokens > asked:
        finding.state = "ignored"
        finding.evidence = f"asked for {asked} tokens, got {answer.completion_tokens}"
        flags.append(f"ignored: max_tokens ({finding.evidence})")
    elif answer.completion_tokens == asked and answer.finish_reason == "length":
        finding.state = "proven"
        finding.evidence = f"asked for {asked} tokens, got {asked}"


def _check_context(lane: Lane, found: dict[str, Any], answer: Answer, flags: list[str]) -> None:
    context, prompt_tokens = found["context"], answer.prompt_tokens
    if context is None or not isinstance(prompt_tokens, int):
        flags.append("unknown: whether the context suffices (the server does not tell)")
        return
    limit = lane.sampling.max_tokens or 1
    if prompt_tokens + limit > context:
        raise ServerUnfit(
            f"lane {lane.name}: needs {prompt_tokens} tokens for its longest question and up to "
            f"{limit} for the answer, but the server's context is {context}; "
            f"--set max_tokens={max(1, context - prompt_tokens)} makes it a modified lane"
        )


async def _prove_by_prompt(
    asker: Asker,
    protocol: Protocol,
    name: str,
    prompt: str,
    answer: Answer,
    finding: FieldFinding,
) -> None:
    """Prove a field by what it does to the prompt's length, or thinking by its text."""
    if name == "thinking" and finding.value and answer.reasoning:
        finding.state, finding.evidence = "proven", "reasoning text"
        return
    others = [other for other in protocol.names() if other != name]
    try:
        without = await _probe(asker, protocol, prompt, names=others)
    except RequestFailed as failure:
        raise _as_server_error(failure) from failure
    if without.prompt_tokens != answer.prompt_tokens:
        finding.state = "proven"
        finding.evidence = (
            f"prompt of {answer.prompt_tokens} tokens with it, {without.prompt_tokens} without"
        )
    else:
        finding.evidence = "answered 200; same prompt length with and without it"


async def _check_start(asker: Asker, protocol: Protocol, prompt: str) -> None:
    """See that the lane's own first request, with its own limit, is taken; then hang up."""
    if "stream" not in protocol.names():
        return
    try:
        await _ask(asker, protocol, protocol.body(prompt), only_start=True)
    except RequestFailed as failure:
        if failure.kind in ("http_400", "http_422"):
            raise ServerUnfit(
                f"lane {protocol.lane.name}: the server rejects its request: "
                f"{failure.kind}: {failure.detail}"
            ) from failure
        raise _as_server_error(failure) from failure


async def _warm_up(asker: Asker, protocol: Protocol, text: str, flags: list[str]) -> None:
    try:
        body = protocol.body(text, max_tokens=0)
        body.pop("stream", None)
        await _ask(asker, protocol, body)
    except RequestFailed as failure:
        flags.append(f"warm-up failed: {failure.kind}: {failure.detail}")
