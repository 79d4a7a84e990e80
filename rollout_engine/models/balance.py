"""Chooses which of a model's servers a call goes to: pure, told the time.

Calls that share a prefix (the same task's, the same rollout's) go to the same server, whose prefix cache has it:
rendezvous hashing on (round, task), so that a server that goes away moves nobody else's calls. A server that is much
busier than the others hands calls on to the next in the key's order, and one that fails is left alone until a probe,
and then one call, has gone well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

LOAD_FACTOR = 1.25
"""A server takes no more calls than this times the mean of those in rotation, rounded up."""
FAILURES = 3
"""Faults (connection, 5xx, no answer) one after the other that take a server out of rotation."""
PROBE_S = 2.0
"""Pause before the first probe of a server that is down; doubles with each that fails."""
PROBE_MAX_S = 30.0


class Health(StrEnum):
    UP = "up"
    DOWN = "down"
    TRIAL = "trial"
    """A probe went well: one call shows whether it is up."""


@dataclass(slots=True)
class Server:
    """One server, as this host sees it."""

    url: str
    in_flight: int = 0
    health: Health = Health.UP
    failures: int = 0
    probes: int = 0
    """Probes that failed since it is down."""
    probe_at: float = math.inf


class Balance:
    """Picks servers by key. `limit`: calls in flight at one server from this host; None: no limit of its own."""

    def __init__(self, urls: Sequence[str], limit: int | None = None) -> None:
        self.servers = [Server(url) for url in urls]
        self._limit = limit
        self._orders: dict[Hashable, tuple[int, ...]] = {}

    def pick(self, key: Hashable, avoid: Collection[int] = ()) -> int:
        """The number of the server for the next call of this key.

        `avoid`: servers on which this call has failed; they are taken only where there is no other. Where all are
        down, the key's own order decides, as if all were up: a fault is better than no answer.
        """
        if len(self.servers) == 1:
            return 0
        order = self.order(key)
        usable = [number for number in order if self._usable(self.servers[number])]
        for group in ([number for number in usable if number not in avoid], usable):
            if group:
                return self._least_loaded_in_order(group, usable)
        return next((number for number in order if number not in avoid), order[0])

    def _least_loaded_in_order(self, group: Sequence[int], usable: Sequence[int]) -> int:
        total = sum(self.servers[number].in_flight for number in usable) + 1
        bound = math.ceil(LOAD_FACTOR * total / len(usable))
        if self._limit is not None:
            bound = min(bound, self._limit)
        for number in group:
            if self.servers[number].in_flight < bound:
                return number
        return min(group, key=lambda number: self.servers[number].in_flight)

    def full(self, number: int) -> bool:
        """Whether a server that was picked has reached its own limit."""
        return self._limit is not None and self.servers[number].in_flight >= self._limit

    @staticmethod
    def _usable(server: Server) -> bool:
        return server.health is Health.UP or (server.health is Health.TRIAL and not server.in_flight)

    def order(self, key: Hashable) -> tuple[int, ...]:
        """All servers, as this key prefers them: the same on every host, and for the others when one is gone."""
        found = self._orders.get(key)
        if found is None:
            if len(self._orders) >= 4096:
                self._orders.clear()
            numbers = range(len(self.servers))
            found = tuple(sorted(numbers, key=lambda number: _weight(self.servers[number].url, key), reverse=True))
            self._orders[key] = found
        return found

    # -- what becomes of calls ----------------------------------------------------------------------------------

    def began(self, number: int) -> None:
        self.servers[number].in_flight += 1

    def ended(self, number: int, now: float, *, fault: bool | None) -> None:
        """`fault`: whether the server failed; None where the call says nothing of it (it was cancelled)."""
        server = self.servers[number]
        server.in_flight -= 1
        if fault is None:
            return
        if not fault:
            server.health, server.failures, server.probes = Health.UP, 0, 0
            return
        server.failures += 1
        if server.health is Health.TRIAL or server.failures >= FAILURES:
            self._down(server, now)

    def probed(self, number: int, now: float, *, well: bool) -> None:
        """A probe of a server that is down has ended."""
        server = self.servers[number]
        if server.health is not Health.DOWN:
            return
        if well:
            server.health = Health.TRIAL
        else:
            server.probes += 1
            self._down(server, now)

    def _down(self, server: Server, now: float) -> None:
        server.health = Health.DOWN
        server.probe_at = now + min(PROBE_MAX_S, PROBE_S * 2.0 ** min(server.probes, 16))

    def due(self, now: float) -> list[int]:
        """The servers to probe now."""
        return [
            number for number, server in enumerate(self.servers) if self._is_down(server) and server.probe_at <= now
        ]

    def next_probe(self) -> float | None:
        """When the next probe is due; None where no server is down."""
        return min((server.probe_at for server in self.servers if self._is_down(server)), default=None)

    @staticmethod
    def _is_down(server: Server) -> bool:
        return server.health is Health.DOWN


def _weight(url: str, key: Hashable) -> bytes:
    return blake2b(f"{url}\0{key!r}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
