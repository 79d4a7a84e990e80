"""Trace files: found by file, offset and hash, never outside RUN/traces. Run: pytest tests/store/test_traces.py"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_engine.errors import RunError
from rollout_engine.store import TraceWriter, read_trace, sees_run

from .rows import make_run, turn


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path).path


def test_turns_written_from_many_threads_are_read_back(run_dir: Path) -> None:
    writer = TraceWriter(run_dir, "host-0", 1)
    trajectories = [[turn(index, f"{number}-{index} " * 50) for index in range(number % 4)] for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(writer.write, trajectories))
    writer.sync()
    writer.close()
    assert {place.file for place in places} == {"host-0-1.bin"}
    assert [read_trace(run_dir, *place) for place in places] == trajectories


def test_a_writer_goes_on_behind_a_torn_trace(run_dir: Path) -> None:
    for _ in range(2):
        writer = TraceWriter(run_dir, "a/b ../c", 1)
        place = writer.write([turn(0)])
        writer.close()
        assert read_trace(run_dir, *place) == [turn(0)]
        with (run_dir / "traces" / place.file).open("ab") as file:
            file.write(b"\x10\0\0\0\0\0\0\0torn")
    assert os.listdir(run_dir / "traces") == ["a_b_.._c-1.bin"]


def test_a_changed_trace_is_refused(run_dir: Path) -> None:
    writer = TraceWriter(run_dir, "host-0", 1)
    first, second = writer.write([turn(0)]), writer.write([turn(1)])
    writer.close()
    path = run_dir / "traces" / first.file
    content = bytearray(path.read_bytes())
    content[second.offset + 20] ^= 1
    path.write_bytes(content)
    assert read_trace(run_dir, *first) == [turn(0)]
    with pytest.raises(RunError, match=rf"host-0-1\.bin: the trace at offset {second.offset} is not the one"):
        read_trace(run_dir, *second)
    path.write_bytes(content[:-1])
    for offset in (second.offset, second.offset + 1, 10**9, -1):
        with pytest.raises(RunError, match=r"host-0-1\.bin"):
            read_trace(run_dir, first.file, offset, second.sha256)
    with pytest.raises(RunError, match=r"gone\.bin"):
        read_trace(run_dir, "gone.bin", 0, first.sha256)


@pytest.mark.parametrize("file", ["../run.json", "/etc/passwd", "..", ".", "", "a/../../run.json", "x\0y", "link.bin"])
def test_a_trace_outside_the_run_is_refused(run_dir: Path, file: str) -> None:
    writer = TraceWriter(run_dir, "host-0", 1)
    place = writer.write([turn(0)])
    writer.close()
    (run_dir / "outside.bin").write_bytes((run_dir / "traces" / place.file).read_bytes())
    (run_dir / "traces" / "link.bin").symlink_to(run_dir / "outside.bin")
    with pytest.raises(RunError):
        read_trace(run_dir, file, place.offset, place.sha256)


def test_a_host_knows_whether_it_sees_the_drivers_run(run_dir: Path, tmp_path: Path) -> None:
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    assert sees_run(run_dir, run_id)
    assert not sees_run(run_dir, "another")
    assert not sees_run(tmp_path, run_id)
    (tmp_path / "run.json").write_text("[]")
    assert not sees_run(tmp_path, run_id)
