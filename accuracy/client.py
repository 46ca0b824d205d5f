"""Ask a server over HTTP: streamed chat completions and SGLang's `/generate`, one answer a request.

Nothing here retries and no read has a time limit of its own: a long answer is not a hang. Whoever
asks watches `Exchange.last_byte` and ends an exchange that is silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi
from aiohttp.http import HttpProcessingError
from pydantic_core import from_json

# How much of a server's own error text is kept, in characters.
_DETAIL_CHARACTERS = 300
# How long a health probe may take: a busy server is slow, a dead one silent.
PROBE_S = 5.0
# An idle connection is not used again after so long: servers close theirs after 5 s and more.
_KEEP_ALIVE_S = 4.0

_CONNECT_ERRORS = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
)
_BROKEN_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError, asyncio.TimeoutError)


class RequestFailed(Exception):
    """A request that brought no answer.

    Attributes
    ----------
    kind : str
        `http_<status>`, `connect`, `dropped`, `stalled`, `timeout`, `garbage` or `server_error`.
    detail : str
        One line.
    is_transport : bool
        Whether the connection failed rather than the server refused: only these may be retried.
    """

    def __init__(self, kind: str, detail: str, is_transport: bool = False) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL_CHARACTERS]
        self.is_transport = is_transport


@dataclass
class Answer:
    """What a server answered; figures that it does not tell are None.

    `matched` is the stop word that ended the answer. `events` counts the stream's events with text.
    Times are seconds since the request was sent.
    """

    text: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    matched: str | None = None
    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    reasoning_tokens: Any = None
    spec_verify_ct: Any = None
    events: int = 0
    first_s: float | None = None
    total_s: float = 0.0


@dataclass(eq=False)
class Exchange:
    """One request under way, for whoever watches over it. Times by `time.monotonic()`."""

    started: float
    last_byte: float | None = None
    task: asyncio.Task[Answer] | None = None
    ended_because: RequestFailed | None = None

    def end(self, reason: RequestFailed) -> None:
        """Give the exchange up; whoever awaits the answer gets `reason`."""
        self.ended_because = reason
        if self.task is not None:
            self.task.cancel()


class Reply(NamedTuple):
    """Status and body of a GET."""

    status: int
    body: bytes


def tls_context() -> ssl.SSLContext:
    """Trust what SSL_CERT_FILE or SSL_CERT_DIR names, else certifi's authorities."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if not file and not folder:
        file = certifi.where()
    return ssl.create_default_context(cafile=file or None, capath=folder or None)


