"""The cluster-wide budgets of every model, lent to hosts with each request, and moved by what hosts report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollout_engine.aimd import Controller, Seen
from rollout_engine.config import ModelSpec
from rollout_engine.exchange import Demand, Lease, Traffic
from rollout_engine.leases import PermitLease, RateLease
from rollout_engine.lending import CallLimits, Lent, News

CONTROL_S = 0.25
"""How often limits that adapt are looked at."""
SPARE = 1.5
"""A host is lent so much of the rate that it has used of late, beside what its waiting calls need."""
USE_S = 1.0
"""The rate that a host uses is averaged over about this time."""
PAUSE_GRAIN_S = 0.02
"""A pause that is longer by less than this is the same one."""
WAITING_S = 1.0
"""Calls that wait for their turn should be gone in this time."""


class _Share:
    """One host's calls to one model."""

    def __init__(self) -> None:
        self.demand = Demand(0, 0)
        self.used = Traffic()
        """As far as the rates below take it into account."""
        self.used_at = -math.inf
        self.calls_s = self.tokens_s = 0.0
        self.wants_permits = self.wants_calls = False
        """Whether calls have waited since the limits were last looked at."""
        self.refusals_seen, self.seen_at = 0, -math.inf


class ModelBudget:
    """One model's limits over the whole cluster, and who uses them. Times are seconds on the caller's clock."""

    def __init__(self, spec: ModelSpec) -> None:
        self.name = spec.name
        self.controller = None if spec.adaptation is None else Controller(spec.adaptation)
        cap = spec.fixed_concurrency if self.controller is None else self.controller.cap
        self._fixed_calls = spec.fixed_concurrency
        self.permits = None if cap is None else PermitLease(cap)
        self._fixed_rate = None if spec.requests_per_minute is None else spec.requests_per_minute / 60.0
        self.calls = RateLease(self._fixed_rate) if self._fixed_rate is not None else None
        self.tokens = None if spec.tokens_per_minute is None else RateLease(spec.tokens_per_minute / 60.0)
        self.paused_until = -math.inf
        self._hosts: dict[str, _Share] = {}
        self._gone = Traffic()
        """The traffic of hosts that are lost."""
        self._seen = Traffic()
        self._refused_level = 0
        self._looked_at = -math.inf
        self._pace(None if self.controller is None else self.controller.rate)

    def _leases(self) -> list[PermitLease]:
        return [lease for lease in (self.permits, self.calls, self.tokens) if lease is not None]

    def join(self, host: str) -> None:
        self._hosts[host] = _Share()
        for lease in self._leases():
            lease.join(host)

    def lost(self, host: str, returns_at: float) -> None:
        share = self._hosts.pop(host, None)
        if share is not None:
            self._gone = _sum((self._gone, share.demand.traffic))
        for lease in self._leases():
            lease.lost(host, returns_at)

    def confirm(self, host: str, demand: Demand, now: float) -> News:
        """What the host says in its reply to the newest request."""
        share = self._hosts[host]
        fresh = demand.traffic.refused > share.demand.traffic.refused
        if fresh:
            self._refused_level = max(self._refused_level, self._level(share, demand))
        share.demand = demand
        share.wants_permits |= demand.wants_permits
        share.wants_calls |= demand.wants_calls
        self._average(share, now)
        for lease, held in ((self.permits, demand.held), (self.calls, demand.calls_s), (self.tokens, demand.tokens_s)):
            if lease is not None:
                lease.confirm(host, max(held, 0))
        ends = now + demand.pause_s
        longer = demand.pause_s > 0 and ends > self.paused_until + PAUSE_GRAIN_S
        if longer:
            self.paused_until = ends
        return News(fresh, longer)

    def _level(self, share: _Share, demand: Demand) -> int:
        """Calls in flight when this host's last one was refused.

        What the others have said of theirs is older than that, and low where they have begun anew since a pause. So
        they are taken to use their permits no less than this host did.
        """
        level, permits = demand.traffic.level, self.permits
        others = sum(each.demand.in_flight for each in self._hosts.values() if each is not share)
        alike = 0 if permits is None else math.floor(level * permits.limit / max(demand.held, level, 1))
        return max(level + others, alike)

    def _average(self, share: _Share, now: float) -> None:
        """The rates that a host uses: a moving average over USE_S."""
        traffic, before = share.demand.traffic, share.used
        span = now - share.used_at
        if span < CONTROL_S / 2:
            return
        if share.used_at > -math.inf:
            weight = 1 - math.exp(-span / USE_S)
            calls = traffic.answered + traffic.refused - before.answered - before.refused
            share.calls_s += weight * (calls / span - share.calls_s)
            share.tokens_s += weight * ((traffic.tokens - before.tokens) / span - share.tokens_s)
        share.used, share.used_at = traffic, now

    def lend(self, host: str, rollouts: int, now: float) -> tuple[Lease, bool]:
        """The lease to send with the next request, and whether it starves the host.

        `rollouts`: how many the host holds, which is how many calls it could make at once.
        """
        share = self._hosts[host]
        permits, calls_s, tokens_s = -1, -1.0, -1.0
        if self.permits is not None:
            self.permits.want(host, rollouts)
            permits = int(self.permits.lend(host, now))
        waiting = share.demand.waiting
        if self.calls is not None:
            self.calls.want(host, self._wanted(self.calls, rollouts, share.calls_s, waiting / WAITING_S))
            calls_s = self.calls.lend(host, now)
        if self.tokens is not None:
            # How many tokens waiting calls need is the host's to know: they want whatever there is.
            needed = self.tokens.limit if share.demand.wants_tokens else 0.0
            self.tokens.want(host, self._wanted(self.tokens, rollouts, share.tokens_s, needed))
            tokens_s = self.tokens.lend(host, now)
        pause_s = max(0.0, self.paused_until - now)
        if now >= share.seen_at + CONTROL_S:
            share.refusals_seen, share.seen_at = share.demand.traffic.refused, now
        lease = Lease(permits, calls_s, tokens_s, pause_s, share.refusals_seen)
        return lease, 0 <= permits < rollouts

    def _wanted(self, lease: RateLease, rollouts: int, used: float, needed: float) -> float:
        # Half of an even part is left to each host with rollouts, so that its first call waits for no exchange.
        least = lease.limit / (2 * len(self._hosts)) if rollouts else 0.0
        return max(SPARE * used + needed, least)

    def control(self, now: float, *, at_once: bool = False) -> bool:
        """Moves limits that adapt, when it is time for it or `at_once`. True: hosts should hear of it."""
        if self.controller is None or self.permits is None:
            return False
        if now < self._looked_at + CONTROL_S and not (at_once and self._refused_level):
            return False
        self._looked_at = now
        before = (self.controller.cap, self.controller.rate)
        self.controller.observe(self._since(now), now)
        self.permits.limit = self.controller.cap
        self._pace(self.controller.rate)
        return (self.controller.cap, self.controller.rate) != before

    def _since(self, now: float) -> Seen:
        shares = self._hosts.values()
        total = _sum((self._gone, *(share.demand.traffic for share in shares)))
        last, self._seen = self._seen, total
        level, self._refused_level = self._refused_level, 0
        answered = total.answered - last.answered
        seen = Seen(
            answered,
            total.refused - last.refused,
            level,
            sum(share.demand.in_flight for share in shares),
            any(share.wants_permits for share in shares),
            any(share.wants_calls for share in shares),
            math.exp((total.log_latency - last.log_latency) / answered) if answered else None,
            max(0.0, self.paused_until - now),
        )
        for share in shares:
            share.wants_permits = share.wants_calls = False
        return seen

    def _pace(self, rate: float | None) -> None:
        """Holds the stricter of the rate that is known and the one that was found."""
        limits = [limit for limit in (rate, self._fixed_rate) if limit is not None]
        if not limits:
            self.calls = None
        elif self.calls is None:
            self.calls = RateLease(min(limits))
            for host in self._hosts:
                self.calls.join(host)
        else:
            self.calls.limit = min(limits)

    @property
    def calls_at_once(self) -> int | None:
        """What rollouts in flight are kept in proportion to.

        A limit that adapts bounds them only while calls wait for it: agents that are busy with tools need more.
        """
        if self.controller is None:
            return self._fixed_calls
        binds = any(share.demand.wants_permits for share in self._hosts.values())
        return self.controller.cap if binds else None

    def describe(self) -> list[str]:
        """What is lent, and whose calls wait."""
        what = (("permits", self.permits), ("calls/s", self.calls), ("tokens/s", self.tokens))
        lines = [
            f"model {self.name}: {lease.lent:g} of {lease.limit:g} {unit} are lent"
            for unit, lease in what
            if lease is not None
        ]
        for host, share in self._hosts.items():
            if share.demand.waiting:
                lines.append(f"{host}: {share.demand.waiting} calls to model {self.name} wait")
        return lines

    @property
    def limits(self) -> CallLimits:
        """What holds now."""
        at_once = None if self.permits is None else int(self.permits.limit)
        return CallLimits(at_once, None if self.calls is None else self.calls.limit, self.controller is not None)


