"""Whole runs on S3: killed, resumed, looked at, over lines that fail. Run: pytest tests/store/test_s3_run.py"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.disk import node
from rollout_engine.engine import RolloutEngine
from rollout_engine.store import read_rollouts
from rollout_engine.store.mirrors import detach_all
from rollout_engine.store.objects import open_objects
from tests.cli.rollout import FAST, LIMIT_S, Done, Running, rollout, write_tasks
from tests.helpers import make_config, make_tasks
from tests.store.s3_server import BUCKET, SECRET, Ask, Proxy, behind_proxy, moto_server
from tests.test_full_disk import fill

WORK = ("-k", "4", "--slots", "6", *FAST)
TASKS, ROWS = 12, 12 * 2 * 4
SLOWLY = 3000
"""Milliseconds of a rollout: a run takes 48 s, and is not over before a busy machine has looked at its first rows."""
AT_ONCE = ("--slots", str(ROWS))
NUMBERS = count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The store behind a line that may fail; commands and this process find it by the standard variables."""
    with behind_proxy(server, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def uri() -> str:
    return f"s3://{BUCKET}/whole-{next(NUMBERS)}"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Counter[Any]:
    """The scores of the same run on a disk."""
    folder = tmp_path_factory.mktemp("local")
    write_tasks(folder / "tasks.jsonl", TASKS)
    done = rollout("run", "tasks.jsonl", *models(), *WORK, "-o", "a", "-q", cwd=folder)
    assert done.code == 0, done.err
    return scores(str(folder / "a"))


def scores(run: str) -> Counter[Any]:
    """How often each rollout has which score; a mirror of an earlier look is not relied on."""
    detach_all()
    table = read_rollouts(run, ["rollout_id", "score", "final_answer"])
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def models(latency_ms: int = 100) -> tuple[str, ...]:
    skills = {"strong": 0.8, "weak": 0.3}
    flags = [("-m", f"{name}=scripted:skill={skill},latency_ms={latency_ms}") for name, skill in skills.items()]
    return tuple(word for flag in flags for word in flag)


def start(uri: str, folder: Path, latency_ms: int = 100) -> Running:
    write_tasks(folder / "tasks.jsonl", TASKS)
    return Running("run", "tasks.jsonl", *models(latency_ms), *WORK, "-o", uri, "--json", cwd=folder)


def without_secret(done: Done) -> Done:
    assert SECRET not in done.out + done.err
    return done


def test_a_run_on_s3_has_the_rows_of_one_on_a_disk_and_every_command_reads_it(
    proxy: Proxy, uri: str, tmp_path: Path, local: Counter[Any]
) -> None:
    with start(uri, tmp_path) as running:
        done = without_secret(running.end())
    assert done.code == 0, done.err
    assert (done.document["rows"], done.document["run_dir"]) == (ROWS, uri)
    assert scores(uri) == local
    shown = rollout("show", uri, cwd=tmp_path)
    assert "sum-11" in shown.out
    assert uri in shown.out
    one = rollout("show", uri, "sum-3", "--model", "weak", "--attempt", "1", "--json", cwd=tmp_path)
    assert one.document["turns"], "turns travelled with their rows"
    assert rollout("rewards", uri, "--json", cwd=tmp_path).code == 0
    assert "nothing to do" in rollout("resume", uri, cwd=tmp_path).err
    log = open_objects(uri).get("logs/driver-e1.jsonl") or b""
    assert log.count(b'"event":"rollout"') == ROWS, "the driver's log outlives its working copy"
    again = rollout("run", "tasks.jsonl", *models(), *WORK, "-o", uri, cwd=tmp_path)
    assert (again.code, "is a run already" in again.err) == (2, True)


def test_a_killed_driver_s_run_goes_on_elsewhere_with_nothing_lost_or_doubled(
    proxy: Proxy, uri: str, tmp_path: Path, local: Counter[Any]
) -> None:
    with start(uri, tmp_path, SLOWLY) as running:
        wait_for_rows(uri, 1)
        running.interrupt(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
    before = scores(uri)
    assert 0 < len(before) < ROWS
    resumed = rollout("resume", uri, *AT_ONCE, "--json", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert scores(uri) == local
    assert before <= local, "what was seen before the kill stays as it was"


def wait_for_rows(uri: str, rows: int) -> None:
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            if len(scores(uri)) >= rows:
                return
        except Exception:  # not there yet
            time.sleep(0.2)
    raise AssertionError("no rows arrive")


@pytest.mark.root
def test_a_full_disk_under_the_working_copy_is_told_with_node_place_and_remedy(
    proxy: Proxy, uri: str, tmp_path: Path, small_disk: Path
) -> None:
    with start(uri, tmp_path) as running:
        assert running.end().code == 0
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - 8192)  # else Python takes another disk for its temporary files
    full = {"TMPDIR": str(small_disk)}
    for done in (
        rollout("show", uri, cwd=tmp_path, env=full),
        rollout("run", "tasks.jsonl", *models(), *WORK, "-o", f"{uri}-more", cwd=tmp_path, env=full),
    ):
        assert done.code in (1, 2)
        for text in (str(small_disk), "No space left on device", f"on {node()}", "set TMPDIR"):
            assert text in done.err, done.err
        assert "Traceback" not in done.err


def test_of_two_drivers_the_second_is_refused_while_the_first_lives(
    proxy: Proxy, uri: str, tmp_path: Path, local: Counter[Any]
) -> None:
    with start(uri, tmp_path, SLOWLY // 2) as running:
        wait_for_rows(uri, 1)
        second = rollout("resume", uri, cwd=tmp_path)
        assert (second.code, f"pid {running.pid}" in second.err) == (2, True), second.err
        assert running.end().code == 0
    assert scores(uri) == local


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            lambda ask: "lost_answer" if ask.method == "PUT" and ask.number == 0 else None, id="500-but-stored"
        ),
        pytest.param(lambda ask: "cut" if ask.method == "PUT" and ask.number == 0 else None, id="cut"),
        pytest.param(lambda ask: "busy" if ask.number % 2 == 0 and ask.method != "POST" else None, id="busy"),
    ],
)
def test_a_line_that_fails_at_every_turn_costs_time_only(
    fault: Callable[[Ask], str | None], proxy: Proxy, uri: str, tmp_path: Path, local: Counter[Any]
) -> None:
    proxy.fault = fault
    with start(uri, tmp_path) as running:
        done = without_secret(running.end())
    assert done.code == 0, done.err
    proxy.fault = lambda ask: None
    assert scores(uri) == local


