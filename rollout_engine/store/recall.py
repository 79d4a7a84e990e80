"""Committed rows found by their keys: what a resumed run tells whoever reads its rows again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rollout_engine.store.layout import Layout
from rollout_engine.store.ledger import COLUMNS, Ledger
from rollout_engine.store.scan import read_batch, scan_placed
from rollout_engine.types import KeySpace


class _Loaded(NamedTuple):
    """A batch of the log, and where its rows that count are."""

    number: int
    rows: pa.RecordBatch
    row_of: dict[int, int]


class Recall:
    """Knows of each key of the first `slots` slots in which batch of the log its row is: four bytes a key.

    Made by one pass over the log. Keeps the batch that was read last: rows of one task lie near each other.
    """

    def __init__(self, layout: Layout, space: KeySpace, slots: int) -> None:
        """Raises RunError where the log is damaged."""
        self._space = space
        self._places: list[tuple[Path, int]] = []
        self._place_of = np.zeros(slots * space.per_slot, np.int32)
        """One more than the index of the batch; 0: no row."""
        self._last: _Loaded | None = None
        ledger = Ledger(space)
        for placed in scan_placed(layout, space, COLUMNS):
            keys = placed.rows.column("key").to_numpy()[ledger.add(placed.rows)]
            self._places.append((placed.path, placed.offset))
            self._place_of[keys[keys < len(self._place_of)]] = len(self._places)

    def rows(self, keys: Sequence[int]) -> list[pa.RecordBatch]:
        """The rows of these keys in LOG schema, in the order of the log; keys without one are left out.

        Raises RunError where the log is damaged.
        """
        numbers = self._place_of[np.asarray(keys, np.int64)]
        found = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            loaded = self._load(number)
            wanted = np.asarray(keys, np.int64)[numbers == number].tolist()
            found.append(loaded.rows.take(pa.array(sorted(loaded.row_of[key] for key in wanted))))
        return found

    def _load(self, number: int) -> _Loaded:
        if self._last is None or self._last.number != number:
            rows = read_batch(*self._places[number - 1])
            counting = np.flatnonzero(Ledger(self._space).add(rows)).tolist()
            keys = rows.column("key")
            self._last = _Loaded(number, rows, {keys[row].as_py(): row for row in counting})
        return self._last