def _proxy(scheme: str, netloc: str) -> str | None:
    """Proxy of the environment (HTTP_PROXY and the like) for a server, None if there is none."""
    # aiohttp's own `trust_env` knows no ALL_PROXY, and sends passwords of a netrc file.
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or proxy_bypass(netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@dataclass
class Client:
    """One connection pool to one server.

    Parameters
    ----------
    base_url : str
        With or without a trailing `/v1`.
    api_key : str or None
        Sent as a bearer token.
    connect_s, probe_s : float
        Seconds to connect, and for everything but an answer.
    connections : int
        Requests in flight at most.
    """

    base_url: str
    api_key: str | None
    connect_s: float
    probe_s: float
    connections: int
    exchanges: set[Exchange] = field(default_factory=set)
    # Whether each event of a `/generate` stream carries all text so far, as it does by default.
    is_cumulative: bool = True

    def __post_init__(self) -> None:
        self.root = self.base_url.rstrip("/").removesuffix("/v1")
        try:
            server = urlsplit(self.root)
        except ValueError:
            server = urlsplit("")  # the first request says what is wrong
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        # User and password in the URL are sent instead.
        if self.api_key and "@" not in server.netloc:
            headers["authorization"] = f"Bearer {self.api_key}"
        # aiohttp, for its compiled HTTP parser: httpx costs three times the CPU at 150 events.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # One more, so that no probe ever waits for an answer.
                limit=self.connections + 1,
                keepalive_timeout=_KEEP_ALIVE_S,
                ssl=tls_context() if server.scheme == "https" else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=self.connect_s),
            proxy=_proxy(server.scheme, server.netloc),
            # The client asks for no compression, and a decoder could hold an event back.
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> Reply:
        """GET a path within `probe_s`.

        Raises
        ------
        RequestFailed
            If there is no response at all.
        """
        limit = aiohttp.ClientTimeout(total=self.probe_s)
        try:
            async with self._session.get(
                self.root + path, timeout=limit, allow_redirects=False
            ) as response:
                return Reply(response.status, await response.read())
        except _BROKEN_ERRORS as error:
            raise RequestFailed("connect", _say(error), is_transport=True) from error

    async def is_alive(self) -> bool:
        """Whether the server answers a health probe; any answer below 500 counts."""
        try:
            return (await self.get("/health")).status < 500
        except RequestFailed:
            return False

    async def ask(self, path: str, body: dict[str, Any], only_start: bool = False) -> Answer:
        """Send one request and read its answer.

        Parameters
        ----------
        path : str
            `/v1/chat/completions` or `/generate`.
        body : dict
            The request; `stream` says how to read the answer.
        only_start : bool, optional
            Hang up at the first event.

        Raises
        ------
        RequestFailed
            If no whole answer came.
        """
        exchange = Exchange(time.monotonic())
        exchange.task = asyncio.create_task(self._ask(exchange, path, body, only_start))
        self.exchanges.add(exchange)
        try:
            answer = await exchange.task
        except asyncio.CancelledError:
            if exchange.ended_because is not None:
                raise exchange.ended_because from None
            exchange.task.cancel()
            raise
        finally:
            self.exchanges.discard(exchange)
        answer.total_s = time.monotonic() - exchange.started
        return answer

    async def _ask(
        self, exchange: Exchange, path: str, body: dict[str, Any], only_start: bool
    ) -> Answer:
        reader = _GenerateReader(self.is_cumulative) if path == "/generate" else _ChatReader()
        data = json.dumps(body).encode()
        try:
            async with self._session.post(
                self.root + path, data=data, allow_redirects=False
            ) as response:
                with _ended_with_its_connection(response):
                    return await self._read(exchange, response, reader, only_start)
        except _CONNECT_ERRORS as error:
            raise RequestFailed("connect", _say(error), is_transport=True) from error
        except _BROKEN_ERRORS as error:
            raise RequestFailed("dropped", _say(error), is_transport=True) from error

    async def _read(
        self,
        exchange: Exchange,
        response: aiohttp.ClientResponse,
        reader: _Reader,
        only_start: bool,
    ) -> Answer:
        if response.status != 200:
            said = (await response.read()).decode("utf-8", "replace")
            raise RequestFailed(f"http_{response.status}", self._without_key(said))
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            return reader.whole(await response.read())
        answer = reader.answer
        rest = b""
        # All that has come, which may be many events; nothing only at the stream's end.
        while chunk := await response.content.readany():
            exchange.last_byte = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    reader.event(line[5:].strip())
            if answer.first_s is None and answer.events:
                answer.first_s = exchange.last_byte - exchange.started
                if only_start:
                    return answer
        return reader.end()

    def _without_key(self, text: str) -> str:
        return text.replace(self.api_key, "[redacted]") if self.api_key else text


