"""The channels to a model's servers: each try goes to the one that `balance.py` picks, and the sick are probed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from rollout_engine.errors import ModelConnectionError, ModelServerError, ModelTimeout
from rollout_engine.models.balance import Balance
from rollout_engine.models.http import Channel, Reply
from rollout_engine.models.retry import Failed

PROBE_TIMEOUT_S = 5.0
"""A server that has not answered a probe by then is down."""
FULL_POLL_S = 0.05
"""How often a call that waits for a server below its own limit looks again."""
_FAULTS = (ModelConnectionError, ModelServerError, ModelTimeout)


class Picked(NamedTuple):
    """A server for one try, and its number for the tries after it."""

    channel: Channel
    number: int


class Pool:
    """One channel per URL. Open from the first call on; `close` it."""

    def __init__(self, channels: Sequence[Channel], limit: int | None) -> None:
        """`limit`: calls in flight at one server; None: no limit."""
        self.channels = list(channels)
        self.balance = Balance([channel.base_url for channel in channels], limit)
        self.single = self.channels[0] if len(self.channels) == 1 and limit is None else None
        """The only server, of which there is nothing to choose or to count."""
        self._prober: asyncio.Task[None] | None = None

    async def pick(self, key: Hashable, avoid: set[int], until: float) -> Picked:
        """The server for the next try; waits for one below its limit, by `until` on the loop's clock."""
        clock = asyncio.get_running_loop().time
        number = self.balance.pick(key, avoid)
        while self.balance.full(number) and clock() < until:
            await asyncio.sleep(min(FULL_POLL_S, until - clock()))
            number = self.balance.pick(key, avoid)
        return Picked(self.channels[number], number)

    @contextlib.asynccontextmanager
    async def using(self, picked: Picked, avoid: set[int]) -> AsyncIterator[Outcome]:
        """Counts one try as in flight at its server; what was told as its outcome decides on the server's health."""
        outcome = Outcome()
        self.balance.began(picked.number)
        try:
            yield outcome
        finally:
            fault = outcome.fault
            if fault:
                avoid.add(picked.number)
            self.balance.ended(picked.number, asyncio.get_running_loop().time(), fault=fault)
            if fault and len(self.channels) > 1 and (self._prober is None or self._prober.done()):
                self._prober = asyncio.create_task(self._probe(), name="model server probes")

    async def _probe(self) -> None:
        """Runs while a server is down."""
        clock = asyncio.get_running_loop().time
        while (due := self.balance.next_probe()) is not None:
            await asyncio.sleep(max(0.0, due - clock()))
            for number in self.balance.due(clock()):
                self.balance.probed(number, clock(), well=await self._is_well(self.channels[number]))

    async def _is_well(self, channel: Channel) -> bool:
        """GET /health at the server's root, else /models: anything but a fault or a 5xx is an answer."""
        until = asyncio.get_running_loop().time() + PROBE_TIMEOUT_S
        reply: Reply | Failed = Failed(ModelTimeout(""))
        for url in probe_urls(channel.base_url):
            reply = await channel.get(url, until)
            if isinstance(reply, Failed) or reply.status != 404:
                break
        return not isinstance(reply, Failed) and reply.status < 500

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        for channel in self.channels:
            await channel.close()


class Outcome:
    """How a try went, as far as its server's health is concerned; None: it was cancelled."""

    def __init__(self) -> None:
        self.fault: bool | None = None

    def told(self, result: object) -> None:
        self.fault = isinstance(result, Failed) and isinstance(result.error, _FAULTS)


def probe_urls(base_url: str) -> tuple[str, str]:
    """Where a server says that it is well: vLLM's and SGLang's own way first, then the API's."""
    parts = urlsplit(base_url)
    health = parts._replace(path="/health", query="", fragment="").geturl()
    return health, parts._replace(path=parts.path.rstrip("/") + "/models", fragment="").geturl()
