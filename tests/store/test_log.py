"""The commit log under cuts, damage and full disks. Run: pytest tests/store/test_log.py"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import RunError
from rollout_engine.schema import LOG, batch_to_records
from rollout_engine.store.layout import Layout
from rollout_engine.store.log import CommitLog
from rollout_engine.store.scan import read_segment, scan, segments

from .rows import SPACE, batch, make_run, many, plan, record, rows_of


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    layout.log.mkdir()
    return layout


def keys_of(layout: Layout) -> list[int]:
    return [key for rows in scan(layout, SPACE, ["key"]) for key in rows.column("key").to_pylist()]


def test_a_committed_row_is_read_back_as_it_was(layout: Layout) -> None:
    row = record(5, score_components={"a": 0.5}, final_answer="42", weight_version_end="v2")
    log = CommitLog(layout, 1, 1 << 20)
    log.commit([batch([row])])
    assert [found for rows in scan(layout, SPACE, LOG.names) for found in batch_to_records(rows)] == [row]
    log.close()
    assert keys_of(layout) == [5]


def test_columns_come_in_the_order_asked_for(layout: Layout) -> None:
    log = CommitLog(layout, 1, 1 << 20)
    log.commit([batch([record(5)])])
    log.close()
    (rows,) = scan(layout, SPACE, ["score", "round", "key"])
    assert rows.schema.names == ["score", "round", "key"]


def test_order_is_kept_over_epochs_segments_and_merged_batches(layout: Layout) -> None:
    sizes = [1, 3, 100, 2, 64, 63, 0, 1, 1]
    expected = list(range(2 * sum(sizes)))
    fresh = iter(expected)
    for epoch in (9, 10):
        log = CommitLog(layout, epoch, 4_000)
        for _ in range(2):
            log.commit([])
        log.commit([many([next(fresh) for _ in range(size)], record(0)) for size in sizes[:5]])
        log.commit([many([next(fresh) for _ in range(size)], record(0)) for size in sizes[5:]])
        log.close()
    assert [(segment.epoch, segment.number) for segment in segments(layout)] == [(9, 0), (9, 1), (10, 0), (10, 1)]
    assert keys_of(layout) == expected


def test_many_small_batches_become_one(layout: Layout) -> None:
    log = CommitLog(layout, 1, 1 << 30)
    log.commit([batch([record(key)]) for key in range(200)])
    log.close()
    assert [len(rows) for rows in scan(layout, SPACE, ["key"])] == [200]


@pytest.fixture(scope="module")
def written(fresh: Callable[[], Path]) -> tuple[bytes, list[int], list[int]]:
    """A segment's bytes; its size after each commit; the number of rows by then."""
    layout = Layout(fresh())
    layout.log.mkdir()
    log = CommitLog(layout, 1, 1 << 30)
    path, ends, rows = layout.segment(1, 0), [0], [0]
    for count in (1, 70, 3, 5):
        log.commit([many(range(rows[-1], rows[-1] + count), record(0))])
        ends.append(path.stat().st_size)
        rows.append(rows[-1] + count)
    log.close()
    return path.read_bytes(), ends, rows


@settings(max_examples=200)
@given(data=st.data(), tail=st.sampled_from(["nothing", "zeros"]))
def test_a_cut_loses_the_torn_batch_and_nothing_else(
    written: tuple[bytes, list[int], list[int]],
    fresh: Callable[[], Path],
    data: st.DataObject,
    tail: str,
) -> None:
    content, ends, rows = written
    cut = data.draw(st.integers(0, len(content)))
    layout = Layout(fresh())
    layout.log.mkdir(parents=True, exist_ok=True)
    # Zeros behind the end of a commit are what a crash of the machine may leave; within a batch they are damage.
    zeros = bytes(5000) if tail == "zeros" and cut in ends[1:] else b""
    layout.segment(1, 0).write_bytes(content[:cut] + zeros)
    whole = max(count for end, count in zip(ends, rows, strict=True) if end <= cut)
    assert keys_of(layout) == list(range(whole))


def test_every_cut_near_a_boundary(written: tuple[bytes, list[int], list[int]], layout: Layout) -> None:
    content, ends, rows = written
    for end, count in zip(ends[1:], rows[1:], strict=True):
        for cut in range(end - 1, min(end + 12, len(content))):
            layout.segment(1, 0).write_bytes(content[:cut])
            assert keys_of(layout) == list(range(count if cut >= end else rows[rows.index(count) - 1]))


