"""Ask a server until there is an answer or an error: bounded retries, watched over, all counted.

What every command that asks a server shares:

    async with asking(base_url, api_key, timeouts, connections=8) as asker:
        asked = await asker.ask("/v1/chat/completions", body)

`asked` holds an answer or a failure, and how it was come by; a server that is gone raises
`ServerGone`. `Pool` drives many requests at once and can be stopped at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

from draftproof.accuracy.client import PROBE_S, Client, Observer, Reply
from draftproof.accuracy.lanes import Timeouts
from draftproof.accuracy.reading import Answer, RequestFailed
from draftproof.accuracy.watching import Health, Watch

# Attempts at one answer over a connection that breaks, and the first pause between them.
TRANSPORT_ATTEMPTS = 3
_BACKOFF_S = 0.5
# A server that has too much to do is asked again after so long, then twice as long, and so on.
_OVERLOAD_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Every pause is longer by a random part, so that not all ask again at the same moment.
_JITTER = 0.25

Job = TypeVar("Job")


class ServerGone(RuntimeError):
    """The server does not answer any more."""


@dataclass
class Asked:
    """What became of one question to the server.

    Attributes
    ----------
    answer : Answer or None
    failure : RequestFailed or None
        Exactly one of both is there.
    started : str
        UTC, when it was first asked.
    attempts : int
        Requests sent for it.
    retried : list of str
        Kinds of the failures after which it was asked again.
    paused_s : float
        Seconds waited because the server had too much to do.
    """

    started: str
    answer: Answer | None = None
    failure: RequestFailed | None = None
    attempts: int = 0
    retried: list[str] = field(default_factory=list)
    paused_s: float = 0.0


@dataclass
class Tally:
    """What asking took so far: requests, failures asked again by kind, seconds paused for."""

    requests: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    paused_s: float = 0.0


class Asker:
    """Asks one server; see `asking`, which makes it.

    Attributes
    ----------
    client : Client
        For single requests that nothing retries.
    tally : Tally
    gone : str or None
        Why the server is held to be gone.
    """

    def __init__(self, client: Client, timeouts: Timeouts) -> None:
        self.client = client
        self.tally = Tally()
        self.gone: str | None = None
        self._overload_s = timeouts.overload_s
        self._health = Health(client)
        self._watch = Watch(client, timeouts, self._health, self._lose)
        self._keeping: asyncio.Task[None] | None = None

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        only_start: bool = False,
        *,
        keeps: bool = False,
        observe: Observer | None = None,
    ) -> Asked:
        """Ask until there is an answer or an error that stands; parameters as of `Client.ask`.

        A connection that breaks is tried three times in all; a server that says 429 or 503 is asked
        again after `Retry-After`, or ever longer pauses, for `overload_s` in all.

        Raises
        ------
        ServerGone
            If the server answers no health probe after a connection broke, or in a long silence.
        """
        asked, broken, busy = Asked(now()), 0, 0
        while True:
            asked.attempts += 1
            self.tally.requests += 1
            try:
                asked.answer = await self.client.ask(
                    path, body, only_start, keeps=keeps, observe=observe
                )
            except RequestFailed as failure:
                pause_s = None
                if failure.is_transport:
                    broken += 1
                    if self.gone is None and not await self._health.is_alive():
                        self._lose(f"the server is gone ({failure.kind}: {failure.detail})")
                    pause_s = _BACKOFF_S * 2 ** (broken - 1)
                    if broken >= TRANSPORT_ATTEMPTS:
                        pause_s = None
                elif failure.is_overload:
                    busy += 1
                    pause_s = self._pause_s(failure, busy, asked.paused_s)
                    if pause_s is not None:
                        asked.paused_s += pause_s
                        self.tally.paused_s += pause_s
                if self.gone is not None:
                    raise ServerGone(self.gone) from failure
                if pause_s is None:
                    asked.failure = failure
                    break
                asked.retried.append(failure.kind)
                self.tally.retried[failure.kind] += 1
                await asyncio.sleep(pause_s)
            else:
                break
        self._watch.last_landed = asyncio.get_running_loop().time()
        return asked

    async def get(self, path: str) -> Reply:
        """GET a path, and again while the server has too much to do; see `Client.get`."""
        paused_s, busy = 0.0, 0
        while True:
            reply = await self.client.get(path)
            if reply.status not in (429, 503):
                return reply
            busy += 1
            failure = RequestFailed(f"http_{reply.status}", "", retry_after_s=reply.retry_after_s)
            pause_s = self._pause_s(failure, busy, paused_s)
            if pause_s is None:
                return reply
            paused_s += pause_s
            self.tally.paused_s += pause_s
            self.tally.retried[failure.kind] += 1
            await asyncio.sleep(pause_s)

    def _pause_s(self, failure: RequestFailed, busy: int, paused_s: float) -> float | None:
        """How long to leave a busy server alone, None if that would be too long in all."""
        least_s = failure.retry_after_s
        if least_s is None:
            least_s = min(_OVERLOAD_PAUSE_S * 2 ** (busy - 1), _LONGEST_PAUSE_S)
        # "Retry-After: 0" does not mean: at once and for ever.
        least_s = max(least_s, _OVERLOAD_PAUSE_S / 4)
        pause_s = least_s * (1 + _JITTER * random.random())
        return pause_s if paused_s + pause_s <= self._overload_s else None

    def _lose(self, reason: str) -> None:
        """Take the server for gone: all that is under way ends."""
        if self.gone is None:
            self.gone = reason
            for exchange in list(self.client.exchanges):
                exchange.end(RequestFailed("connect", reason, is_transport=True))

    async def _start(self) -> None:
        self._keeping = asyncio.create_task(self._watch.keep())

    async def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            (outcome,) = await asyncio.gather(self._keeping, return_exceptions=True)
            await self.client.close()
            if isinstance(outcome, Exception):
                raise outcome


@contextlib.asynccontextmanager
async def asking(
    base_url: str, api_key: str | None, timeouts: Timeouts, connections: int
) -> AsyncIterator[Asker]:
    """Open a connection pool to a server, with a watch over it, and close both.

    Parameters
    ----------
    base_url : str
        With or without a trailing `/v1`.
    api_key : str or None
        Sent as a bearer token.
    timeouts : Timeouts
        A lane's, or ones like a lane's.
    connections : int
        Requests in flight at most.
    """
    client = Client(
        base_url,
        api_key,
        connect_s=timeouts.connect_s,
        probe_s=min(PROBE_S, timeouts.idle_s),
        connections=connections,
    )
    asker = Asker(client, timeouts)
    await asker._start()
    try:
        yield asker
    finally:
        await asker._stop()


class Pool(Generic[Job]):
    """So many workers over one line of jobs, until all are done or someone stops them.

    Parameters
    ----------
    jobs : iterable
        Taken one by one, in order.
    do : callable
        Does one job; a `ServerGone` from it stops the pool.
    workers : int

    Attributes
    ----------
    stopped : str or None
        Why the pool was stopped, if it was.
    """

    def __init__(
        self, jobs: Iterable[Job], do: Callable[[Job], Awaitable[None]], workers: int
    ) -> None:
        self._jobs = iter(jobs)
        self._do = do
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self.stopped: str | None = None

    def stop(self, reason: str) -> None:
        """End early; what is under way is given up."""
        if self.stopped is None:
            self.stopped = reason
            for task in self._tasks:
                task.cancel()

    async def run(self) -> None:
        """Do the jobs.

        Raises
        ------
        Exception
            The first that a job raised, once all workers have ended.
        """
        if self.stopped is None:
            self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _work(self) -> None:
        for job in self._jobs:
            try:
                await self._do(job)
            except ServerGone as gone:
                self.stop(str(gone))
            if self.stopped is not None:
                return


def now() -> str:
    """The time in UTC, to the millisecond, as receipts and rows have it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
