"""Budgets, the permits of several hosts, and a server with a hidden limit, together in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_engine.budgets import CONTROL_S, Budgets
from rollout_engine.config import ModelSpec
from rollout_engine.models.retry import RETRY_AFTER_MIN_S
from rollout_engine.models.server_limits import Admission, ServerLimits
from rollout_engine.permits import Permits

TRIP_S = 0.002
"""From driver to host, or back."""


@dataclass
class Server:
    """Answers after its latency, or refuses at once."""

    admission: Admission
    latency_s: float = 0.1
    spread: float = 0.0
    """Latencies are drawn from 1 - spread to 1 + spread times the mean."""
    tells: bool = True
    """Whether a 429 has a Retry-After."""
    in_flight: int = 0
    most: int = 0
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each call that was let in and has ended."""
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def limit(self, **limits: Any) -> None:
        self.admission = Admission(ServerLimits(**limits))

    async def call(self) -> float | None:
        """None, or what to wait for (0: it does not say)."""
        now = asyncio.get_running_loop().time()
        wait = self.admission.admit(now, self.in_flight)
        if wait is not None:
            self.refused.append(now)
            return wait if self.tells and wait >= RETRY_AFTER_MIN_S else 0.0
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        factor = 1 + self.spread * self.draw.uniform(-1, 1)
        await asyncio.sleep(self.latency_s * factor * self.admission.slowness(self.in_flight))
        self.in_flight -= 1
        self.answered.append(asyncio.get_running_loop().time())
        self.spans.append((now, self.answered[-1]))
        return None

    def per_second(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.answered) / (until - since)

    def in_use(self, since: float, until: float) -> float:
        """Calls in flight, the mean over that time; those that have not ended yet are not among them."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.spans) / (until - since)

    def refused_share(self, since: float, until: float) -> float:
        refused = sum(since <= at < until for at in self.refused)
        return refused / max(1, refused + sum(since <= at < until for at in self.answered))


class Rig:
    """A driver's budgets and some hosts whose callers always have another call to make."""

    def __init__(self, server: Server, hosts: int, callers: int = 64, **model: Any) -> None:
        self.server, self.callers = server, callers
        self.budgets = Budgets([ModelSpec(name="m", kind="scripted", **model)])
        self.budget = self.budgets.models[0]
        self.permits = {
            f"h{number}": Permits(lambda number=number: self._news[f"h{number}"].set()) for number in range(hosts)
        }
        self._news = {name: asyncio.Event() for name in self.permits}
        self._tasks: list[asyncio.Task[None]] = []
        self.over_cap = 0
        self.began: list[float] = []

    async def run(self, seconds: float, at: dict[float, Callable[[], None]] | None = None) -> None:
        """Runs on, with things that happen at certain times."""
        loop = asyncio.get_running_loop()
        for moment, action in (at or {}).items():
            loop.call_at(moment, action)
        if not self._tasks:
            for name in self.permits:
                self.budgets.join(name)
                self._tasks.append(asyncio.create_task(self._serve(name)))
                self._tasks += [asyncio.create_task(self._caller(name)) for _ in range(self.callers)]
        await asyncio.sleep(seconds)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, name: str) -> None:
        """The exchanges with one host, which take TRIP_S each way."""
        loop, permits = asyncio.get_running_loop(), self.permits[name]
        while True:
            lent = self.budgets.lend(name, [self.callers], loop.time())
            await asyncio.sleep(TRIP_S)
            permits.renew(lent.leases["m"])
            try:
                async with asyncio.timeout(CONTROL_S):
                    await self._news[name].wait()
            except TimeoutError:
                pass
            self._news[name].clear()
            demand = permits.demand()
            await asyncio.sleep(TRIP_S)
            news = self.budgets.confirm(name, {"m": demand}, loop.time())
            if self.budgets.control(loop.time(), at_once=news.refused) or news.pause:
                for event in self._news.values():
                    event.set()
            assert self.budget.permits is None or self.budget.permits.lent <= max(self._caps())

    def _caps(self) -> list[float]:
        assert self.budget.permits is not None
        return [self.budget.permits.limit, self.budget.permits.lent]

    async def _caller(self, name: str) -> None:
        loop, permits = asyncio.get_running_loop(), self.permits[name]
        first = False
        while True:
            await permits.acquire(first=first)
            began = loop.time()
            self.began.append(began)
            wait = await self.server.call()
            if wait is None:
                permits.answered(loop.time() - began)
            else:
                permits.refused(wait or None)
            permits.release()
            first = wait is not None
            if wait == 0.0:
                await asyncio.sleep(0.5)
