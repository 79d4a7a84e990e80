"""Two drivers on one run: the old one stops, and every reader agrees. Run: pytest tests/store/test_two_drivers.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import RunError
from rollout_engine.schema import LOG, batch_to_records
from rollout_engine.store import open_run
from rollout_engine.store.log import CommitLog
from rollout_engine.store.winners import winning
from rollout_engine.types import RolloutRecord

from .rows import SPACE, abandon, batch, failed, make_run, plan, record

OLD_SLOTS = 2
COMMIT = st.tuples(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 4 * SPACE.per_slot - 1), st.booleans(), st.integers(0, 2)), min_size=1, max_size=4
    ),
)


def row(driver: str, key: int, valid: bool, generation: int) -> RolloutRecord:
    if valid:
        return record(key, generation=generation, host_id=driver)
    return failed(key, generation, host_id=driver)


@settings(max_examples=20)
@given(commits=st.lists(COMMIT, max_size=8))
def test_rows_of_two_drivers_give_each_key_one_row(
    fresh: Callable[[], Path], commits: list[tuple[bool, list[tuple[int, bool, int]]]]
) -> None:
    run = make_run(fresh(), store={"segment_bytes": 20_000})
    old = run.start()
    plan(old, OLD_SLOTS)
    old.commit([batch([record(0, host_id="old")])])
    abandon(run, 1)
    new = open_run(run.path).start()
    # What slips through between the old driver's check and its write lands in its own segments. It has planned on
    # as well, so that its numbers from OLD_SLOTS on mean other tasks than the new driver's.
    late = CommitLog(run.layout, 1, 20_000)
    late._number = 1
    plan(new, 4)
    for slot in range(OLD_SLOTS, 4):
        old.plan.append(0, f"old/{slot}", "d", b"{}")
    old.plan.sync()

    order: dict[str, list[RolloutRecord]] = {"old": [record(0, host_id="old")], "new": []}
    for by_old, wanted in commits:
        rows = [row("old" if by_old else "new", *one) for one in wanted]
        (late if by_old else new._log).commit([batch(rows)])
        order["old" if by_old else "new"] += rows
        with pytest.raises(RunError, match="taken over"):
            old.commit([batch(rows)])
    late.close()

    expected: dict[int, RolloutRecord] = {}
    for one in [*(row for row in order["old"] if SPACE.slot(row.key) < OLD_SLOTS), *order["new"]]:
        known = expected.get(one.key)
        if known is None or (known.score is None and (one.score is not None or one.generation > known.generation)):
            expected[one.key] = one
    found = [row for rows in winning(run.layout, SPACE, LOG.names) for row in batch_to_records(rows)]
    assert {row.key: row for row in found} == expected
    assert len(found) == len(expected)
    new.compact()
    table = run.rollouts()
    assert sorted(table.column("host_id").to_pylist()) == sorted(row.host_id for row in expected.values())
    assert run.winners().counts.sum() == len(table)
    old.close("failed")
    new.close("finished")
