"""The output of one command: the tail of each stream, bounded."""

from __future__ import annotations

from rollout_engine.sandboxes.base import MAX_OUTPUT_BYTES


class Tail:
    """Keeps the last `limit` bytes; trimmed only when twice as many are held, so appends stay cheap."""

    def __init__(self, limit: int = MAX_OUTPUT_BYTES) -> None:
        self._limit = limit
        self._held = bytearray()
        self.truncated = False

    def append(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > 2 * self._limit:
            self._trim()

    def value(self) -> bytes:
        self._trim()
        return bytes(self._held)

    def _trim(self) -> None:
        surplus = len(self._held) - self._limit
        if surplus > 0:
            del self._held[:surplus]
            self.truncated = True