class Budgets:
    """The budgets of all models; one without limits has a lease that says so."""

    def __init__(self, models: Sequence[ModelSpec]) -> None:
        self.models = [ModelBudget(model) for model in models]

    def join(self, host: str) -> None:
        for model in self.models:
            model.join(host)

    def lost(self, host: str, returns_at: float) -> None:
        """What the host had returns when its lease has ended."""
        for model in self.models:
            model.lost(host, returns_at)

    def lend(self, host: str, rollouts: Sequence[int], now: float) -> Lent:
        """`rollouts`: how many of each model the host holds."""
        leases: dict[str, Lease] = {}
        starved = watched = False
        for model, held in zip(self.models, rollouts, strict=True):
            leases[model.name], starves = model.lend(host, held, now)
            starved |= starves
            watched |= held > 0 and (model.calls or model.tokens or model.controller) is not None
        return Lent(leases, starved, watched)

    def confirm(self, host: str, demand: Mapping[str, Demand], now: float) -> News:
        """What the host says in its reply to the newest request."""
        news = [model.confirm(host, demand[model.name], now) for model in self.models]
        return News(any(each.refused for each in news), any(each.pause for each in news))

    def control(self, now: float, *, at_once: bool = False) -> bool:
        """Moves limits that adapt, when it is time for it or `at_once`. True: hosts should hear of it."""
        return any([model.control(now, at_once=at_once) for model in self.models])

    @property
    def calls_at_once(self) -> list[int | None]:
        """By model, the calls that rollouts in flight are kept in proportion to; None: slots alone bound them."""
        return [model.calls_at_once for model in self.models]

    @property
    def limits(self) -> dict[str, CallLimits]:
        """What holds now, by model; those without a limit too."""
        return {model.name: model.limits for model in self.models}

    @property
    def found(self) -> dict[str, str]:
        """What limits that adapt have found, in words, by model."""
        return {name: str(limits) for name, limits in self.limits.items() if limits.adaptive}

    def describe(self) -> list[str]:
        """Who is lent what, and who waits, one line for each model that has budgets."""
        return [line for model in self.models for line in model.describe()]

    @property
    def lent(self) -> dict[str, int]:
        """Permits out in the cluster, of every limited model."""
        return {model.name: int(model.permits.lent) for model in self.models if model.permits is not None}

    @property
    def has_idle_permits(self) -> bool:
        """Whether a starved host could be given something."""
        return any(model.permits.lent < model.permits.limit for model in self.models if model.permits is not None)


def _sum(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        sum(part.answered for part in parts),
        sum(part.refused for part in parts),
        sum(part.log_latency for part in parts),
        sum(part.tokens for part in parts),
    )
