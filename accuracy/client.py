"""Ask a server over HTTP: streamed chat completions and SGLang's `/generate`, one answer a request.

Nothing here retries and no read has a time limit of its own: a long answer is not a hang. Whoever
asks watches `Exchange.last_move` and ends an exchange that does not move for too long
(`draftproof.accuracy.asking` does both).
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi
from aiohttp.http import HttpProcessingError

from draftproof.accuracy.reading import (
    Answer,
    ChatReader,
    CompletionReader,
    EventSplitter,
    GenerateReader,
    Reader,
    RequestFailed,
)

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


# Called at each read that brought an answer forward: by the clock of `time.monotonic()`, and what
# has come so far.
Observer = Callable[[float, Answer], None]


@dataclass(eq=False)
class Exchange:
    """One request under way, for whoever watches over it. Times by `time.monotonic()`.

    `last_move` is when the answer last came forward (content, reasoning, a finish reason); comment
    lines and empty events are no moves. An answer that is not streamed has none.
    """

    started: float
    is_streamed: bool
    last_move: float | None = None
    task: asyncio.Task[Answer] | None = None
    ended_because: RequestFailed | None = None

    def end(self, reason: RequestFailed) -> None:
        """Give the exchange up; whoever awaits the answer gets `reason`."""
        self.ended_because = reason
        if self.task is not None:
            self.task.cancel()


class Reply(NamedTuple):
    """Status, body and headers (names in lower case) of a GET."""

    status: int
    body: bytes
    headers: dict[str, str]
    retry_after_s: float | None


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
        return await self._request("GET", path)

    async def post(self, path: str) -> Reply:
        """POST to a path that takes no body, such as one that flushes a cache; else as `get`."""
        return await self._request("POST", path)

    async def _request(self, method: str, path: str) -> Reply:
        limit = aiohttp.ClientTimeout(total=self.probe_s)
        try:
            async with self._session.request(
                method, self.root + path, timeout=limit, allow_redirects=False
            ) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                body = await response.read()
                return Reply(response.status, body, headers, _retry_after_s(headers))
        except _BROKEN_ERRORS as error:
            raise RequestFailed("connect", _say(error), is_transport=True) from error

    async def is_alive(self) -> bool:
        """Whether the server answers a health probe; any answer below 500 counts."""
        try:
            return (await self.get("/health")).status < 500
        except RequestFailed:
            return False

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        only_start: bool = False,
        *,
        keeps: bool = False,
        observe: Observer | None = None,
    ) -> Answer:
        """Send one request and read its answer.

        Parameters
        ----------
        path : str
            `/v1/chat/completions` or `/generate`.
        body : dict
            The request; `stream` says how to read the answer.
        only_start : bool, optional
            Hang up at the first event.
        keeps : bool, optional
            Keep the events in `Answer.kept`, for what `Answer` has no place for (log
            probabilities, tool calls).
        observe : callable, optional
            Called at each read of a stream that brought the answer forward.

        Raises
        ------
        RequestFailed
            If no whole answer came.
        """
        exchange = Exchange(time.monotonic(), bool(body.get("stream")))
        if path == "/generate":
            reader: Reader = GenerateReader(self.is_cumulative, keeps)
        elif path == "/v1/completions":
            reader = CompletionReader(keeps)
        else:
            reader = ChatReader(keeps)
        exchange.task = asyncio.create_task(
            self._ask(exchange, path, body, reader, only_start, observe)
        )
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
        self,
        exchange: Exchange,
        path: str,
        body: dict[str, Any],
        reader: Reader,
        only_start: bool,
        observe: Observer | None,
    ) -> Answer:
        data = json.dumps(body).encode()
        try:
            async with self._session.post(
                self.root + path, data=data, allow_redirects=False
            ) as response:
                with _ended_with_its_connection(response):
                    return await self._read(exchange, response, reader, only_start, observe)
        except _CONNECT_ERRORS as error:
            raise RequestFailed("connect", _say(error), is_transport=True) from error
        except _BROKEN_ERRORS as error:
            raise RequestFailed("dropped", _say(error), is_transport=True) from error

    async def _read(
        self,
        exchange: Exchange,
        response: aiohttp.ClientResponse,
        reader: Reader,
        only_start: bool,
        observe: Observer | None,
    ) -> Answer:
        if response.status != 200:
            said = (await response.read()).decode("utf-8", "replace")
            raise RequestFailed(
                f"http_{response.status}",
                self._without_key(said),
                retry_after_s=_retry_after_s(response.headers),
            )
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            return reader.whole(await response.read())
        answer, splitter, moves = reader.answer, EventSplitter(), 0
        # All that has come, which may be many events; nothing only at the stream's end.
        while chunk := await response.content.readany():
            for data in splitter.feed(chunk):
                reader.event(data)
            if reader.moves == moves:
                continue
            moves = reader.moves
            exchange.last_move = time.monotonic()
            if answer.first_s is None and answer.events:
                answer.first_s = exchange.last_move - exchange.started
                if only_start:
                    return answer
            if observe is not None:
                observe(exchange.last_move, answer)
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


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to be left alone, None if it does not say."""
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdecimal():
        return float(said)
    moment = email.utils.parsedate_tz(said)
    if moment is None:
        return None
    return max(0.0, email.utils.mktime_tz(moment) - time.time())
