"""The cluster-wide budgets of every model that has some, lent to hosts with each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollout_engine.config import ModelSpec
from rollout_engine.exchange import Demand, Lease
from rollout_engine.leases import PermitLease, TokenLease


class Lent(NamedTuple):
    """What goes to a host with the next request."""

    leases: dict[str, Lease]
    starved: bool
    """It got fewer permits than it could use."""
    waits_for_tokens: bool
    """Its calls may wait for a request rate: it should be asked again soon."""


class Budgets:
    """Permits and request rates by model name; a model without either is not limited."""

    def __init__(self, models: Sequence[ModelSpec]) -> None:
        self._names = [model.name for model in models]
        self._permits = {model.name: PermitLease(model.max_concurrency) for model in models if model.max_concurrency}
        self._tokens = {
            model.name: TokenLease(model.requests_per_minute) for model in models if model.requests_per_minute
        }
        self._waiting: dict[str, dict[str, float]] = {}

    def join(self, host: str) -> None:
        for lease in self._permits.values():
            lease.join(host)

    def lost(self, host: str, returns_at: float) -> None:
        """What the host had returns when its lease has ended."""
        self._waiting.pop(host, None)
        for lease in self._permits.values():
            lease.lost(host, returns_at)

    def lend(self, host: str, rollouts: Sequence[int], now: float) -> Lent:
        """`rollouts`: how many of each model the host holds, which is how many calls it could make at once."""
        waiting = self._waiting.get(host, {})
        leases: dict[str, Lease] = {}
        starved = waits = False
        for name, held in zip(self._names, rollouts, strict=True):
            permits, tokens = -1, -1.0
            if name in self._permits:
                self._permits[name].want(host, held)
                permits = self._permits[name].lend(host, now)
                starved |= permits < held
            if name in self._tokens:
                tokens = self._tokens[name].lend(waiting.get(name, 1.0), now)
                waits |= held > 0
            leases[name] = Lease(permits, tokens)
        return Lent(leases, starved, waits)

    def confirm(self, host: str, demand: Mapping[str, Demand]) -> None:
        """What the host says in its reply to the newest request."""
        for name, lease in self._permits.items():
            lease.confirm(host, demand[name].held)
        self._waiting[host] = {name: its.waiting - its.tokens for name, its in demand.items()}

    @property
    def has_idle_permits(self) -> bool:
        """Whether a starved host could be given something."""
        return any(lease.lent < lease.limit for lease in self._permits.values())
