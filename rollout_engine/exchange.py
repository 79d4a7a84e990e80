"""What the driver and a host say to each other: one request down, one reply up, each safe to say twice.

The driver numbers its grants and sends the unconfirmed ones again; the host numbers its batches and sends the
unacknowledged ones again, ignores keys that it holds or has finished, and says which keys it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.types import RolloutSpec
from rollout_engine.vitals import Vitals


class Lease(NamedTuple):
    """A host's share of one model's cluster-wide budgets."""

    permits: int = -1
    """Calls that may be in flight at once; -1: no limit."""
    calls_s: float = -1.0
    """Calls that may begin per second; -1: no limit."""
    tokens_s: float = -1.0
    """Tokens, of prompts and answers, per second; -1: no limit."""
    pause_s: float = 0.0
    """Begin no call for so long: the server has asked for it."""
    refusals_seen: int = 0
    """Refusals of this host that the shares take into account; permits of later ones rest."""


class Traffic(NamedTuple):
    """How a host's calls to one model have gone since the host started."""

    answered: int = 0
    """Calls (each try counts) that got an answer; errors that are no 429 say nothing of a limit."""
    refused: int = 0
    """429s."""
    log_latency: float = 0.0
    """Sum of the natural logarithms of the answered calls' seconds."""
    tokens: float = 0.0
    """Tokens of the prompts and answers that the server counted."""
    level: int = 0
    """Calls of this host in flight when the last one was refused, that one included."""


class Demand(NamedTuple):
    """A host's use of one model's budgets."""

    held: int
    """Permits that the host still counts as its own: the lease, or more while calls above it run out."""
    waiting: int
    """Calls that wait for a permit, their turn, or the end of a pause."""
    calls_s: float = -1.0
    """The rate of calls that the host goes by."""
    tokens_s: float = -1.0
    in_flight: int = 0
    pause_s: float = 0.0
    """What is left of the longest pause that the server has asked *this* host for."""
    wants_permits: bool = False
    """Calls have waited for a permit since the last reply."""
    wants_calls: bool = False
    """Calls have waited for their turn at `calls_s` since the last reply."""
    wants_tokens: bool = False
    """Calls have waited for their turn at `tokens_s` since the last reply."""
    traffic: Traffic = Traffic()


class HandBack(StrEnum):
    """What a host that is to go gives up unfinished; `held` then lacks it."""

    NOTHING = "nothing"
    QUEUED = "queued"
    """What it has not started."""
    ALL = "all"


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
    hand_back: HandBack = HandBack.NOTHING


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
    sent_at: float = 0.0
    """Seconds since 1970 on the driver's clock."""
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
    """Counters since the host started (cpu_s, started, finished, waited_s; moves: phases and turns, its signs of
    life), and `clock`: what the node takes for the time."""
    troubles: tuple[str, ...] = ()
    """What is wrong on the node and went on without harm to any row: each says path and remedy."""
    vitals: Vitals | None = None
    """For people and metrics; in about one reply a second."""


def scramble(key: int) -> int:
    """A 64-bit mix (splitmix64's finaliser), so that an XOR over keys tells sets apart."""
    z = (key + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
