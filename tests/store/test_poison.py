"""A run directory edited by hand: nothing in it is executed or unpickled, nothing hangs, and errors name the file.

Run: pytest tests/store/test_poison.py
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_engine.errors import RunError
from rollout_engine.runstore import read_scores
from rollout_engine.schema import LOG, ROLLOUTS, TURNS
from rollout_engine.store import open_run
from rollout_engine.store.compact import END_MARK_BYTES
from rollout_engine.store.layout import Layout
from tests.store.rows import batch, make_run, plan, record

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0
ADDRESS_SPACE = 2 << 30


class Touch:
    """What its unpickling would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its tables."""
    run = make_run(tmp_path_factory.mktemp("poison"))
    writer = run.start()
    plan(writer, 2)
    writer.commit([batch([record(key) for key in range(12)])])
    writer.compact()
    writer.close("finished")
    return run.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def poison(*arguments: object) -> str:
    """What a reader in a process of its own says of it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.poison", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each of its threads takes address space
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- nothing is executed --------------------------------------------------------------------------------------------

EXTENSIONS = ("arrow.py_extension_type", "ray.data.arrow_pickled_object", "pandas.period")


def armed(schema: pa.Schema, payload: bytes, name: str) -> pa.Schema:
    """The schema, each field of which claims to be an extension type whose description is a pickle."""
    claim = {"ARROW:extension:name": name, "ARROW:extension:metadata": payload}
    fields = [field.with_metadata(claim) for field in schema]
    return pa.schema(fields, metadata={**(schema.metadata or {}), "pandas": payload, "ARROW:pickled": payload})


