"""From a hash to the slots that have it, in about ten bytes a slot: no Python object is kept for any of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

_START = 1024
_GROWTH = 1.5
_MAX_LOAD = 0.8
_SPARE = 1.1


class SlotIndex:
    """A hash table with linear probing over slots that are numbered as they are added. 32 bits of a hash are kept.

    A slot's home is its hash as a fraction of the table, which may so have any size.
    """

    def __init__(self) -> None:
        self._hashes = array("I")
        self._table = array("I", bytes(4 * _START))
        """slot + 1, or 0 where nothing lies; a slot lies at its home or in the run of slots that starts there."""
        self._full = int(_START * _MAX_LOAD)

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hash_: int) -> None:
        """Gives the hash to the next slot."""
        hash_ &= 0xFFFFFFFF
        self._hashes.append(hash_)
        self._put(hash_ * len(self._table) >> 32, len(self._hashes))
        if len(self._hashes) > self._full:
            self._grow()

    def extend(self, hashes: array[int]) -> None:
        """As `add` for each of many at once."""
        self._hashes.extend(hashes)
        self._lay(max(int(len(self._hashes) / _MAX_LOAD * _SPARE), len(self._table)))

    def _put(self, home: int, entry: int) -> None:
        table = self._table
        while table[home]:
            home += 1
            if home == len(table):
                home = 0
        table[home] = entry

    def find(self, hash_: int) -> Iterator[int]:
        """Slots that may have the hash, the first that was added first."""
        hash_ &= 0xFFFFFFFF
        table, hashes = self._table, self._hashes
        at = hash_ * len(table) >> 32
        while entry := table[at]:
            if hashes[entry - 1] == hash_:
                yield entry - 1
            at += 1
            if at == len(table):
                at = 0

    def _grow(self) -> None:
        self._lay(int(len(self._table) * _GROWTH))

    def _lay(self, size: int) -> None:
        """A table of another size, in which all slots are laid down at once, in the order of their homes."""
        homes = (np.frombuffer(self._hashes, np.uint32).astype(np.int64) * size) >> 32
        order = np.argsort(homes, kind="stable")
        index = np.arange(len(order))
        # Each lies at its home or right behind the one before: the largest home so far, counted up.
        places = np.maximum.accumulate(homes[order] - index) + index
        table = np.zeros(size, np.uint32)
        fits = places < size
        table[places[fits]] = order[fits] + 1
        self._table = array("I", table.tobytes())
        self._full = int(size * _MAX_LOAD)
        for slot in order[~fits].tolist():  # the few that run over the end go on at the front
            self._put(0, slot + 1)
