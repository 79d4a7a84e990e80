"""The driver's side of the exchange with one host: numbers, resends and bookkeeping; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.exchange import HostLimits, Reply, Request, scramble
from rollout_engine.types import RolloutSpec


class News(NamedTuple):
    """What a reply says that the driver did not know."""

    batches: list[tuple[int, pa.RecordBatch]]
    """Batches that arrive for the first time, in order."""
    missing: list[int]
    """Keys that the host was granted and does not hold."""
    strange: list[int]
    """Keys that the host holds and was not granted."""
    bodies: tuple[str, ...]
    """Digests of task bodies that the host lacks."""


class Link:
    """One host as the driver sees it. Its requests are strictly one after the other."""

    def __init__(self, host_id: str, epoch: int) -> None:
        self.host_id = host_id
        self.free_slots = 0
        """Room for further grants, those on their way taken off."""
        self.running = 0
        self.stats: dict[str, float] = {}
        self.acked_seq = 0
        self.silent_since: float | None = None
        self.told: set[str] = set()
        """Troubles of the node that were passed on."""
        self.cancel_keys: set[int] = set()
        self._epoch = epoch
        self._number = 0
        self._granted = 0
        self._unconfirmed: deque[tuple[int, RolloutSpec]] = deque()
        self._received_seq = 0
        self._held: set[int] = set()
        self._held_hash = 0
        self._want_held = False
        self._users: dict[str, int] = {}
        self._bodies: dict[str, bytes] = {}

    def lacks(self, digest: str) -> bool:
        """Whether a grant of this task should bring its body along."""
        return digest not in self._users

    def grant(self, spec: RolloutSpec) -> None:
        """Queues a grant for the next request."""
        self._granted += 1
        self._unconfirmed.append((self._granted, spec))
        self._held.add(spec.key)
        self._held_hash ^= scramble(spec.key)
        self._users[spec.digest] = self._users.get(spec.digest, 0) + 1
        self.free_slots -= 1

    def bring(self, digest: str, body: bytes) -> None:
        """Sends a task body with the next requests, until the host confirms."""
        self._bodies[digest] = body

    def done(self, key: int, digest: str) -> None:
        """A granted key has ended, on the host or by the scheduler's word."""
        if key in self._held:
            self._held.discard(key)
            self._held_hash ^= scramble(key)
            self.cancel_keys.discard(key)
            left = self._users[digest] - 1
            if left:
                self._users[digest] = left
            else:
                del self._users[digest]

    def request(self, limits: HostLimits, sent_at: float = 0.0) -> Request:
        """The next request: everything that the host has not confirmed, once more."""
        self._number += 1
        return Request(
            epoch=self._epoch,
            number=self._number,
            grant_seq=self._granted,
            specs=tuple(spec for _, spec in self._unconfirmed),
            bodies=dict(self._bodies),
            cancel_keys=tuple(self.cancel_keys),
            received_seq=self._received_seq,
            acked_seq=self.acked_seq,
            limits=limits,
            sent_at=sent_at,
            want_held=self._want_held,
        )

    @property
    def has_more_to_say(self) -> bool:
        """Whether a waiting exchange should be cut short."""
        return bool(self._unconfirmed or self.cancel_keys)

    def take_in(self, reply: Reply) -> News:
        """Updates the bookkeeping but for the rows themselves: call `done` for each, then `check`."""
        while self._unconfirmed and self._unconfirmed[0][0] <= reply.grant_seq_received:
            self._unconfirmed.popleft()
        if not self._unconfirmed:
            self._bodies.clear()
        fresh = [(seq, batch) for seq, batch in reply.batches if seq > self._received_seq]
        if fresh:
            self._received_seq = fresh[-1][0]
        self.free_slots = reply.free_slots - len(self._unconfirmed)
        self.running = reply.running
        self.stats = dict(reply.stats)
        return News(fresh, *self._compare(reply, fresh), reply.missing)

    def _compare(self, reply: Reply, fresh: Iterable[tuple[int, pa.RecordBatch]]) -> tuple[list[int], list[int]]:
        """Sets the host's keys against ours, once the rows of this reply are taken off."""
        if self._unconfirmed:
            return [], []
        arrived = [key for _, batch in fresh for key in batch.column("key").to_pylist()]
        count, mix = len(self._held), self._held_hash
        for key in self._held.intersection(arrived):
            count -= 1
            mix ^= scramble(key)
        if (count, mix) == (reply.held_count, reply.held_hash):
            self._want_held = False
            return [], []
        self._want_held = True
        if reply.held is None:
            return [], []
        theirs, ours = set(reply.held), self._held.difference(arrived)
        return sorted(ours - theirs), sorted(theirs - ours)
