"""Shares of a cluster-wide budget, lent to hosts: pure, no clock of its own.

`PermitLease` keeps the sum of calls in flight at one model's server at or below its limit at every moment, also
while requests and replies are lost and while a host is lost: a share counts as lent from the moment it is sent until
the host has confirmed that it holds less, or until a lost host's lease has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Share:
    lent: int = 0
    """The most that the host may be using: confirmed, or sent and not yet confirmed."""
    wanted: int = 0


@dataclass(slots=True)
class PermitLease:
    """One model's concurrency limit, divided among hosts by their demand."""

    limit: int
    _shares: dict[str, _Share] = field(default_factory=dict)
    _orphaned: list[tuple[float, int]] = field(default_factory=list)
    """(when it returns, permits) of lost hosts."""

    def join(self, host: str) -> None:
        self._shares[host] = _Share()

    def lost(self, host: str, returns_at: float) -> None:
        """The host's share returns when its lease has ended (at once if its process is known to be dead)."""
        share = self._shares.pop(host, _Share())
        if share.lent:
            self._orphaned.append((returns_at, share.lent))

    def want(self, host: str, calls: int) -> None:
        """How many calls the host could make at once."""
        self._shares[host].wanted = calls

    def confirm(self, host: str, held: int) -> None:
        """The host has seen the newest lease and says what it still holds of it and of older ones."""
        self._shares[host].lent = held

    def lend(self, host: str, now: float) -> int:
        """The lease to send to a host with the next request; counts as lent from now on."""
        self._orphaned = [(at, permits) for at, permits in self._orphaned if at > now]
        mine = self._shares[host]
        elsewhere = sum(share.lent for name, share in self._shares.items() if name != host)
        free = self.limit - elsewhere - sum(permits for _, permits in self._orphaned)
        lease = max(0, min(self._fair(host), free))
        mine.lent = max(mine.lent, lease)
        return lease

    def _fair(self, host: str) -> int:
        """Water-filling: nobody gets more than it wants; the rest is divided evenly, the remainder by name."""
        left, hungry = self.limit, sorted(self._shares, key=lambda name: (self._shares[name].wanted, name))
        for index, name in enumerate(hungry):
            share = min(self._shares[name].wanted, -(-left // (len(hungry) - index)))
            if name == host:
                return share
            left -= share
        return 0

    @property
    def lent(self) -> int:
        """Permits out in the cluster, those of lost hosts included."""
        return sum(share.lent for share in self._shares.values()) + sum(permits for _, permits in self._orphaned)


@dataclass(slots=True)
class TokenLease:
    """One model's request rate: tokens for call starts, handed out as calls wait for them.

    Holds at most one second's worth, so no minute sees more than `per_minute` plus a second's burst.
    """

    per_minute: float
    _tokens: float = 0.0
    _updated: float | None = None

    @property
    def burst(self) -> float:
        return max(1.0, self.per_minute / 60.0)

    def lend(self, wanted: float, now: float) -> float:
        """Whole tokens to send, never more than `wanted`; they are gone, whatever becomes of the request."""
        if self._updated is None:
            self._tokens = 1.0
        else:
            self._tokens = min(self.burst, self._tokens + (now - self._updated) * self.per_minute / 60.0)
        self._updated = now
        lent = float(int(min(self._tokens, max(wanted, 0.0))))
        self._tokens -= lent
        return lent
