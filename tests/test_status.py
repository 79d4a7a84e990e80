"""A status is bounded, is what its driver has, and a file that is none is refused and never more than data.

One test: .venv/bin/pytest tests/test_status.py -k poisoned
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from rollout_engine.breaker import Breaker
from rollout_engine.commands.picture import model_table
from rollout_engine.commands.text import short
from rollout_engine.config import ModelSpec, RetrySpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError
from rollout_engine.metrics import Metrics
from rollout_engine.monitor import Monitor
from rollout_engine.picture import WINDOW_S, Glance, Rate, SeenHost, ServedHost, host_statuses, slowest_of
from rollout_engine.progress import Progress
from rollout_engine.status import FORMAT, MAX_HOSTS, MAX_SLOWEST, MAX_STATUS_BYTES, Status, parse_status
from rollout_engine.store.statusfile import read_status, write_status
from rollout_engine.vitals import Vitals
from rollout_engine.waiting import Waiting
from tests.helpers import make_config, make_tasks, scripted
from tests.rig import Gate, answer, chat_server, gated, served, task_of

JUDGED = {"type": "judge", "expected": "42"}
GOOD = {"format": 1, "run_id": "r", "epoch": 1, "written_at": 1.0, "state": "running", "progress": {}}


def parse(document: Any) -> Status:
    return parse_status(json.dumps(document).encode(), "RUN/status.json")


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"has format {FORMAT + 1}, this version reads {FORMAT}"),
        ({"format": 0}, "format"),
        ({"state": "on fire"}, "state"),
        ({"progress": {"done": -1}}, r"progress\.done"),
        ({"progress": {"done": "12"}}, r"progress\.done"),
        ({"progress": {"done": 2**70}}, r"progress\.done"),
        ({"progress": {"rate": float("nan")}}, r"progress\.rate"),
        ({"run_id": "x" * 1000}, "run_id"),
        ({"notes": ["x"] * 1000}, "notes"),
        ({"hosts": [{"host_id": "h"}] * (MAX_HOSTS + 1)}, "hosts"),
        ({"phases": {str(number): 1 for number in range(1000)}}, "phases"),
    ],
)
def test_a_field_that_no_driver_writes_is_named(change: dict[str, Any], message: str) -> None:
    assert parse(GOOD).run_id == "r"
    with pytest.raises(InputError, match=message) as caught:
        parse({**GOOD, **change})
    assert caught.value.where == "RUN/status.json"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        pickle.dumps(GOOD),
        b'{"format": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b" " * (MAX_STATUS_BYTES + 1),
    ],
    ids=["empty", "list", "null", "no-utf8", "pickle", "digits", "deep-list", "deep-object", "too-large"],
)
def test_what_is_poisoned_is_refused_in_one_message(raw: bytes) -> None:
    with pytest.raises(InputError, match=r"status of a run|larger than"):
        parse_status(raw, "RUN/status.json")


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_any_bytes_are_a_status_or_an_input_error(raw: bytes) -> None:
    with contextlib.suppress(InputError):
        parse_status(raw, "x")


def test_a_newer_field_is_left_out() -> None:
    assert parse({**GOOD, "mood": "fine", "progress": {"done": 3, "mood": 1}}).progress.done == 3


# -- the file -----------------------------------------------------------------------------------------------------


def test_only_the_owner_reads_it_and_it_is_replaced_as_a_whole(tmp_path: Path) -> None:
    assert read_status(tmp_path, 100) is None
    write_status(tmp_path, b"first")
    held = (tmp_path / "status.json").open("rb")
    write_status(tmp_path, b"second")
    with held:
        assert held.read() == b"first"
    assert read_status(tmp_path, 100) == b"second"
    assert stat.S_IMODE((tmp_path / "status.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "link"])
def test_what_is_no_plain_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (tmp_path / "secret").write_text("secret")
        path.symlink_to(tmp_path / "secret")
    else:
        path.mkdir()
    with pytest.raises(InputError, match=r"no plain file|cannot be read"):
        read_status(tmp_path, 100)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    with (tmp_path / "status.json").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no disk
    raw = read_status(tmp_path, MAX_STATUS_BYTES)
    assert raw is not None
    assert len(raw) == MAX_STATUS_BYTES + 1


# -- the picture --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 1000)), min_size=2, max_size=50))
def test_a_rate_is_that_of_the_last_window_and_never_negative(steps: list[tuple[float, int]]) -> None:
    rate, now, count, seen = Rate(), 0.0, 0, []
    for pause, more in steps:
        now, count = now + pause, count + more
        rate.saw(now, count)
        seen.append((now, count))
    assert 0 <= rate.per_s <= (count - seen[0][1]) / min(pause for pause, _ in steps[1:]) + 1e-6
    inside = [each for each in seen if each[0] >= now - WINDOW_S]
    if len(inside) == len(seen):
        assert rate.per_s == pytest.approx((count - seen[0][1]) / (now - seen[0][0]))


def vitals_of(count: int, text: str = "x") -> Vitals:
    slowest = tuple(Waiting(number, text, "agent", text, float(number), float(number)) for number in range(count))
    return Vitals(text, 1, 4, False, {"agent": count}, slowest, Metrics().snapshot())


def test_a_huge_run_has_a_small_status() -> None:
    """1,000 hosts, 200 models, endless names, 10,000 kinds of errors: it is read by the reader that bounds it."""
    name = "n" * 5000 + "\ud800"
    models = [ModelSpec(name=f"m{number}", kind="scripted") for number in range(200)]
    written: list[bytes] = []
    progress = Progress(total=10**9, done=10**8, notes=[name] * 1000)
    monitor = Monitor("r", 1, models, written.append)
    for number in range(1000):
        monitor.answered(f"host-{number}-{name}", 0.1, 0.0, vitals_of(20, name), 1.0)
    hosts = [ServedHost(f"host-{number}-{name}", 5, 4, False) for number in range(1000)]
    breakers = [Breaker(RetrySpec()) for _ in models]

    async def show() -> None:
        monitor.start()
        await monitor.close(Glance(2.0, progress, hosts, breakers, {}, {}, "running"))

    asyncio.run(show())
    status = parse_status(written[-1], "x")
    assert (len(status.hosts), status.more_hosts) == (MAX_HOSTS, 1000 - MAX_HOSTS)
    assert len(status.slowest) == MAX_SLOWEST


def test_the_hosts_that_are_silent_longest_are_among_those_shown() -> None:
    hosts = [SeenHost(ServedHost(f"h{number:04}", 0, 0, False), float(number == 700), None) for number in range(1000)]
    assert "h0700" in [host.host_id for host in host_statuses(hosts)]


def test_the_slowest_are_those_that_were_planned_longest_ago() -> None:
    found = slowest_of({"a": vitals_of(30), "b": vitals_of(3)})
    ages = [each.age_s for each in found]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == 29.0


async def test_a_status_that_cannot_be_written_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    gate = Gate()
    async with RolloutEngine(config=make_config(**gated(gate)), run_dir=run_dir) as engine:
        while not (run_dir / "status.json").is_dir():
            (run_dir / "status.json").unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):  # written meanwhile
                (run_dir / "status.json").mkdir()
        (run_dir / "status.json" / "in the way").write_text("")
        work = asyncio.create_task(engine.finish(make_tasks(3)))
        await gate.reached(3)
        gate.open()
        await work
        assert engine.progress.valid == 3
    assert "status.json cannot be written" in caplog.text


async def test_a_live_run_says_where_it_stands_and_what_its_rollouts_wait_for(tmp_path: Path) -> None:
    gate, run_dir = Gate(), tmp_path / "run"
    config = make_config(scripted("m") | {"max_concurrency": 2}, k=2, host={"slots": 4}, **gated(gate))
    async with RolloutEngine(config=config, run_dir=run_dir) as engine:
        work = asyncio.create_task(engine.finish(make_tasks(5), total=5))
        await gate.reached(4)
        status = await seen(run_dir, lambda status: status.phases.get("agent") == 4 and len(status.slowest) > 0)
        assert (status.state, status.progress.total, status.progress.done) == ("running", 10, 0)
        assert [(host.slots, host.running) for host in status.hosts] == [(4, 4)]
        assert status.models[0].limit == 2
        assert {each.waits_for for each in status.slowest if each.phase == "agent"} == {"its agent"}
        gate.open()
        await work
    status = parse_status(read_status(run_dir, MAX_STATUS_BYTES) or b"", "x")
    assert (status.state, status.progress.done, status.progress.running) == ("ended", 10, 0)
    assert status.models[0].calls == 10


def refused_once_and_three_in_flight(status: Status) -> bool:
    judge = status.models[-1] if status.models else None
    return judge is not None and (judge.in_flight, judge.rate_limited, judge.retries) == (3, 1, 1)


async def test_limits_that_adapt_and_judges_are_seen_with_their_refusals(tmp_path: Path) -> None:
    """The server refuses the first call of the judge, who may make three at once."""
    hold, run_dir, refused = asyncio.Event(), tmp_path / "run", []

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        if not refused:
            refused.append(1)
            return web.Response(status=429, headers={"retry-after": "0.1"})
        await hold.wait()
        return answer('{"score": 1}')

    async with chat_server(reply) as url:
        config = make_config(
            scripted("m") | {"max_concurrency": "auto", "adaptive": {"floor": 5, "ceiling": 5}},
            judges={"g": served(url, "g") | {"max_concurrency": 3, "requests_per_minute": 6000, "call_retries": 2}},
            host={"slots": 8},
        )
        async with RolloutEngine(config=config, run_dir=run_dir) as engine:
            work = asyncio.create_task(engine.finish([task_of(task_id=f"t{n}", verifier=JUDGED) for n in range(8)]))
            try:
                status = await seen(run_dir, refused_once_and_three_in_flight)
            finally:
                hold.set()
                await work
    model, judge = status.models
    assert (model.name, model.judge, model.adaptive, model.limit) == ("m", False, True, 5)
    assert model.limit_per_s is not None
    assert (judge.name, judge.judge, judge.adaptive, judge.limit, judge.limit_per_s) == ("g", True, False, 3, 100.0)
    assert (judge.rate_limited, judge.retries) == (1, 1)
    lines = drawn(model_table(status.models))
    assert any(line.startswith("m ") and f" ~5 {short(model.limit_per_s)}/s " in line for line in lines)
    assert any(line.startswith("g ") and " 3 100/s " in line and line.endswith("judge") for line in lines)


def drawn(table: Table) -> list[str]:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as found:
        console.print(table)
    return [line.strip() for line in found.get().splitlines()]


async def seen(run_dir: Path, condition: Any) -> Status:
    """The first status for which it is true."""
    async with asyncio.timeout(60):
        while True:
            raw = await asyncio.to_thread(read_status, run_dir, MAX_STATUS_BYTES)
            if raw is not None and condition(status := parse_status(raw, "x")):
                return status
            await asyncio.sleep(0.1)
