"""What the driver and a host say to each other: one request down, one reply up, each safe to say twice.

The driver numbers its grants and sends the unconfirmed ones again; the host numbers its batches and sends the
unacknowledged ones again, ignores keys that it holds or has finished, and says which keys it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.types import RolloutSpec


class Lease(NamedTuple):
    """A host's share of one model's cluster-wide budgets."""

    permits: int
    """Calls that may be in flight at once; -1: no limit."""
    tokens: float
    """Calls that may be started beyond those granted before (request rate); -1: no limit."""


class Demand(NamedTuple):
    """A host's use of one model's budgets."""

    held: int
    """Permits that the host still counts as its own: the lease, or more while calls above it run out."""
    waiting: int
    """Calls that wait for a permit or a token."""
    tokens: float
    """Start tokens not used yet."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What a host keeps to until the next request."""

    leases: Mapping[str, Lease] = field(default_factory=dict)
    linger_s: float = 0.05
    """A finished row waits at most this long for company."""
    wait_s: float = 1.0
    """The longest that a request waits for something to say; the heartbeat."""
    paused: bool = False
    """Start nothing that is still queued on the host."""


@dataclass(frozen=True, slots=True)
class Request:
    """Driver to host."""

    epoch: int
    number: int
    """Requests are numbered 1, 2, ... per host; one that is older than the last seen is ignored."""
    grant_seq: int = 0
    """Number of the last grant in `specs`; every spec is one grant, numbered 1, 2, ... per host."""
    specs: tuple[RolloutSpec, ...] = ()
    """All grants that the host has not confirmed, in order, without gaps."""
    bodies: Mapping[str, bytes] = field(default_factory=dict)
    """Task bodies, by digest, that the host may lack."""
    cancel_keys: tuple[int, ...] = ()
    received_seq: int = 0
    """Batches up to this number have arrived; the host sends only later ones."""
    acked_seq: int = 0
    """Batches up to this number are committed; the host forgets them."""
    limits: HostLimits = HostLimits()
    want_held: bool = False
    """Send the list of held keys: the count or hash of the last reply differed from the driver's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Host to driver."""

    batches: tuple[tuple[int, pa.RecordBatch], ...] = ()
    """(number, rows) of every batch that the driver has not received."""
    grant_seq_received: int = 0
    held_count: int = 0
    held_hash: int = 0
    """XOR of the scrambled keys (`scramble`) that the host holds; compared before the list is asked for."""
    held: tuple[int, ...] | None = None
    """The held keys themselves: sent where count or hash differed in the last request."""
    missing: tuple[str, ...] = ()
    """Digests of bodies that granted keys wait for."""
    free_slots: int = 0
    demand: Mapping[str, Demand] = field(default_factory=dict)
    running: int = 0
    """Rollouts that were started and whose row is in no batch yet, whatever their phase."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Counters since the host started: cpu_s, loop_lag_max_s, rollouts, calls."""


def scramble(key: int) -> int:
    """A 64-bit mix (splitmix64's finaliser), so that an XOR over keys tells sets apart."""
    z = (key + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
