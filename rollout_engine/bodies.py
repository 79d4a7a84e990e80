"""The task bodies that a host has: kept while its rollouts use them and for a while after, prepared once each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from rollout_engine.config import RunConfig
from rollout_engine.errors import TaskBodyError
from rollout_engine.hooks import Note, has_hook, tear_down
from rollout_engine.prepare import PreparedTask, prepare
from rollout_engine.verifiers.workshop import Workshop

IDLE_BODIES = 1024
"""Task bodies kept after their last rollout, in case another one of the same task comes."""


@dataclass(slots=True)
class _Body:
    raw: bytes
    prepared: PreparedTask | None = None
    users: int = 0


class Bodies:
    """By digest. Belongs to the host's event loop; `tear_down` ends it."""

    def __init__(self, config: RunConfig, workshop: Workshop, note: Note) -> None:
        """`note` is told what a verifier's last hook did wrong."""
        self._config, self._workshop, self._note = config, workshop, note
        self._bodies: dict[str, _Body] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Digests of bodies that nothing uses, the longest unused first."""
        self._retiring: set[asyncio.Task[None]] = set()
        """Teardowns of verifiers whose task is forgotten."""

    def __len__(self) -> int:
        return len(self._bodies)

    def add(self, digest: str, raw: bytes) -> None:
        if digest not in self._bodies:
            self._bodies[digest] = _Body(raw)
            self._idle[digest] = None

    def use(self, digest: str) -> bool:
        """One more rollout uses it, until it is released; False: it is not here."""
        body = self._bodies.get(digest)
        if body is None:
            return False
        body.users += 1
        self._idle.pop(digest, None)
        return True

    def release(self, digest: str) -> bool:
        """A rollout uses it no more; False: it is not here. Forgets those that were unused for longest."""
        body = self._bodies.get(digest)
        if body is None:
            return False
        body.users -= 1
        if not body.users:
            self._idle[digest] = None
            while len(self._idle) > IDLE_BODIES:
                self._retire(self._bodies.pop(self._idle.popitem(last=False)[0]))
        return True

    def prepared(self, digest: str) -> PreparedTask:
        """What all rollouts of a task that is here share. Raises TaskBodyError where it does not fit this version."""
        body = self._bodies[digest]
        if body.prepared is None:
            try:
                body.prepared = prepare(body.raw, self._config, self._workshop)
            except Exception as error:
                raise TaskBodyError(f"{type(error).__name__}: {error}") from error
        return body.prepared

    def _retire(self, body: _Body) -> None:
        if body.prepared is not None and has_hook(body.prepared.verifier, "teardown"):
            task = asyncio.create_task(tear_down([body.prepared.verifier], self._note))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def tear_down(self, *others: Any) -> None:
        """The last hooks of every verifier that is still here, and of the others."""
        verifiers = [body.prepared.verifier for body in self._bodies.values() if body.prepared is not None]
        await tear_down([*others, *verifiers], self._note)
        await asyncio.gather(*self._retiring)
