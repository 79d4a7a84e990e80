"""Which row of a key counts, against a model in plain Python. Run: pytest tests/store/test_ledger.py"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.schema import LOG
from rollout_engine.scores import Kind
from rollout_engine.spending import Used
from rollout_engine.store import Ledger
from rollout_engine.types import KeySpace, RolloutRecord

from .rows import SPACE, batch, failed, many, record

KEYS = st.sampled_from([0, 1, 2, 5, 65_535, 65_536, 65_537, 200_000])
ENDINGS = st.sampled_from([(1.0, "completed"), (0.0, "truncated"), (None, "failed"), (None, "cancelled")])


@st.composite
def rows(draw: st.DrawFn) -> RolloutRecord:
    score, status = draw(ENDINGS)
    boundary = draw(st.sampled_from([None, "verifier", "model"])) if score is None else None
    return record(draw(KEYS), score=score, status=status, generation=draw(st.integers(0, 3)), failure_boundary=boundary)


def supersedes(new: RolloutRecord, old: RolloutRecord | None) -> bool:
    if old is None or old.score is not None:
        return old is None
    return new.score is not None or new.generation > old.generation


@settings(max_examples=40)
@given(st.lists(st.lists(rows(), min_size=1, max_size=6), max_size=6))
def test_the_first_valid_row_counts_else_the_newest_generation(batches: list[list[RolloutRecord]]) -> None:
    ledger, again, expected = Ledger(SPACE), Ledger(SPACE), dict[int, RolloutRecord]()
    for records in batches:
        found = batch(records)
        foretold = ledger.news(found)
        assert ledger.add(found).tolist() == foretold.tolist()
        best = dict[int, RolloutRecord]()
        for row in records:
            if supersedes(row, best.get(row.key)):
                best[row.key] = row
        assert [row for row, counts in zip(records, foretold, strict=True) if counts] == [
            row for row in records if best[row.key] is row and supersedes(row, expected.get(row.key))
        ]
        for row in records:
            if supersedes(row, expected.get(row.key)):
                expected[row.key] = row
    everything = [row for records in batches for row in records]
    if everything:
        again.add(batch(everything))

    slots = 200_000 // SPACE.per_slot + 1
    for dense in (ledger.dense(slots), again.dense(slots)):
        kinds, values, passed = dense.kinds.ravel(), dense.values.ravel(), dense.passed.ravel()
        assert set(np.flatnonzero(kinds).tolist()) == set(expected)
        for key, row in expected.items():
            assert (kinds[key] == Kind.VALID) == (row.score is not None)
            assert row.score is None or values[key] == row.score
            assert passed[key] == bool(row.passed)
            assert dense.generations.ravel()[key] == row.generation
        assert np.isnan(values[kinds != Kind.VALID]).all()
        assert ledger.counts.tolist() == [0, *(int((kinds == kind).sum()) for kind in list(Kind)[1:])]

    taken = [row for records in batches for row, took in zip(records, ledger.take(batch(records)), strict=True) if took]
    assert sorted(map(id, taken)) == sorted(map(id, expected.values()))


def test_kinds_and_sums() -> None:
    ledger = Ledger(SPACE)
    ledger.add(
        batch(
            [
                record(0),
                record(1, score=None, status="truncated", failure_boundary="verifier"),
                failed(2, cost_usd=None),
                record(3, score=None, status="cancelled"),
                record(4, score=float("nan")),
            ]
        )
    )
    assert [ledger.kind(key) for key in range(6)] == [1, 2, 3, 4, 3, 0]
    assert (ledger.rows, ledger.used) == (5, Used(50, 10, 1.0))
    assert ledger.todo(range(6)) == [(5, 0)]
    assert ledger.todo(range(6), frozenset({Kind.FAILED})) == [(2, 1), (4, 1), (5, 0)]
    assert ledger.todo(range(10**7, 10**7 + 2)) == [(10**7, 0), (10**7 + 1, 0)]


def test_a_part_of_the_slots() -> None:
    ledger = Ledger(KeySpace(2, 3))
    ledger.add(many(np.arange(0, 120_000), record(0)))
    ledger.add(batch([record(120_001, score=0.5)]))
    assert ledger.dense(20_001, 20_000).kinds.tolist() == [[[0, 1, 0], [0, 0, 0]]]
    assert ledger.dense(20_001, 20_000).values[0, 0, 1] == 0.5
    assert ledger.dense(11_000, 10_900).kinds.all()
    assert ledger.dense(30_000, 25_000).kinds.sum() == 0
    assert ledger.dense(5, 5).kinds.shape == (0, 2, 3)


def test_an_empty_batch_is_nothing() -> None:
    ledger = Ledger(SPACE)
    assert ledger.add(pa.RecordBatch.from_pylist([], schema=LOG)).tolist() == []
    assert ledger.rows == 0


def used(ledger: Ledger) -> int:
    arrays = [array for block in ledger._blocks.values() for array in vars(block).values() if array is not None]
    return sum(array.nbytes for array in arrays)


def test_a_rollout_costs_three_bytes_and_where_scores_are_graded_eleven() -> None:
    ledger = Ledger(SPACE)
    ledger.add(many(np.arange(65_536 * 3), record(0)))
    assert used(ledger) == 3 * 65_536 * 3
    ledger.add(many(np.arange(65_536 * 3, 65_536 * 4), record(0, score=0.25)))
    assert used(ledger) == 3 * 65_536 * 4 + 8 * 65_536
