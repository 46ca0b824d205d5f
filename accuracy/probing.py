"""What commands beyond a lane need of a server: who it is, its tokens, its cache, its arms."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.accuracy import builds
from draftproof.accuracy.asking import Asker
from draftproof.accuracy.lanes import Timeouts
from draftproof.accuracy.protocol import ServerFailed, ServerUnfit
from draftproof.accuracy.reading import Answer, RequestFailed
from draftproof.accuracy.receipt import without_userinfo
from draftproof.accuracy.runfolder import FolderError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"


@contextlib.contextmanager
def one_client(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone.

    Raises
    ------
    FolderError
        If another client has it, or it cannot be written.
    """
    try:
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise FolderError(f"{folder}: cannot be opened: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderError(f"{folder}: another client runs here") from None
        yield


@dataclass(frozen=True)
class Server:
    """A server as the command line names it: `LABEL=URL`, or a URL alone."""

    label: str
    url: str


@dataclass(frozen=True)
class Served:
    """What a server told of itself.

    Attributes
    ----------
    server : Server
    model : str
    told : dict
        By path; not yet redacted.
    build : dict
        What of it tells the build; see `draftproof.accuracy.builds`.
    """

    server: Server
    model: str
    told: dict[str, Any]
    build: dict[str, Any]

    @property
    def has_generate(self) -> bool:
        """Whether it is SGLang's kind, with `/generate` and `/flush_cache`."""
        return "/get_model_info" in self.told or "/get_server_info" in self.told

    def figure(self, *names: str) -> int | None:
        """First whole number above 0 that stands under one of the names, wherever it was told."""
        for name in names:
            for value in _under(self.told, name):
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    @property
    def context(self) -> int | None:
        """Tokens that prompt and answer may have together."""
        return self.figure("max_model_len", "context_length", "max_context_length", "context_len")

    def receipt(self) -> dict[str, Any]:
        """For a receipt, before redaction."""
        return {
            "label": self.server.label,
            "base_url": without_userinfo(self.server.url),
            "model": self.model,
            "told": self.told,
            "build": self.build,
            "simulated_acceptance": builds.simulated_acceptance(self.told),
        }


def _under(value: Any, name: str) -> list[Any]:
    """All values that stand under a name, at any depth."""
    if isinstance(value, dict):
        here = [value[name]] if name in value else []
        return here + [found for inner in value.values() for found in _under(inner, name)]
    if isinstance(value, list):
        return [found for inner in value for found in _under(inner, name)]
    return []


def parse_servers(given: list[str]) -> list[Server]:
    """Read `--server` options: URLs, several of them with commas between, each perhaps LABEL=URL.

    Without labels the first is A, the second B, and so on.

    Raises
    ------
    ValueError
        If some have labels and some not, or a label is given twice.
    """
    parts = [part for text in given for part in text.split(",")]
    matches = [re.match(r"([A-Za-z0-9_.-]+)=(.+)$", part) for part in parts]
    if any(matches) and not all(matches):
        raise ValueError(f"--server: either all have labels (LABEL=URL) or none, got {parts}")
    servers = [
        Server(*match.groups()) if match else Server(chr(ord("A") + place), part)
        for place, (part, match) in enumerate(zip(parts, matches, strict=True))
    ]
    labels = [server.label for server in servers]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--server: label {label!r} is given twice")
    return servers


def parse_keys(given: list[str], servers: list[Server]) -> dict[str, str | None]:
    """Read `--api-key` options: one key for a single server, LABEL=KEY where there are several.

    Without any, a single server gets `OPENAI_API_KEY`; no key ever goes to two servers.

    Raises
    ------
    ValueError
        If a key names no server's label. The key is not repeated.
    """
    keys: dict[str, str | None] = {server.label: None for server in servers}
    if not given and len(servers) == 1:
        keys[servers[0].label] = os.environ.get("OPENAI_API_KEY") or None
    for text in given:
        label, equals, key = text.partition("=")
        if equals and label in keys:
            keys[label] = key
        elif len(servers) == 1:
            keys[servers[0].label] = text
        else:
            raise ValueError(f"--api-key: must be LABEL=KEY, with a label of {', '.join(keys)}")
    return keys


async def learn(asker: Asker, server: Server, model: str | None) -> Served:
    """Ask a server who it is.

    Raises
    ------
    ServerUnfit
        If nothing answers, or the model is not to be had.
    ServerFailed
        If it answers with a fault.
    """
    try:
        reply = await asker.get("/v1/models")
    except RequestFailed as failure:
        raise ServerUnfit(
            f"--server: no server answers at {without_userinfo(server.url)}: {failure.detail}"
        ) from failure
    if reply.status in (401, 403):
        raise ServerUnfit(f"--api-key: the server answers {reply.status} to /v1/models")
    if reply.status != 200:
        raise ServerFailed(f"the server answers {reply.status} to /v1/models")
    told, build = await builds.tell(asker.client)
    told["/v1/models"] = builds.as_json(reply)
    listing = told["/v1/models"]
    cards = listing.get("data") if isinstance(listing, dict) else None
    ids = [card["id"] for card in cards or () if isinstance(card, dict) and card.get("id")]
    if model is None and len(ids) != 1:
        raise ServerUnfit(f"--model: is needed, the server lists {ids or 'no model'}")
    if model is not None and ids and model not in ids:
        raise ServerUnfit(f"--model: the server has no {model!r}, it lists {ids}")
    return Served(server, model or ids[0], told, build)


async def require_same_build(asker: Asker, served: Served) -> None:
    """See that the server is still the one that was learnt of.

    Raises
    ------
    ServerFailed
        If what tells its build has changed.
    """
    _, build = await builds.tell(asker.client)
    changed = builds.changes(served.build, build)
    if changed:
        raise ServerFailed(f"the server changed while it was asked: {'; '.join(changed)}")


Token = list[Any]  # [text, log probability, [[text, log probability], ...] likeliest first]


def tokens_of(answer: Answer) -> list[Token] | None:
    """The tokens of a chat answer with their log probabilities; None unless all were told.

    The answer must have been asked for with `keeps`.
    """
    tokens = []
    for event in answer.kept:
        for choice in event.get("choices") or ():
            for token in (choice.get("logprobs") or {}).get("content") or ():
                top = [[one["token"], one["logprob"]] for one in token.get("top_logprobs") or ()]
                tokens.append(
                    [token["token"], token["logprob"], sorted(top, key=lambda one: -one[1])]
                )
    return tokens or None


def cached_tokens(answer: Answer) -> int | None:
    """Prompt tokens that came from the prefix cache, None if the server does not tell."""
    for event in reversed(answer.kept):
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if isinstance(details.get("cached_tokens"), int):
            return int(details["cached_tokens"])
        meta = event.get("meta_info") or {}
        if isinstance(meta.get("cached_tokens"), int):
            return int(meta["cached_tokens"])
    return None


def chat_body(
    model: str, messages: str | list[dict[str, Any]], max_tokens: int, **fields: Any
) -> dict[str, Any]:
    """Write a greedy chat request that is streamed with its usage; `fields` are added."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def default_timeouts() -> Timeouts:
    """Bounds of requests outside of lanes."""
    return Timeouts(connect_s=10.0, idle_s=120.0, total_s=1800.0)
