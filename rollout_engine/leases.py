"""Shares of a cluster-wide budget, lent to hosts: pure, no clock of its own.

`PermitLease` keeps the sum of calls in flight at one model's server at or below its limit at every moment, also
while requests and replies are lost and while a host is lost: a share counts as lent from the moment it is sent until
the host has confirmed that it holds less, or until a lost host's lease has ended. A limit that is lowered takes effect
as hosts confirm their smaller shares; until then nothing more is lent. `RateLease` does the same for rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Share:
    lent: float = 0
    """The most that the host may be using: confirmed, or sent and not yet confirmed."""
    wanted: float = 0


@dataclass(slots=True)
class PermitLease:
    """One model's concurrency limit, divided among hosts by their demand."""

    limit: float
    """May be changed at any time."""
    _shares: dict[str, _Share] = field(default_factory=dict)
    _orphaned: list[tuple[float, float]] = field(default_factory=list)
    """(when it returns, permits) of lost hosts."""

    def join(self, host: str) -> None:
        self._shares[host] = _Share()

    def lost(self, host: str, returns_at: float) -> None:
        """The host's share returns when its lease has ended (at once if its process is known to be dead)."""
        share = self._shares.pop(host, _Share())
        if share.lent:
            self._orphaned.append((returns_at, share.lent))

    def want(self, host: str, calls: float) -> None:
        """How many calls the host could make at once (or per second)."""
        self._shares[host].wanted = calls

    def confirm(self, host: str, held: float) -> None:
        """The host has seen the newest lease and says what it still holds of it and of older ones."""
        self._shares[host].lent = held

    def lend(self, host: str, now: float) -> float:
        """The lease to send to a host with the next request; counts as lent from now on."""
        self._orphaned = [(at, permits) for at, permits in self._orphaned if at > now]
        mine = self._shares[host]
        elsewhere = sum(share.lent for name, share in self._shares.items() if name != host)
        free = self.limit - elsewhere - sum(permits for _, permits in self._orphaned)
        lease = max(0, min(self._fair(host), free))
        mine.lent = max(mine.lent, lease)
        return lease

    def _fair(self, host: str) -> float:
        """Water-filling: nobody gets more than it wants; the rest is divided evenly, the remainder by name."""
        left, hungry = self.limit, sorted(self._shares, key=lambda name: (self._shares[name].wanted, name))
        for index, name in enumerate(hungry):
            share = min(self._shares[name].wanted, self._even(left, len(hungry) - index))
            if name == host:
                return share
            left -= share
        return 0

    def _even(self, left: float, hosts: int) -> float:
        return -(-left // hosts)

    @property
    def lent(self) -> float:
        """Permits out in the cluster, those of lost hosts included."""
        return sum(share.lent for share in self._shares.values()) + sum(permits for _, permits in self._orphaned)


@dataclass(slots=True)
class RateLease(PermitLease):
    """A limit of calls or tokens per second, divided among hosts by their demand. Each spaces its own share."""

    def _even(self, left: float, hosts: int) -> float:
        return left / hosts