@contextlib.contextmanager
def _ended_with_its_connection(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Let no one wait for a body whose connection is gone.

    After a fault in the body's framing aiohttp closes the connection and tells no reader.
    """
    # The whole body may be there already, and the connection with someone else.
    protocol = None if response.connection is None else response.connection.protocol
    closed = None if protocol is None else protocol.closed
    if closed is None:
        yield
        return

    def end(done: asyncio.Future[None]) -> None:
        done.exception()  # taken, or asyncio reports it
        if not response.content.is_eof() and response.content.exception() is None:
            response.content.set_exception(aiohttp.ClientPayloadError("the body is broken off"))

    closed.add_done_callback(end)
    try:
        yield
    finally:
        closed.remove_done_callback(end)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _garbage(data: bytes) -> RequestFailed:
    return RequestFailed("garbage", data[:_DETAIL_CHARACTERS].decode("utf-8", "replace"))


def _object(data: bytes) -> dict[str, Any]:
    """Read one JSON object, or fail as the server did."""
    try:
        # pydantic's parser: a third of json's time, and no lone surrogates, which no file can hold.
        value = from_json(data)
    except ValueError:
        raise _garbage(data) from None
    if not isinstance(value, dict):
        raise _garbage(data)
    if value.get("error") or value.get("object") == "error":
        raise RequestFailed("server_error", json.dumps(value.get("error") or value))
    return value


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return value


class _Reader:
    """Collects one answer from a stream's events or from one whole body."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._said: list[str] = []
        self._thought: list[str] = []
        self._is_done = False

    def event(self, data: bytes) -> None:
        """Take one event's data."""
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            self._take(_object(data), is_whole=False)
        except (TypeError, AttributeError, KeyError, IndexError):
            raise _garbage(data) from None

    def whole(self, data: bytes) -> Answer:
        """Take an answer that was not streamed."""
        try:
            self._take(_object(data), is_whole=True)
        except (TypeError, AttributeError, KeyError, IndexError):
            raise _garbage(data) from None
        return self._checked()

    def end(self) -> Answer:
        """Take the stream's end."""
        if self.answer.finish_reason is None and not self._is_done:
            raise RequestFailed(
                "dropped",
                f"the stream ended after {self.answer.events} events without a finish reason",
                is_transport=True,
            )
        return self._checked()

    def _checked(self) -> Answer:
        reason = self.answer.finish_reason
        if reason in ("abort", "error"):
            raise RequestFailed("server_error", f"finish_reason {reason!r}")
        if reason is not None and not isinstance(reason, str):
            raise RequestFailed("garbage", f"finish_reason {reason!r}")
        self.answer.text = "".join(self._said) if self._said else None
        self.answer.reasoning = "".join(self._thought) if self._thought else None
        return self.answer

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        raise NotImplementedError


class _ChatReader(_Reader):
    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        answer = self.answer
        usage = value.get("usage")
        if usage:
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.completion_tokens = usage.get("completion_tokens")
            answer.total_tokens = usage.get("total_tokens")
            details = usage.get("completion_tokens_details") or usage
            answer.reasoning_tokens = details.get("reasoning_tokens")
        choices = value["choices"] if is_whole else value.get("choices")
        if not choices:
            if is_whole:
                raise KeyError("choices")
            return
        choice = choices[0]
        said = choice["message"] if is_whole else choice.get("delta") or {}
        content = _text(said.get("content"))
        # vLLM renamed the field; SGLang keeps the older name.
        thought = _text(said.get("reasoning_content") or said.get("reasoning"))
        if content:
            self._said.append(content)
        if thought:
            self._thought.append(thought)
        answer.events += bool(content or thought)
        if choice.get("finish_reason") is not None:
            answer.finish_reason = choice["finish_reason"]
            matched = choice.get("matched_stop", choice.get("stop_reason"))
            # An end-of-text token matches as its number: no stop word.
            answer.matched = matched if isinstance(matched, str) else None


class _GenerateReader(_Reader):
    def __init__(self, is_cumulative: bool) -> None:
        super().__init__()
        self._is_cumulative = is_cumulative

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        answer, meta = self.answer, value["meta_info"]
        text = _text(value["text"]) or ""
        if self._is_cumulative and self._said:
            before = self._said.pop()
            if not text.startswith(before):
                raise TypeError("an event does not carry the text so far")
            answer.events += text != before
        else:
            answer.events += bool(text)
        self._said.append(text)
        reason = meta.get("finish_reason")
        if reason is not None:
            answer.finish_reason = reason["type"]
            matched = reason.get("matched")
            answer.matched = matched if isinstance(matched, str) else None
        answer.prompt_tokens = meta.get("prompt_tokens")
        answer.completion_tokens = meta.get("completion_tokens")
        answer.spec_verify_ct = meta.get("spec_verify_ct")
