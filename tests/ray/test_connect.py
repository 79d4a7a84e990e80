"""Which Ray a run uses, and what it says where it can use none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollout_engine import RolloutEngine
from tests.helpers import make_config, make_tasks
from tests.ray.rays import SharedRay, blocking_until, said, start_driver, temporary_folders

pytestmark = pytest.mark.ray

PROMPT_S = 90.0
"""Whoever gives a wrong address hears of it within this, on a machine that is busy with other tests. Ray itself takes
minutes, or waits for ever."""


class Attempt(NamedTuple):
    """What a fresh process said, how it ended, and after how long."""

    output: str
    code: int
    seconds: float


def try_to_run(environment: dict[str, str], **fields: Any) -> Attempt:
    config = make_config(**{"ray": "auto", **fields}).model_dump(mode="json", exclude_defaults=True)
    began = time.monotonic()
    with start_driver(environment, config=config, tasks=3) as driver:
        kill = threading.Timer(2 * PROMPT_S, driver.kill)
        kill.start()
        try:
            lines = list(iter(lambda: said(driver), ""))
            code = driver.wait()
        finally:
            kill.cancel()
        return Attempt("\n".join(lines), code, time.monotonic() - began)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: it is taken, so that nobody else comes to listen at it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_an_initialised_ray_is_used_and_left_as_it_is(shared_ray: SharedRay) -> None:
    import ray

    before = ray.get_runtime_context().gcs_address
    for address in ("auto", "local"):
        async with RolloutEngine(config=make_config(ray=address)) as engine:
            assert shared_ray.host_pid()
            await engine.finish(make_tasks(3))
        assert ray.is_initialized()
        assert ray.get_runtime_context().gcs_address == before


def test_a_fresh_process_joins_by_ray_address_with_the_token_file_alone(shared_ray: SharedRay) -> None:
    """And leaves nothing: no host, and no temporary folder of its run without a run_dir."""
    folders = temporary_folders()
    output, code, _ = try_to_run(shared_ray.environment(RAY_ADDRESS=shared_ray.address))
    assert (output, code) == ("open\nrows 3", 0)
    blocking_until(lambda: not shared_ray.host_pids(), "no host is left")
    assert temporary_folders() <= folders


def test_an_address_in_the_config_goes_before_ray_address(shared_ray: SharedRay, closed_port: int) -> None:
    environment = shared_ray.environment(RAY_ADDRESS=f"127.0.0.1:{closed_port}")
    output, code, _ = try_to_run(environment, ray=shared_ray.address)
    assert (output, code) == ("open\nrows 3", 0)


def test_without_the_token_one_is_told_so(shared_ray: SharedRay, tmp_path: Path) -> None:
    environment = shared_ray.environment(RAY_ADDRESS=shared_ray.address, HOME=str(tmp_path))
    del environment["RAY_AUTH_TOKEN_PATH"]
    output, code, seconds = try_to_run(environment)
    assert code == 2
    assert output.startswith("InputError: ray: ")
    assert "RAY_AUTH_TOKEN" in output
    assert seconds < PROMPT_S


def test_with_a_wrong_token_one_is_told_so(shared_ray: SharedRay) -> None:
    environment = shared_ray.environment(RAY_ADDRESS=shared_ray.address, RAY_AUTH_TOKEN="0" * 32)
    output, code, seconds = try_to_run(environment)
    assert code == 2
    assert output.startswith("InputError: ray: ")
    assert "RAY_AUTH_TOKEN" in output
    assert "0" * 32 not in output
    assert seconds < PROMPT_S


def test_an_address_that_cannot_be_used_is_told_before_anything_starts(
    shared_ray: SharedRay, closed_port: int, silent_port: int
) -> None:
    addresses = [
        f"127.0.0.1:{closed_port}",
        f"127.0.0.1:{silent_port}",
        f"ray://127.0.0.1:{closed_port}",
        "not an address",
        "no-such-host.invalid:6379",
    ]
    with ThreadPoolExecutor() as at_once:
        attempts = at_once.map(lambda address: try_to_run(shared_ray.environment(), ray=address), addresses)
    for address, (output, code, seconds) in zip(addresses, attempts, strict=True):
        assert code == 2, output
        finding, *what_to_do = output.splitlines()
        assert finding.startswith("InputError: ray: ")
        assert address in finding
        assert what_to_do
        assert seconds < PROMPT_S, address
