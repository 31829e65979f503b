"""Number of requests that a server gets at a time: fewer after each 429, more while it answers, pauses as it requests.

The limit follows TCP's rule (Chiu and Jain 1989): one more for each full round of answers, half of it where the server
refuses. Refusals of one burst count once: those of requests that were sent before the limit was last halved.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds to wait after a 429 without Retry-After; each further one without an answer between doubles them."""


@dataclass
class Pace:
    """Estimated limit of a server, kept from one step to the next."""

    most: int
    """Requests at a time that the settings allow."""
    allowed: float
    """Requests at a time that the server seems to accept, from 1 to `most`."""

    @classmethod
    def full(cls, most: int) -> "Pace":
        return cls(most, float(most))


class Throttle:
    """Queue of requests, first come, first served, in the event loop that uses it."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._free = asyncio.Semaphore(int(pace.allowed))
        self._owed = 0
        """Turns that are withdrawn as soon as they are released."""
        self._resume = self._halved = 0.0
        self._refusals = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Wait for a turn to send one request; yields the time at which it is sent."""
        now = asyncio.get_running_loop().time
        await self._free.acquire()
        try:
            while (wait := self._resume - now()) > 0:
                await asyncio.sleep(wait)
            yield now()
        finally:
            self._give()

    def answered(self) -> None:
        """Record that the server accepted a request."""
        self._refusals = 0
        self._allow(min(self.pace.most, self.pace.allowed + 1 / self.pace.allowed))

    def refused(self, sent: float, retry_after: float | None) -> None:
        """Record that the server had too many requests; nothing is sent for `retry_after` seconds.

        Args:
            sent: the time of the refused request, as `turn` returned it.
            retry_after: the server's requested pause; None: it gives no time.
        """
        now = asyncio.get_running_loop().time()
        if sent >= self._halved:
            self._halved = now
            self._refusals += 1
            self._allow(max(1.0, self.pace.allowed / 2))
        pause = min(FIRST_PAUSE * 2 ** (self._refusals - 1), LONGEST_PAUSE) if retry_after is None else retry_after
        self._resume = max(self._resume, now + pause)

    def _allow(self, requests: float) -> None:
        change = int(requests) - int(self.pace.allowed)
        self.pace.allowed = requests
        self._owed -= min(change, 0)
        for _ in range(change):
            self._give()

    def _give(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._free.release()
