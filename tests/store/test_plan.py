"""The plan log: dense slots under cuts, restarts and a superseded driver. Run: pytest tests/store/test_plan.py"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import RunError
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.store.layout import Layout
from rollout_engine.store.planlog import PlanLog
from rollout_engine.store.slotindex import SlotIndex

MODELS = ("strong", "weak")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    layout.plan.mkdir()
    return layout


def begun(layout: Layout, epoch: int) -> PlanLog:
    log = PlanLog(layout)
    log.begin(epoch, MODELS, 3)
    return log


def fill(log: PlanLog, start: int, stop: int, prefix: str = "t") -> None:
    for number in range(start, stop):
        assert log.append(0, f"{prefix}{number}", "abc", b'{"n":%d}' % number) == number


@settings(max_examples=50)
@given(names=st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.text(min_size=1)), unique=True, max_size=20))
def test_a_task_is_found_and_read_back_by_its_slot(fresh: Callable[[], Path], names: list[tuple[int, str]]) -> None:
    layout = Layout(fresh())
    layout.plan.mkdir()
    tasks = [Task(task_id=name[:500], prompt=name * 3, verifier={"type": "x", "y": name}) for _, name in names]
    first, log = len(names) // 2, begun(layout, 1)
    for number, ((round_, name), task) in enumerate(zip(names, tasks, strict=True)):
        if number == first:
            log.close()
            log = begun(layout, 2)
        body = task_body(task)
        assert log.find(round_, name) is None
        assert log.append(round_, name, body_digest(body), body) == number
    for _ in ("still open", "reopened"):
        assert [(entry.round, entry.task_id) for entry in log.entries()] == names
        for slot, ((round_, name), task) in enumerate(zip(names, tasks, strict=True)):
            assert log.find(round_, name) == slot
            assert log.body(slot) == task_body(task)
            assert log.entry(slot).digest == body_digest(log.body(slot))
        log.close()
        log = PlanLog(layout)
    log.close()


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_loses_only_the_torn_line_and_the_next_epoch_goes_on(
    fresh: Callable[[], Path], data: st.DataObject
) -> None:
    layout = Layout(fresh())
    layout.plan.mkdir()
    log = begun(layout, 1)
    ends = [layout.plan_file(1).stat().st_size]
    for number in range(5):
        fill(log, number, number + 1)
        log.sync()
        ends.append(layout.plan_file(1).stat().st_size)
    log.close()
    cut = data.draw(st.integers(0, ends[-1]))
    content = layout.plan_file(1).read_bytes()
    layout.plan_file(1).write_bytes(content[:cut] + data.draw(st.sampled_from([b"", bytes(50)])))
    whole = sum(end <= cut for end in ends[1:])

    log = begun(layout, 2)
    assert [entry.task_id for entry in log.entries()] == [f"t{number}" for number in range(whole)]
    fill(log, whole, whole + 70, "new")
    log.close()
    log = PlanLog(layout)
    assert [entry.slot for entry in log.entries()] == list(range(whole + 70))
    assert log.find(0, f"new{whole}") == whole
    assert [entry.slot for entry in log.entries(whole - 1 if whole else 0, whole + 2)][-1] == whole + 1
    log.close()


def test_what_a_superseded_driver_planned_later_is_void(layout: Layout) -> None:
    old = begun(layout, 1)
    fill(old, 0, 4)
    old.sync()
    new = begun(layout, 2)
    fill(old, 4, 9, "old")
    fill(new, 4, 6, "new")
    old.close()
    new.close()
    log = begun(layout, 3)
    assert [entry.task_id for entry in log.entries()] == ["t0", "t1", "t2", "t3", "new4", "new5"]
    assert len(log) == 6
    assert [log.find(0, task_id) for task_id in ("old5", "t3", "new4", "new5")] == [None, 3, 4, 5]
    log.close()


def test_a_slot_that_is_missing_or_damaged_is_an_error(layout: Layout) -> None:
    log = begun(layout, 1)
    fill(log, 0, 5)
    log.close()
    begun(layout, 2).close()
    path = layout.plan_file(1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError, match=r"plan/1\.jsonl: slots 4 to 4 are missing"):
        PlanLog(layout)
    for bad in (b"garbage\n", lines[2]):
        path.write_bytes(b"".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(RunError, match=r"plan/1\.jsonl: line 4 is not the entry of slot 2"):
            PlanLog(layout)
    path.write_bytes(b'{"epoch":1,"first_slot":0}\n' + b"".join(lines[1:]))
    with pytest.raises(RunError, match=r"plan/1\.jsonl"):
        PlanLog(layout)


def test_an_entry_that_changes_under_an_open_plan_is_an_error(layout: Layout) -> None:
    log = begun(layout, 1)
    fill(log, 0, 5)
    log.sync()
    content = layout.plan_file(1).read_bytes()
    with layout.plan_file(1).open("r+b") as file:
        file.seek(content.index(b'"slot":3'))
        file.write(b'"slot":7')
    with pytest.raises(RunError, match="slot 3 was changed"):
        log.entry(3)
    with pytest.raises(IndexError):
        log.entry(5)
    log.close()


@pytest.mark.root
def test_a_full_disk_tears_no_line_for_good(small_disk: Path) -> None:
    layout = Layout(small_disk)
    layout.plan.mkdir()
    log = begun(layout, 1)
    (small_disk / "filler").write_bytes(bytes(3_900_000))

    def fill_up() -> None:
        for number in range(100_000):
            log.append(0, f"t{number}", "abc", b"{}")

    with pytest.raises(RunError, match="No space left on device"):
        fill_up()
    slots = len(log)
    with pytest.raises(RunError, match="No space left on device"):
        log.sync()
    (small_disk / "filler").unlink()
    assert log.append(0, "more", "abc", b"{}") == slots
    log.close()
    log = PlanLog(layout)
    assert [entry.slot for entry in log.entries()] == list(range(slots + 1))
    assert log.find(0, "more") == slots
    log.close()


def test_a_plan_opened_for_reading_takes_nothing(layout: Layout) -> None:
    log = PlanLog(layout)
    with pytest.raises(RunError, match="reading only"):
        log.append(0, "t", "abc", b"{}")
    with pytest.raises(ValueError, match="one line"):
        log.append(0, "t", "abc", b"{\n}")
    log.close()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(2**32 - 40, 2**32 - 1) | st.just(7), max_size=60), st.integers()
)
def test_the_index_finds_what_a_dict_finds(hashes: list[int], seed: int) -> None:
    index = SlotIndex()
    draws = random.Random(seed)
    filler = [draws.getrandbits(40) for _ in range(1500)]
    expected: dict[int, list[int]] = {}
    for slot, hash_ in enumerate([*hashes, *filler]):
        index.add(hash_)
        expected.setdefault(hash_ & 0xFFFFFFFF, []).append(slot)
    for hash_, slots in expected.items():
        assert sorted(index.find(hash_)) == slots
        assert next(index.find(hash_)) == slots[0]
    assert all(list(index.find(hash_)) == expected.get(hash_, []) for hash_ in range(50))


def test_a_slot_costs_some_sixteen_bytes(layout: Layout) -> None:
    log = begun(layout, 1)
    for number in range(100_000):
        log.append(0, f"t{number}", "abc", b"{}")
    index, file = log._index, log._files[-1]
    arrays = (index._hashes, index._table, file._lengths, file._offsets)
    assert sum(map(sys.getsizeof, arrays)) <= 17 * len(log)
    log.close()
