"""From a hash to the slots that have it, in about a dozen bytes a slot: no Python object is kept for any of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

_START = 1024


class SlotIndex:
    """A hash table with linear probing over slots that are numbered as they are added. 32 bits of a hash are kept."""

    def __init__(self) -> None:
        self._hashes = array("I")
        self._table = array("I", bytes(4 * _START))
        """slot + 1, or 0 where nothing lies; a slot lies at its hash or in the run of slots that starts there."""
        self._mask = _START - 1

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hash_: int) -> None:
        """Gives the hash to the next slot."""
        hashes, table = self._hashes, self._table
        hash_ &= 0xFFFFFFFF
        hashes.append(hash_)
        at = hash_ & self._mask
        while table[at]:
            at = at + 1 & self._mask
        table[at] = len(hashes)
        if 3 * len(hashes) > 2 * len(table):
            self._grow()

    def find(self, hash_: int) -> Iterator[int]:
        """Slots that may have the hash, the first that was added first."""
        hash_ &= 0xFFFFFFFF
        at = hash_ & self._mask
        while slot := self._table[at]:
            if self._hashes[slot - 1] == hash_:
                yield slot - 1
            at = at + 1 & self._mask

    def _grow(self) -> None:
        """Doubles the table: all slots are laid down again at once, in the order of their homes."""
        size = 2 * len(self._table)
        homes = np.frombuffer(self._hashes, np.uint32) & np.uint32(size - 1)
        order = np.argsort(homes, kind="stable").astype(np.uint32)
        index = np.arange(len(order), dtype=np.int64)
        # Each lies at its home or right behind the one before: the largest home so far, counted up.
        places = np.maximum.accumulate(homes[order] - index) + index
        table = np.zeros(size, np.uint32)
        fits = places < size
        table[places[fits]] = order[fits] + 1
        self._table = array("I", table.tobytes())
        self._mask = size - 1
        for slot in order[~fits]:  # the few that run over the end start again at the front
            at = 0
            while self._table[at]:
                at += 1
            self._table[at] = int(slot) + 1
