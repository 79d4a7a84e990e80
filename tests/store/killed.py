"""A driver that is killed, at every step or at random moments, and what is left of its run each time.

`python -m tests.store.killed SCENARIO DIRECTORY SEED [STRIDE]` tries every STRIDEth step, by default each. Children are
forked, so that hundreds of kills take seconds; the parent itself never reads or writes a run, because Arrow's threads
do not survive a fork.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from rollout_engine.errors import InputError
from rollout_engine.store import RunDir, create_run, open_run
from rollout_engine.store.scan import scan
from tests.store.rows import SPACE, batch, make_config, plan, record

Action: TypeAlias = Callable[[Path], None]
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}


def forked(action: Callable[[], None], kill_at: int | None = None) -> int:
    """Runs it in a child: 0 where it ended, 1 where it failed, -9 where it was killed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        if kill_at is not None:
            kill_at_step(kill_at)
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def kill_at_step(step: int) -> None:
    """Kills this process in the moment before its nth change of a directory, or its nth opening of a file to write."""
    steps = count()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        syncs = event == "open" and args[1] is None  # os.open, by which directories and finished files are synced
        if (event in CHANGES or writes or syncs) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def must(code: int) -> None:
    if code:
        sys.exit(1)


def at_every_step(act: Action, check: Action, base: Path | None, work: Path, steps: Iterable[int]) -> int:
    """Kills `act` at each of these steps until it gets through; `check` looks at each corpse."""
    for step in steps:
        if base is not None:
            shutil.copytree(base, work)
        code = forked(lambda: act(work), kill_at=step)
        must(code if code != -signal.SIGKILL else 0)
        must(forked(lambda: check(work)))
        shutil.rmtree(work)
        if code == 0:
            return step
    return 0


def keys_in(run: RunDir) -> list[int]:
    return [key for rows in scan(run.layout, run.space, ["key"]) for key in rows.column("key").to_pylist()]


def live_a_life(path: Path) -> None:
    """Everything that a driver does, once."""
    try:
        run = create_run(path, make_config())
    except InputError:
        run = open_run(path)
    writer = run.start()
    slots = len(writer.plan) + 2
    plan(writer, slots)
    writer.commit([batch([record(key)]) for key, _ in writer.ledger.todo(range(slots * SPACE.per_slot))])
    writer.epoch._record = writer.epoch._record.model_copy(update={"heartbeat": 0.0})
    writer.beat()
    writer.compact()
    writer.close("finished")


def can_live_on(path: Path) -> None:
    """Whatever is left, the next driver finds a run, or an empty place, and ends with each planned key once."""
    live_a_life(path)
    run = open_run(path)
    log = run.plan()
    expected = list(range(len(log) * SPACE.per_slot))
    log.close()
    assert sorted(keys_in(run)) == expected, "a key has no row, or two"
    assert len(run.rollouts()) == len(expected)
    left = [str(found) for found in (*path.glob(".*"), *path.glob("*/.*"))]
    assert not left, left


def prepare_compaction(path: Path) -> None:
    run = create_run(path, make_config())
    writer = run.start()
    plan(writer, 2)
    writer.commit([batch([record(key) for key in range(SPACE.per_slot)])])
    writer.compact()
    writer.commit([batch([record(key) for key in range(SPACE.per_slot, 2 * SPACE.per_slot)])])
    writer.close("finished")


def compact_again(path: Path) -> None:
    writer = open_run(path).start()
    writer.compact()
    writer.close("finished")


def one_whole_set(path: Path) -> None:
    run = open_run(path)
    expected = 2 * SPACE.per_slot
    assert len(run.rollouts()) == len(run.turns_table()) == expected
    assert all(run.turns(rollout_id) for rollout_id in run.rollouts(["rollout_id"]).column(0).to_pylist())
    for table in ("rollouts", "turns"):  # as others see it, by name alone: old, new, or for a moment not there
        if (path / table).exists():
            assert pq.read_table(path / table).num_rows in (SPACE.per_slot, expected)
    compact_again(path)
    assert pq.read_table(path / "rollouts").num_rows == pq.read_table(path / "turns").num_rows == expected
    assert not run.layout.staging.exists()


def commit_for_ever(path: Path, acknowledge: int, seed: int) -> None:
    draw = random.Random(seed)
    writer = open_run(path).start()
    for slots in count(len(writer.plan)):
        plan(writer, slots)
        keys = [key for key, _ in writer.ledger.todo(range(slots * SPACE.per_slot))]
        keys = keys[: draw.randint(1, 2 * SPACE.per_slot)]
        writer.commit([batch([record(key)]) for key in keys])
        os.write(acknowledge, (json.dumps(keys) + "\n").encode())


def killed_after(path: Path, seconds: float, seed: int) -> list[int]:
    """The keys that a driver acknowledged before it was killed."""
    reader, acknowledge = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            commit_for_ever(path, acknowledge, seed)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(acknowledge)
    told = os.read(reader, 1 << 16)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "the driver failed by itself"
    while more := os.read(reader, 1 << 16):
        told += more
    os.close(reader)
    return [key for line in told.splitlines(keepends=True) if line.endswith(b"\n") for key in json.loads(line)]


def random_kills(path: Path, seed: int) -> int:
    draw = random.Random(seed)
    acknowledged: set[int] = set()

    def make() -> None:
        create_run(path, make_config(store={"segment_bytes": 50_000}))

    def nothing_is_lost() -> None:
        found = keys_in(open_run(path))
        assert acknowledged <= set(found), f"lost: {acknowledged - set(found)}"
        assert len(found) == len(set(found)), "a key was committed twice"

    must(forked(make))
    for _ in range(12):
        acknowledged.update(killed_after(path, draw.uniform(0, 0.06), draw.getrandbits(32)))
        must(forked(nothing_is_lost))
    must(forked(lambda: can_live_on(path)))
    return len(acknowledged)


def main(scenario: str, directory: str, seed: str, stride: str = "1") -> None:
    work, base = Path(directory) / "work", Path(directory) / "base"
    steps = count(int(seed) % int(stride), int(stride))
    if scenario == "life":
        print(at_every_step(live_a_life, can_live_on, None, work, steps))
    elif scenario == "compaction":
        must(forked(lambda: prepare_compaction(base)))
        print(at_every_step(compact_again, one_whole_set, base, work, steps))
    else:
        print(random_kills(work, int(seed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