@pytest.mark.parametrize("name", EXTENSIONS)
def test_a_pickle_in_the_log_or_in_a_table_is_not_loaded(name: str, run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    payload = pickle.dumps(Touch(marker))
    pickle.loads(payload)
    marker.rmdir()  # it would have worked
    layout = Layout(run)
    segment = layout.segment(1, 0)
    rows = pa.Table.from_batches(list(pa.ipc.open_stream(segment.read_bytes())), LOG)
    with pa.ipc.new_stream(str(segment), armed(LOG, payload, name)) as writer:
        writer.write_table(rows.cast(armed(LOG, payload, name)))
    for table, schema in (("rollouts", ROLLOUTS), ("turns", TURNS)):
        path = run / table / "part-00000.parquet"
        pq.write_table(pq.read_table(path).cast(schema).cast(armed(schema, payload, name)), path)
    said = poison("read", run)
    assert not marker.exists()
    assert said == "read" or str(run) in said
    manifest = json.loads(layout.compacted.read_text())  # the tables are looked at as well, as if they were current
    manifest["log"][segment.name] = segment.stat().st_size
    layout.compacted.write_text(json.dumps(manifest))
    poison("read", run)
    assert not marker.exists()


def test_pickles_in_the_place_of_every_file_are_not_loaded(run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    payload = pickle.dumps(Touch(marker))
    (tmp_path / "payload").write_bytes(payload)
    assert poison("replace", run, tmp_path / "payload", marker) == "read", "each was put back"


# -- bombs ----------------------------------------------------------------------------------------------------------


def test_a_length_that_is_not_there_is_damage_and_takes_no_memory(run: Path) -> None:
    segment = Layout(run).segment(1, 0)
    good = segment.read_bytes()
    Layout(run).compacted.unlink()
    for length in (0x7FFFFFFF, 0xFFFFFFF0):
        segment.write_bytes(struct.pack("<II", 0xFFFFFFFF, length) + good[8:])
        said = poison("read", run, ADDRESS_SPACE)
        assert "MemoryError" not in said


def test_a_batch_that_unpacks_to_more_than_memory_is_an_error_that_names_the_segment(run: Path) -> None:
    segment = Layout(run).segment(1, 0)
    rows = next(iter(pa.ipc.open_stream(segment.read_bytes())))
    big = pa.array(["\0" * (300 << 20)] * 6, pa.large_string()).cast(pa.string())
    fields = {name: rows.column(name) for name in LOG.names}
    index = 6
    fields["final_answer"] = pa.concat_arrays([big, pa.array([None] * (len(rows) - index), pa.string())])
    bomb = pa.RecordBatch.from_arrays([fields[name] for name in LOG.names], schema=LOG)
    with pa.ipc.new_stream(str(segment), LOG, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(bomb)
    assert segment.stat().st_size < 64 << 20, "it is small on the disk"
    Layout(run).compacted.unlink()
    del bomb, fields, big
    assert str(segment) in poison("read", run, ADDRESS_SPACE)


def test_a_table_that_unpacks_to_more_than_memory_is_an_error_that_names_it(run: Path) -> None:
    path = run / "rollouts" / "part-00000.parquet"
    rows = pq.read_table(path).cast(ROLLOUTS)
    answers = pa.array(["\0" * (100 << 20)] * len(rows), pa.string())
    rows = rows.set_column(rows.schema.get_field_index("final_answer"), ROLLOUTS.field("final_answer"), answers)
    pq.write_table(rows, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 4 << 20, "it is small on the disk"
    said = poison("read", run, ADDRESS_SPACE)
    assert "part-00000.parquet" in said


def deep(opening: str, closing: str) -> bytes:
    return (opening * 50_000 + closing * 50_000).encode()


@pytest.mark.parametrize("content", [deep("[", "]"), deep('{"a":', "}"), b"9" * 10_000, b'{"epoch": 1e999}'])
@pytest.mark.parametrize("name", ["run.json", "epochs/1.json", "compacted.json", "source.json", "plan/1.jsonl"])
def test_json_that_breaks_parsers_is_an_error_that_names_the_file(name: str, content: bytes, run: Path) -> None:
    (run / name).write_bytes(content + b"\n")
    said = poison("read", run)
    if name != "compacted.json":  # without a good manifest, the log is read
        assert str(run / name) in said
    else:
        assert said == "read"


def test_a_record_that_has_no_end_is_an_error(run: Path) -> None:
    (run / "run.json").unlink()
    (run / "run.json").symlink_to("/dev/zero")
    assert "no regular file" in poison("read", run)
    (run / "run.json").unlink()
    with (run / "run.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "larger than 64 MiB" in poison("read", run, ADDRESS_SPACE)


# -- files of another kind ------------------------------------------------------------------------------------------

PLACES = [
    "run.json",
    "epochs/2.json",
    "plan/2.jsonl",
    "log/1-1.arrows",
    "compacted.json",
    "source.json",
    "groups.parquet",
    "rollouts/part-00000.parquet",
]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file_is_told_and_hangs_nobody(name: str, make: Callable[[Path], None], run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    said = poison("read", run)
    assert name == "compacted.json" or str(run / name) in said


def test_rows_whose_keys_lie_outside_the_plan_or_contradict_it_are_contained(run: Path) -> None:
    layout = Layout(run)
    layout.compacted.unlink()
    for key in (-1, 1 << 62, 1 << 40):
        rows = batch([record(0)])
        rows = rows.set_column(0, LOG.field(0), pa.array([key], LOG.field(0).type))
        assert LOG.names[0] == "key"
        with pa.ipc.new_stream(str(layout.segment(1, 7)), LOG) as writer:
            writer.write_batch(rows)
        said = poison("read", run, ADDRESS_SPACE)
        assert said == "read" or str(layout.log) in said


# -- anything -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_changed_bytes_are_read_or_told_and_crash_nobody(seed: int, whole: Path) -> None:
    said = poison("mutate", whole, seed, 60)
    assert said.startswith("60 tried")


def test_numbers_that_no_rollout_has_do_not_reach_a_reward(run: Path) -> None:
    layout = Layout(run)
    layout.compacted.unlink()
    rows = batch([record(0, score=score, generation=1) for score in (np.nan, np.inf, -np.inf)])
    with pa.ipc.new_stream(str(layout.segment(1, 5)), LOG) as writer:
        writer.write_batch(rows)
    said = poison("read", run)
    assert said == "read" or str(layout.log) in said


# -- what is gone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [None, 300], ids=["gone", "cut"])
def test_a_run_whose_log_is_shorter_than_its_tables_is_not_run_again_over_them(left: int | None, run: Path) -> None:
    segment = Layout(run).segment(1, 0)
    size = segment.stat().st_size
    if left is None:
        segment.unlink()
    else:
        os.truncate(segment, left)
    with pytest.raises(RunError, match=f"{segment}: has {left or 0} of the {size} bytes") as caught:
        open_run(run).start()
    assert "compacted.json" in str(caught.value)
    assert open_run(run).driver() is None
    Layout(run).compacted.unlink()
    open_run(run).start().close("interrupted")  # whoever wants its rollouts run again says so


def test_a_copy_without_log_and_plan_has_the_scores_of_the_whole(run: Path) -> None:
    before = read_scores(open_run(run))
    for folder in (Layout(run).log, Layout(run).plan):
        shutil.rmtree(folder)
    found = read_scores(open_run(run))
    order = np.lexsort((found.task_ids.to_pylist(), found.rounds))
    assert [found.task_ids[row].as_py() for row in order] == sorted(before.task_ids.to_pylist())
    rank = np.argsort(before.task_ids.to_pylist())
    np.testing.assert_array_equal(found.kinds[order], before.kinds[rank])
    np.testing.assert_array_equal(found.values[order], before.values[rank])


def test_reading_a_run_whose_log_was_cut_names_the_segment(run: Path) -> None:
    segment = Layout(run).segment(1, 0)
    os.truncate(segment, 300)
    with pytest.raises(RunError, match=f"{segment}: has 300 of the"):
        read_scores(open_run(run))


def test_a_segment_that_has_lost_its_end_mark_alone_is_whole(run: Path) -> None:
    segment = Layout(run).segment(1, 0)
    os.truncate(segment, segment.stat().st_size - END_MARK_BYTES)
    writer = open_run(run).start()
    assert writer.ledger.rows == 12
    writer.close("finished")


def test_rows_whose_plan_is_gone_are_told_and_not_run_again(run: Path) -> None:
    plan_file = Layout(run).plan_file(1)
    plan_file.unlink()
    with pytest.raises(RunError, match=f"{plan_file}: is gone"):
        open_run(run).start()


def test_damaged_tables_are_told_with_what_makes_them_anew(run: Path) -> None:
    part = Layout(run).rollouts / "part-00000.parquet"
    part.write_bytes(b"no parquet")
    with pytest.raises(RunError, match=r"remove compacted\.json, and `rollout resume`"):
        open_run(run).rollouts()
    Layout(run).compacted.unlink()
    found = open_run(run)
    assert len(found.rollouts()) == 12
    assert not found.has_tables()