def test_a_store_that_refuses_in_mid_run_ends_it_with_a_clear_error_and_a_resume_ends_it_well(
    proxy: Proxy, uri: str, tmp_path: Path, local: Counter[Any]
) -> None:
    with start(uri, tmp_path, SLOWLY) as running:
        wait_for_rows(uri, 1)
        proxy.fault = lambda ask: "refuse" if ask.method == "PUT" else None
        done = without_secret(running.end())
    assert done.code == 1
    assert f"cannot write {uri}/" in done.err
    assert "HTTP 403 AccessDenied; let these credentials" in done.err
    assert "rollout resume" in done.err
    assert "Traceback" not in done.err
    proxy.fault = lambda ask: None
    assert rollout("resume", uri, *AT_ONCE, "-q", cwd=tmp_path).code == 0
    assert scores(uri) == local


async def test_a_slow_store_holds_grants_back_so_that_memory_stays_bounded(proxy: Proxy, uri: str) -> None:
    limit, slots = 32 * 1024, 20
    config = make_config(
        host={"slots": slots}, k=2, store={"max_uncommitted_bytes": limit, "seal_s": 0.1, "seal_bytes": 2 * limit}
    )
    proxy.fault = lambda ask: "slow" if ask.method == "PUT" and "log/" in ask.key else None
    waiting = [0]
    async with RolloutEngine(config=config, run_dir=uri) as engine:
        finishing = asyncio.create_task(engine.finish(make_tasks(600)))
        while not finishing.done():
            waiting.append(engine._run.driver.board.commits.waiting_bytes)
            await asyncio.sleep(0.01)
        await finishing
    row = 2 * limit / slots
    assert max(waiting) > limit, "nothing was ever held back, so this shows nothing"
    assert max(waiting) < limit + 3 * slots * row
    assert len(scores(uri)) == 1200


def test_a_run_is_watched_and_cancelled_from_elsewhere_through_the_store(
    proxy: Proxy, uri: str, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 4)
    (tmp_path / "c.toml").write_text("[store]\nheartbeat_s = 1\nlive_tables_s = 1\n")
    asked = ("run", "tasks.jsonl", *models(30_000), "-m", "quick=scripted:skill=1", *WORK, "--config", "c.toml")
    told = rollout(*asked, "-o", uri, "--detach", "--json", cwd=tmp_path)
    assert told.code == 0, told.err
    assert told.document["log"] == f"{uri}/driver.log"
    with Running("attach", uri, "--json", cwd=tmp_path) as watching:
        watching.wait_for("running since")
        standing = rollout("status", uri, "--json", cwd=tmp_path)
        assert (standing.code, standing.document["state"]) == (0, "running"), standing.out + standing.err
        done = rollout("cancel", uri, "--wait", "50", cwd=tmp_path)
        assert done.code == 0, done.err
        shown = watching.end().document
    assert (shown["status"], shown["missing"]) == ("interrupted", 0)
    assert shown["cancelled"] > 0
    detach_all()
    objects = open_objects(uri)
    assert b"cancelled by" in (objects.get("driver.log") or b"")
    assert objects.get("compacted.json") is not None