def test_damage_before_the_end_names_the_file_and_the_byte(
    written: tuple[bytes, list[int], list[int]], layout: Layout
) -> None:
    content, ends, _ = written
    path = layout.segment(1, 0)
    for at in (ends[1], ends[2] + 8):
        path.write_bytes(content[:at] + b"\x55" * 64 + content[at + 64 :])
        with pytest.raises(RunError, match=rf"1-0\.arrows: damaged at byte {ends[1] if at == ends[1] else ends[2]} of"):
            keys_of(layout)
    path.write_bytes(b"not arrow at all, but long enough to be read as something" * 20)
    with pytest.raises(RunError, match=r"1-0\.arrows: damaged at byte 0"):
        keys_of(layout)


def test_a_segment_of_another_schema_is_refused(layout: Layout) -> None:
    with pa.ipc.new_stream(str(layout.segment(1, 0)), pa.schema([("key", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"key": [1]}))
    with pytest.raises(RunError, match=r"1-0\.arrows: its schema is not version 1"):
        keys_of(layout)
    with pytest.raises(RunError, match="same version on all hosts"):
        CommitLog(layout, 2, 1 << 20).commit([pa.record_batch({"key": [1]})])


@pytest.mark.root
def test_a_full_disk_ends_in_a_run_error_and_a_readable_run(small_disk: Path) -> None:
    run = make_run(small_disk)
    writer = run.start()
    plan(writer, 30_000 // SPACE.per_slot)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 << 20))
    committed = 0

    def fill() -> None:
        nonlocal committed
        for committed in range(0, 30_000, 100):
            writer.commit([many(range(committed, committed + 100), record(0))])

    with pytest.raises(RunError, match="No space left on device"):
        fill()
    assert committed >= 1000
    assert run.winners().counts.sum() >= committed
    with pytest.raises(RunError, match="No space left on device"):
        writer.compact()
    assert not run.layout.rollouts.exists()

    filler.unlink()
    writer.commit([many(range(committed, committed + 100), record(0))])
    writer.close("interrupted")
    assert run.winners().counts.sum() == committed + 100
    assert len(set(rows_of(run, "key"))) == committed + 100


def test_a_file_size_limit_leaves_the_log_readable(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rollout_engine.errors import RunError\n"
        "from tests.store.rows import make_run, many, plan, record\n"
        "writer = make_run(Path(sys.argv[1])).start()\n"
        "plan(writer, 10)\n"
        "writer.plan.sync()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "for first in range(0, 60, 2):\n"
        "    try:\n"
        "        writer.commit([many([first, first + 1], record(0))])\n"
        "    except RunError as error:\n"
        "        print(first, error, flush=True)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert "File too large" in done.stdout
    refused = {int(line.split()[0]) for line in done.stdout.splitlines() if line[:1].isdigit()}
    layout = Layout(tmp_path / "run")
    found = keys_of(layout)
    assert set(found) >= {key for first in range(0, 60, 2) if first not in refused for key in (first, first + 1)}
    assert len(segments(layout)) >= len(refused) > 1


def test_a_write_that_failed_half_way_is_not_written_again_behind_its_torn_piece(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made between the failure and the close of the segment."""
    rows = many(range(100), record(0))
    log = CommitLog(layout, 1, 1 << 20)
    log.commit([rows])

    def no_room(handle: int, data: bytes) -> None:
        os.write(handle, data[:3000])
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollout_engine.store.log.write_all", no_room)
    with pytest.raises(RunError, match="No space left on device"):
        log.commit([rows])
    assert keys_of(layout) == list(range(100))
    log.commit([rows])
    log.close()
    assert keys_of(layout) == [*range(100), *range(100)]


def test_a_batch_of_garbage_in_whole_form_is_not_believed(layout: Layout) -> None:
    log = CommitLog(layout, 1, 1 << 20)
    log.commit([many(range(100), record(0, final_answer="x" * 50))])
    path = layout.segment(1, 0)
    end = path.stat().st_size
    log.commit([many(range(100, 200), record(0, final_answer="x" * 50))])
    content = path.read_bytes()
    path.write_bytes(content[: end + 4000] + bytes(len(content) - end - 4000))
    assert [len(rows) for rows in read_segment(path, LOG.names)] == [100]
    log.close()
