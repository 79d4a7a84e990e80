"""What is known of every rollout that has a row, in three bytes each: which row counts, and what it says.

Of the rows of one key, a valid one (it has a score) supersedes those that are not, and the first valid one stays.
Where none is valid, the highest generation counts, and of that the first. "First" is the order of the log, so that
every reader comes to the same row whoever committed the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.scores import Kind, kind_codes
from rollout_engine.spending import JUDGED, THROWN, USED, Used, all_used_by
from rollout_engine.types import KeySpace

Bytes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

_SHIFT = 16
_BLOCK = 1 << _SHIFT
_MAX_GENERATION = 255

COLUMNS = (
    "key",
    "generation",
    "status",
    "score",
    "passed",
    "failure_boundary",
    *USED,
    *THROWN,
    *JUDGED,
)
"""What a ledger reads of a row."""


class Dense(NamedTuple):
    """Rollouts as arrays over [slot, model, attempt]; `values` is NaN where `kinds` is not VALID."""

    values: Floats
    passed: Bytes
    kinds: Bytes
    generations: Bytes


class Rows(NamedTuple):
    """The columns of some rows that decide which of them count."""

    keys: Ints
    kinds: Bytes
    generations: Bytes
    values: Floats
    passed: Bytes

    def where(self, chosen: Bools | Ints) -> Rows:
        return Rows(
            self.keys[chosen], self.kinds[chosen], self.generations[chosen], self.values[chosen], self.passed[chosen]
        )


_PASSED, _ONE = 1, 2


class _Block:
    """65,536 consecutive keys, three bytes each: growth never copies what is there.

    Most runs score 0 or 1, which a flag holds; the numbers themselves are kept from the first graded score on.
    """

    def __init__(self) -> None:
        self.kinds = np.zeros(_BLOCK, np.uint8)
        self.generations = np.zeros(_BLOCK, np.uint8)
        self.flags = np.zeros(_BLOCK, np.uint8)
        self.graded: Floats | None = None

    def put(self, at: Ints, rows: Rows) -> None:
        """Replaces the entries at these places."""
        values = rows.values
        if self.graded is None and bool(((values != 0) & (values != 1) & (rows.kinds == Kind.VALID)).any()):
            self.graded = self.values(slice(None))
        self.kinds[at] = rows.kinds
        self.generations[at] = rows.generations
        self.flags[at] = rows.passed * _PASSED + (values == 1) * np.uint8(_ONE)
        if self.graded is not None:
            self.graded[at] = values

    def values(self, where: slice) -> Floats:
        """Scores; NaN where there is none."""
        if self.graded is not None:
            return self.graded[where]
        ones = (self.flags[where] & _ONE).astype(np.float64) / _ONE
        return np.where(self.kinds[where] == Kind.VALID, ones, np.nan)

    def passed(self, where: slice) -> Bytes:
        return self.flags[where] & np.uint8(_PASSED)


def rows_of(batch: pa.RecordBatch | pa.Table) -> Rows:
    """The deciding columns of rows of the log, as numpy."""
    kinds = kind_codes(batch.column("status"), batch.column("failure_boundary"), batch.column("score"))
    values = batch.column("score").to_numpy(zero_copy_only=False)
    generations = np.clip(batch.column("generation").to_numpy(zero_copy_only=False), 0, _MAX_GENERATION)
    return Rows(
        keys=batch.column("key").to_numpy(zero_copy_only=False),
        kinds=kinds,
        generations=generations.astype(np.uint8),
        values=np.where(kinds == Kind.VALID, values, np.nan),
        passed=_bools(pc.fill_null(batch.column("passed"), False)).astype(np.uint8),
    )


def _bools(mask: pa.Array) -> Bools:
    found: Bools = mask.to_numpy(zero_copy_only=False)
    return found


def _one_per_key(rows: Rows) -> Ints | None:
    """Of each key the row that counts among these, as indices; None where each key has one row."""
    order = np.argsort(rows.keys, kind="stable")
    in_order = rows.keys[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = in_order[1:] != in_order[:-1]
    if first.all():
        return None
    invalid = rows.kinds != Kind.VALID
    later = np.where(invalid, _MAX_GENERATION - rows.generations, 0)
    order = np.lexsort((later, invalid, rows.keys))  # stable: of equals, the first row comes first
    return np.sort(order[first])


class Ledger:
    """All rollouts of a run by their key. Rows go in, in the order of the log, from one thread; others may read."""

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self.counts = np.zeros(len(Kind), np.int64)
        """Rollouts by `scores.Kind`; those without a row are not counted."""
        self.rows = 0
        """All rows that went in, those that do not count among them; so for the next."""
        self.used = Used()
        """Tokens and cost, thrown-away tries included."""
        self._blocks: dict[int, _Block] = {}

    def add(self, batch: pa.RecordBatch) -> Bools:
        """Enters rows that have these `COLUMNS`; says of each whether it counts now (it may be superseded later)."""
        rows = rows_of(batch)
        counting = self._counting(rows)
        self._enter(rows if counting.all() else rows.where(counting))
        self.rows += len(batch)
        self.used = self.used.plus(all_used_by(batch))
        return counting

    def news(self, batch: pa.RecordBatch) -> Bools:
        """What `add` would return, with nothing entered."""
        return self._counting(rows_of(batch))

    def take(self, batch: pa.RecordBatch) -> Bools:
        """Which of these rows the entries were made from; those entries are removed. For a second pass over the log."""
        rows = rows_of(batch)
        taken = np.zeros(len(rows.keys), np.bool_)
        for block, at, index in self._best(rows):
            entry, kind = block.kinds[at], rows.kinds[index]
            same = (kind != Kind.VALID) & (rows.generations[index] == block.generations[at])
            match = (entry != Kind.NONE) & np.where(entry == Kind.VALID, kind == Kind.VALID, same)
            taken[index] = match
            block.kinds[at[match]] = Kind.NONE
        return taken

    def _counting(self, rows: Rows) -> Bools:
        counting = np.zeros(len(rows.keys), np.bool_)
        for block, at, index in self._best(rows):
            entry = block.kinds[at]
            better = (rows.kinds[index] == Kind.VALID) | (rows.generations[index] > block.generations[at])
            counting[index] = (entry == Kind.NONE) | ((entry != Kind.VALID) & better)
        return counting

    def _best(self, rows: Rows) -> Iterator[tuple[_Block, Ints, Ints]]:
        """As `_spread`, for the one row of each key that counts among these."""
        unique = _one_per_key(rows)
        keys = rows.keys if unique is None else rows.keys[unique]
        for block, at, here in self._spread(keys):
            yield block, at, here if unique is None else unique[here]

    def _enter(self, rows: Rows) -> None:
        for block, at, here in self._spread(rows.keys):
            self.counts -= np.bincount(block.kinds[at], minlength=len(Kind))
            block.put(at, rows.where(here))
        self.counts += np.bincount(rows.kinds, minlength=len(Kind))
        self.counts[Kind.NONE] = 0

    def _spread(self, keys: Ints) -> Iterator[tuple[_Block, Ints, Ints]]:
        """For each block that keys lie in: the block, the places in it, the indices of these keys."""
        numbers = keys >> _SHIFT
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _Block()
            yield block, keys[here] & (_BLOCK - 1), here

    def kind(self, key: int) -> Kind:
        block = self._blocks.get(key >> _SHIFT)
        return Kind.NONE if block is None else Kind(block.kinds[key & (_BLOCK - 1)])

    def todo(self, keys: range, again: frozenset[Kind] = frozenset()) -> list[tuple[int, int]]:
        """(key, generation) of the keys that need a row: those without one, and again those of these kinds."""
        found = []
        for key in keys:
            block = self._blocks.get(key >> _SHIFT)
            at = key & (_BLOCK - 1)
            kind = 0 if block is None else int(block.kinds[at])
            if block is None or kind == Kind.NONE:
                found.append((key, 0))
            elif kind in again:
                found.append((key, int(block.generations[at]) + 1))
        return found

    def dense(self, stop: int, start: int = 0) -> Dense:
        """Copies of the slots from `start` up to `stop` as arrays of [slot, model, attempt]."""
        first, last = start * self.space.per_slot, stop * self.space.per_slot
        size = last - first
        out = Dense(np.full(size, np.nan), np.zeros(size, np.uint8), np.zeros(size, np.uint8), np.zeros(size, np.uint8))
        for number in range(first >> _SHIFT, (last + _BLOCK - 1) >> _SHIFT):
            block = self._blocks.get(number)
            if block is not None:
                _copy(block, number << _SHIFT, out, first, last)
        shape = (stop - start, self.space.m, self.space.k)
        return Dense(
            out.values.reshape(shape),
            out.passed.reshape(shape),
            out.kinds.reshape(shape),
            out.generations.reshape(shape),
        )


def _copy(block: _Block, base: int, out: Dense, first: int, last: int) -> None:
    low, high = max(first, base), min(last, base + _BLOCK)
    source, target = slice(low - base, high - base), slice(low - first, high - first)
    out.values[target] = block.values(source)
    out.passed[target] = block.passed(source)
    out.kinds[target] = block.kinds[source]
    out.generations[target] = block.generations[source]
