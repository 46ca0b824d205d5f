"""Watch over requests under way: end those that do not move, see whether the server is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from draftproof.accuracy.client import Client
from draftproof.accuracy.lanes import Timeouts
from draftproof.accuracy.reading import RequestFailed

# A server that answers none of so many probes in a row is gone.
PROBES = 3
_PROBE_PAUSE_S = 1.0
# Time without a move of any answer after which the server is asked whether it is alive.
_SILENCE_S = 5.0
_LOOK_EVERY_S = 0.2


class Health:
    """Asks a server whether it is alive; all who want to know at the same time share the probes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._check: asyncio.Task[bool] | None = None

    async def is_alive(self) -> bool:
        """Whether the server answers one of a few probes."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._probe())
        return await asyncio.shield(self._check)

    async def _probe(self) -> bool:
        for probe in range(PROBES):
            if probe:
                await asyncio.sleep(_PROBE_PAUSE_S)
            if await self._client.is_alive():
                return True
        return False


class Watch:
    """Ends what is too slow or does not move, and calls out if the server is gone.

    Parameters
    ----------
    client : Client
        Its exchanges are watched.
    timeouts : Timeouts
        `idle_s` without a move on a stream, `unstreamed_s` for an answer that is not streamed,
        `total_s` for any.
    health : Health
        Asked when nothing moves.
    on_gone : callable
        Called once, with the reason, if the server is gone.

    Attributes
    ----------
    last_landed : float
        When an answer or a failure last came, by `time.monotonic()`; whoever asks sets it.
    """

    def __init__(
        self,
        client: Client,
        timeouts: Timeouts,
        health: Health,
        on_gone: Callable[[str], None],
    ) -> None:
        self._client = client
        self._timeouts = timeouts
        self._health = health
        self._on_gone = on_gone
        self.last_landed = time.monotonic()

    async def keep(self) -> None:
        """Watch until it is cancelled, or the server is gone."""
        silence_s = min(_SILENCE_S, self._timeouts.idle_s)
        probe_at = 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            exchanges = list(self._client.exchanges)
            if not exchanges:
                continue
            moved = max([self.last_landed, *(one.last_move or 0.0 for one in exchanges)])
            # Requests that have only begun are no silence.
            since = max(moved, min(one.started for one in exchanges))
            if now - since > silence_s and now >= probe_at:
                if not await self._health.is_alive():
                    self._on_gone(f"the server is gone (silent, and {PROBES} health probes failed)")
                    return
                probe_at = time.monotonic() + silence_s
            for one in exchanges:
                age_s = now - one.started
                if age_s > self._timeouts.total_s:
                    text = f"no whole answer within {self._timeouts.total_s:g} s"
                    one.end(RequestFailed("timeout", text))
                elif one.is_streamed:
                    # Before its first move a request may wait its turn, while others get theirs.
                    still_s = now - (one.last_move or max(one.started, moved))
                    if still_s > self._timeouts.idle_s:
                        text = f"no progress for {self._timeouts.idle_s:g} s"
                        one.end(RequestFailed("stalled", text))
                elif age_s > self._timeouts.unstreamed_s:
                    text = f"not streamed, and no answer in {self._timeouts.unstreamed_s:g} s"
                    one.end(RequestFailed("timeout", text))
