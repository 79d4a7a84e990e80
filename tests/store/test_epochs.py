"""One driver at a time. Run: pytest tests/store/test_epochs.py"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_engine.errors import InputError, RunError
from rollout_engine.store.epochs import Epoch, EpochRecord, live_driver, process_start, take_epoch


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def change(epochs: Path, number: int, **fields: object) -> None:
    path = epochs / f"{number}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_second_driver_is_refused_by_name(tmp_path: Path) -> None:
    first = take_epoch(tmp_path, 5)
    with pytest.raises(InputError, match=f"pid {os.getpid()} on {re.escape(socket.gethostname())}") as refused:
        take_epoch(tmp_path, 5)
    assert "1.json" in refused.value.fix
    driver = live_driver(tmp_path)
    assert driver is not None
    assert driver.pid == os.getpid()
    first.release()
    first.release()
    assert live_driver(tmp_path) is None
    assert take_epoch(tmp_path, 5).number == 2


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    take_epoch(tmp_path, 1e6)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        change(tmp_path, 1, pid=child.pid, process_start=process_start(child.pid))
        with pytest.raises(InputError, match=f"pid {child.pid}"):
            take_epoch(tmp_path, 5)
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) == "", "a zombie is not at work"
    assert take_epoch(tmp_path, 5).number == 2
    child.wait()


def test_a_pid_that_was_given_to_another_process_holds_nothing(tmp_path: Path) -> None:
    take_epoch(tmp_path, 1e6)
    change(tmp_path, 1, process_start="12345")
    assert take_epoch(tmp_path, 5).number == 2


def silent_for(epochs: Path, number: int, seconds: float) -> None:
    """As if the record had been written so long ago."""
    ago = time.time() - seconds
    os.utime(epochs / f"{number}.json", (ago, ago))


@pytest.mark.parametrize("wrong_by", [0, -86400, 86400])
def test_another_machine_is_judged_by_the_age_of_its_record_whatever_its_clock_says(
    tmp_path: Path, wrong_by: float
) -> None:
    epoch = take_epoch(tmp_path, 50)
    heartbeat = time.time() + wrong_by
    change(tmp_path, 1, machine="elsewhere", host="node-7", pid=1, heartbeat=heartbeat)
    silent_for(tmp_path, 1, 200)
    with pytest.raises(InputError, match=r"pid 1 on node-7, heartbeat 2\d\d s ago"):
        take_epoch(tmp_path, 50)
    assert live_driver(tmp_path) is not None
    silent_for(tmp_path, 1, 301)
    assert live_driver(tmp_path) is None
    assert take_epoch(tmp_path, 50).number == 2
    assert sorted(os.listdir(tmp_path)) == ["1.json", "2.json"]
    with pytest.raises(RunError, match="another driver has taken over"):
        epoch.check()


def test_our_own_clock_may_be_wrong_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and the present are stamped by whoever keeps the files."""
    take_epoch(tmp_path, 50)
    change(tmp_path, 1, machine="elsewhere")
    right = time.time()
    monkeypatch.setattr(time, "time", lambda: right + 86400)
    assert live_driver(tmp_path) is not None
    silent_for(tmp_path, 1, 86400 + 301)
    assert live_driver(tmp_path) is None


def test_the_heartbeat_is_renewed_when_it_is_due(tmp_path: Path) -> None:
    clock = Clock()
    epoch = take_epoch(tmp_path, 5, clock)

    def heartbeat() -> float:
        return EpochRecord.model_validate_json((tmp_path / "1.json").read_bytes()).heartbeat

    clock.now += 4
    epoch.beat()
    assert heartbeat() == clock.now - 4
    clock.now += 1
    epoch.beat()
    assert heartbeat() == clock.now
    (tmp_path / "7.json").touch()
    epoch.beat()
    clock.now += 6
    with pytest.raises(RunError, match="epoch 7"):
        epoch.beat()
    assert sorted(os.listdir(tmp_path)) == ["1.json", "7.json"]


def test_of_many_drivers_one_gets_the_epoch(tmp_path: Path) -> None:
    def attempt(_: int) -> Epoch | None:
        try:
            return take_epoch(tmp_path, 5)
        except InputError:
            return None

    for number in range(1, 6):
        with ThreadPoolExecutor(8) as pool:
            taken = [epoch for epoch in pool.map(attempt, range(8)) if epoch is not None]
        assert [epoch.number for epoch in taken] == [number]
        taken[0].release()


def test_an_epoch_whose_maker_was_killed_at_once_is_passed_over_later(tmp_path: Path) -> None:
    (tmp_path / "3.json").touch()
    with pytest.raises(InputError, match="just starting"):
        take_epoch(tmp_path, 5)
    os.utime(tmp_path / "3.json", (0, 0))
    assert take_epoch(tmp_path, 5).number == 4


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"epoch": 1, "pid": "x"}')
    with pytest.raises(InputError, match=r"1\.json: is no epoch record"):
        take_epoch(tmp_path, 5)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"):
        take_epoch(tmp_path / "file" / "epochs", 5)
