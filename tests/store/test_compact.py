"""Compaction and reading: the same rows from Parquet as from the log. Run: pytest tests/store/test_compact.py"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_engine.errors import InputError, RunError
from rollout_engine.schema import ROLLOUTS, TURNS, group_id, rollout_id
from rollout_engine.store import RunDir, RunWriter, TraceWriter, open_run, read_rollouts, read_turns
from rollout_engine.store import compact as compact_module
from rollout_engine.store.compact import compact, current_parts
from rollout_engine.store.swap import finish
from rollout_engine.types import RolloutRecord, Turn

from .rows import MODELS, SPACE, batch, failed, make_run, many, plan, record, turn

SLOTS = 8


def key_id(key: int) -> str:
    return rollout_id(0, f"task/{SPACE.slot(key)}", MODELS[SPACE.model(key)], SPACE.attempt(key))


def turns_for(key: int) -> list[Turn]:
    return [turn(index, f"turn {index} of {key} " * (1 + key % 5)) for index in range(key % 4)]


def trace_rows(run: RunDir, keys: range) -> list[RolloutRecord]:
    """Rows; the turns of every seventh lie in a trace file."""
    writer = TraceWriter(run.path, "host-0", 1)
    rows = []
    for key in keys:
        turns = turns_for(key)
        row = record(key, turns=turns, num_turns=len(turns), score_components={"a": 1.0}, final_answer=str(key))
        if key % 7 == 3:
            row.trace_file, row.trace_offset, row.trace_sha256 = writer.write(turns)
            row.turns = []
        rows.append(row)
    writer.close()
    return rows


@pytest.fixture
def written(tmp_path: Path) -> tuple[RunDir, RunWriter]:
    run = make_run(tmp_path)
    writer = run.start()
    plan(writer, SLOTS)
    rows = trace_rows(run, range(SLOTS * SPACE.per_slot))
    for first in range(0, len(rows), 16):
        writer.commit([batch([failed(row.key) for row in rows[first : first + 3]]), batch(rows[first : first + 16])])
        writer.commit([batch([record(row.key, score=0.0, generation=1) for row in rows[first : first + 2]])])
    return run, writer


def plain(table: pa.Table) -> list[dict[str, object]]:
    return table.to_pylist()


@pytest.mark.parametrize("chunk_bytes", [compact_module.CHUNK_BYTES, 5_000])
def test_parquet_says_what_the_log_says(written: tuple[RunDir, RunWriter], chunk_bytes: int) -> None:
    run, writer = written
    keys = range(SLOTS * SPACE.per_slot)
    from_log, turns_from_log = run.rollouts(), run.turns_table()
    assert [run.turns(key_id(key)) for key in keys] == [turns_for(key) for key in keys]
    writer.close("finished")
    done = compact(run.layout, run.run_id, run.space, chunk_bytes=chunk_bytes)
    assert (done.rollouts, done.turns) == (len(keys), sum(key % 4 for key in keys))
    assert done.missing_traces == ()
    assert (done.parts == 1) == (chunk_bytes > 10_000)

    parts = current_parts(run.layout, "rollouts")
    assert parts is not None
    assert len(parts.paths) == done.parts == len(os.listdir(run.path / "turns"))
    table = read_rollouts(run.path)
    assert table.schema.equals(ROLLOUTS, check_metadata=True)
    assert plain(table) == plain(from_log)
    assert sorted(table.column("rollout_id").to_pylist()) == sorted(map(key_id, keys))
    assert set(table.column("score").to_pylist()) == {1.0}
    assert set(table.column("run_id").to_pylist()) == {run.run_id}
    assert table.column("group_id")[0].as_py() == group_id(0, "task/0", "strong")
    assert read_rollouts(run.path, ["score", "group_id"]).column_names == ["score", "group_id"]
    turns = run.turns_table()
    assert turns.schema.equals(TURNS, check_metadata=True)
    order = [("rollout_id", "ascending"), ("index", "ascending")]
    assert plain(turns.sort_by(order)) == plain(turns_from_log)
    assert [read_turns(run.path, key_id(key)) for key in keys] == [turns_for(key) for key in keys]


def test_turns_are_sorted_within_a_part_in_bounded_row_groups(
    written: tuple[RunDir, RunWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = written
    monkeypatch.setattr(compact_module, "ROW_GROUP_ROWS", 20)
    writer.compact()
    writer.close("finished")
    file = pq.ParquetFile(run.path / "turns" / "part-00000.parquet")
    rows = file.read(columns=["rollout_id", "index"]).to_pylist()
    assert rows == sorted(rows, key=lambda row: (row["rollout_id"].encode(), row["index"]))
    groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert groups == [20, 20, 20, 12]
    assert file.schema_arrow.metadata[b"rollout_engine.schema_version"] == b"1"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    keys = range(SLOTS * SPACE.per_slot)
    assert [run.turns(key_id(key)) for key in keys] == [turns_for(key) for key in keys]
    monkeypatch.setattr(compact_module, "ROW_GROUP_BYTES", 1)
    compact(run.layout, run.run_id, run.space)
    assert pq.ParquetFile(run.path / "turns" / "part-00000.parquet").metadata.num_row_groups == 72


def test_new_rows_are_seen_before_and_after_the_next_compaction(written: tuple[RunDir, RunWriter]) -> None:
    run, writer = written
    writer.close("interrupted")
    compact(run.layout, run.run_id, run.space, chunk_bytes=1)
    many_parts = len(os.listdir(run.path / "rollouts"))
    writer = open_run(run.path).start()
    assert current_parts(run.layout, "rollouts") is not None, "a driver that has committed nothing changes nothing"
    plan(writer, SLOTS + 1)
    key = SLOTS * SPACE.per_slot
    writer.commit([batch([record(key, turns=[turn(0, "new")])])])
    assert current_parts(run.layout, "rollouts") is None
    assert len(run.rollouts()) == key + 1
    assert run.turns(key_id(key)) == [turn(0, "new")]
    writer.compact()
    assert current_parts(run.layout, "turns") is not None
    assert len(os.listdir(run.path / "rollouts")) == len(os.listdir(run.path / "turns")) == 1 < many_parts
    writer.close("finished")
    assert current_parts(run.layout, "rollouts") is not None, "closing adds nothing to the log"
    assert len(run.rollouts()) == key + 1
    assert not run.layout.staging.exists()


def test_an_empty_run_has_empty_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = run.start()
    writer.compact()
    writer.close("finished")
    assert pq.read_table(run.path / "rollouts").num_rows == 0
    assert pq.read_table(run.path / "turns").schema.names == TURNS.names
    with pytest.raises(InputError, match="there is no rollout 'x'"):
        run.turns("x")
    with pytest.raises(InputError, match="no column 'nope'"):
        run.rollouts(["nope"])


def test_a_lost_trace_costs_its_own_turns_and_is_named(written: tuple[RunDir, RunWriter]) -> None:
    run, writer = written
    (run.path / "traces" / "host-0-1.bin").unlink()
    done = writer.compact()
    writer.close("finished")
    traced = [key for key in range(SLOTS * SPACE.per_slot) if key % 7 == 3]
    assert len(done.missing_traces) == len(traced)
    assert done.rollouts == SLOTS * SPACE.per_slot
    assert run.turns(key_id(5)) == turns_for(5)
    with pytest.raises(RunError, match=r"host-0-1\.bin"):
        run.turns(key_id(traced[0]))


def test_a_copy_without_its_log_is_read_from_parquet(written: tuple[RunDir, RunWriter], tmp_path: Path) -> None:
    run, writer = written
    writer.compact()
    writer.close("finished")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.json", "compacted.json", "rollouts", "turns"):
        (shutil.copytree if (run.path / name).is_dir() else shutil.copy)(run.path / name, copy / name)
    assert len(read_rollouts(copy)) == SLOTS * SPACE.per_slot
    assert read_turns(copy, key_id(6)) == turns_for(6)
    assert read_turns(copy, key_id(4)) == turns_for(4) == []
    with pytest.raises(InputError, match="there is no rollout"):
        read_turns(copy, "0/strong/0/another")


def test_a_damaged_part_is_named_and_a_damaged_manifest_is_not_believed(written: tuple[RunDir, RunWriter]) -> None:
    run, writer = written
    writer.compact()
    writer.close("finished")
    part = run.path / "rollouts" / "part-00000.parquet"
    good = part.read_bytes()
    part.write_bytes(good[:-100])
    with pytest.raises(RunError, match=r"part-00000\.parquet"):
        run.rollouts()
    pq.write_table(pa.table({"a": [1]}), part)
    with pytest.raises(RunError, match=r"part-00000\.parquet: has another schema"):
        run.rollouts()
    part.unlink()
    assert len(run.rollouts()) == SLOTS * SPACE.per_slot
    part.write_bytes(good)
    for bad in (b"", b"[]", b'{"log": 3}', b"\xff"):
        run.layout.compacted.write_bytes(bad)
        assert current_parts(run.layout, "rollouts") is None
        assert len(run.rollouts()) == SLOTS * SPACE.per_slot


@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4, 5])
def test_a_swap_that_was_killed_half_way_reads_as_the_new_set(
    written: tuple[RunDir, RunWriter], tmp_path: Path, moved: int
) -> None:
    """The states that `finish` goes through, made by hand."""
    run, writer = written
    writer.compact()
    shutil.copytree(run.path, tmp_path / "old")
    plan(writer, SLOTS + 1)
    writer.commit([batch([record(SLOTS * SPACE.per_slot)])])
    writer.compact()
    writer.close("finished")
    new, ready = tmp_path / "new", run.layout.staging / "ready"
    new.mkdir()
    ready.mkdir(parents=True)
    steps = []
    for name in ("rollouts", "turns", "compacted.json"):
        (run.path / name).rename(ready / name)
        old = tmp_path / "old" / name
        (shutil.copytree if old.is_dir() else shutil.copy)(old, run.path / name)
        aside = run.layout.staging / f"old-{name}"
        if name != "compacted.json":
            steps.append((run.path / name, aside))
        steps.append((ready / name, run.path / name))
    for source, target in steps[:moved]:
        source.rename(target)
    rows = SLOTS * SPACE.per_slot + 1
    assert current_parts(run.layout, "turns") is not None
    assert len(run.rollouts()) == rows
    assert run.turns(key_id(rows - 1)) == [turn(0)]
    finish(run.layout)
    assert pq.read_table(run.path / "rollouts").num_rows == rows
    assert not run.layout.staging.exists()
    assert len(run.rollouts()) == rows


def test_other_tools_read_the_tables(written: tuple[RunDir, RunWriter]) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    run, writer = written
    writer.compact()
    writer.close("finished")
    (row,) = duckdb.sql(
        "select count(*), avg(score), count(distinct group_id), max(num_turns), max(score_components['a']), "
        f"max(epoch(queued_at)) from '{run.path}/rollouts/*.parquet'"
    ).fetchall()
    assert row == (48, 1.0, 16, 3, 1.0, 1.5)
    (turns,) = duckdb.sql(
        f"select count(*), max(messages[2].content), sum(usage.completion) from '{run.path}/turns/*.parquet'"
    ).fetchall()
    assert turns[0] == 72
    assert turns[2] == 144
    frame = polars.read_parquet(f"{run.path}/rollouts/*.parquet")
    assert frame["score"].mean() == 1.0
    assert polars.read_parquet(f"{run.path}/turns/*.parquet")["messages"].list.len().sum() == 144


def test_a_hundred_thousand_rollouts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = run.start()
    plan(writer, 100_000 // SPACE.per_slot + 1)
    row = record(0, turns=[turn(index, "some text " * 20) for index in range(2)])
    for first in range(0, 100_000, 1_000):
        writer.commit([many(range(first, first + 1_000), row)])
    done = writer.compact()
    writer.close("finished")
    assert (done.rollouts, done.turns) == (100_000, 200_000)
    assert len(run.turns(key_id(77_777))) == 2
    assert run.rollouts(["rollout_id"]).column(0).unique().to_numpy(zero_copy_only=False).size == 100_000
