"""On Ray: a node's own metrics endpoint has our numbers, hosts log into the run directory, and no key is in any of it.

One test: .venv/bin/pytest tests/ray/test_seen.py -k endpoint
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine.engine import RolloutEngine
from rollout_engine.hostplan import HostPlan
from rollout_engine.metrics import CATALOGUE, Kind
from rollout_engine.openrun import OpenRun
from rollout_engine.status import MAX_STATUS_BYTES, parse_status
from rollout_engine.store.statusfile import read_status
from tests.helpers import make_tasks, scripted
from tests.ray.rays import SharedRay, until
from tests.rig import answer, chat_server, served

pytestmark = pytest.mark.ray

KEY = "sk-no-real-key-40b1c9"
REPORT_S = 10.0
"""Ray passes metrics on about this often."""


def scrape() -> dict[str, float]:
    """Our samples at the endpoint of the one node: `name{host,other labels of ours}` -> value, of live processes."""
    [node] = (node for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as reply:
        text = reply.read().decode()
    ours = {"host", "model", "status", "boundary", "phase", "kind", "le"}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_rollout_"):
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name in ours)
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_a_nodes_endpoint_has_the_numbers_of_driver_and_host(shared_ray: SharedRay, tmp_path: Path) -> None:
    name = f"m{tmp_path.name[-8:]}"  # series of a driver process stay as long as it does
    model = scripted(name, p_500=0.3) | {"call_retries": 5, "max_concurrency": 4, "price_completion": 2.0}
    async with RolloutEngine([model], k=4, sandbox="none", ray="auto", run_dir=tmp_path / "run") as engine:
        await engine.finish(make_tasks(10))
        rows = await asyncio.to_thread(lambda: engine.tables().rollouts)
        # The last assertion that did not hold is the one to show. What is told of a call comes with several reports.
        ends = time.monotonic() + 12 * REPORT_S
        while True:
            try:
                check(await asyncio.to_thread(scrape), name, rows, engine.config.host.slots)
                break
            except (AssertionError, KeyError, OSError):
                if time.monotonic() > ends:
                    raise
            await asyncio.sleep(0.5)


def check(found: dict[str, float], name: str, rows: pa.Table, slots: int) -> None:
    """All 40 rollouts are there, and everything that is known of them."""
    assert found[f"ray_rollout_ended_total{{host=driver,model={name},status=completed}}"] == 40
    assert found[f"ray_rollout_model_calls_total{{host=host-0-e1,model={name},status=ok}}"] == 40
    host = f"host=host-0-e1,model={name}"
    assert found[f"ray_rollout_scores_total{{host=driver,model={name}}}"] == 40
    assert found[f"ray_rollout_model_call_seconds_count{{{host}}}"] == 40
    assert found[f"ray_rollout_model_call_seconds_bucket{{host=host-0-e1,le=+Inf,model={name}}}"] == 40
    assert found[f"ray_rollout_model_call_seconds_sum{{{host}}}"] > 0
    assert found[f"ray_rollout_model_retries_total{{{host}}}"] > 0
    assert found["ray_rollout_slots{host=host-0-e1}"] == slots
    assert found["ray_rollout_commit_seconds_count{host=driver}"] > 0
    assert found["ray_rollout_exchange_seconds_count{host=driver}"] > 0
    tokens = f"ray_rollout_tokens_total{{host=host-0-e1,kind=completion,model={name}}}"
    assert found[tokens] == sum(rows["completion_tokens"].to_pylist()) > 0
    assert found[f"ray_rollout_cost_usd_total{{{host}}}"] == pytest.approx(sum(rows["cost_usd"].to_pylist()))
    gauges = {f"ray_{name}" for name, metric in CATALOGUE.items() if metric.kind is Kind.GAUGE}
    assert gauges <= {sample.partition("{")[0] for sample in found}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_host_logs_into_the_run_directory_and_shows_no_key(
    shared_ray: SharedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server echoes the key that it was sent, as some do: it reaches no log and no status."""
    monkeypatch.setenv("SEEN_TEST_KEY", KEY)
    echoed = []

    async def handler(request: Any) -> Any:
        echoed.append(request.headers["authorization"])
        return answer(f"nobody may see {request.headers['authorization']}")

    run_dir = tmp_path / "run"
    async with chat_server(handler) as url:
        model = served(url, api_key_env="SEEN_TEST_KEY")
        options = {"agent": "tests.ray.test_seen:TellingAgent", "logs": {"level": "debug"}}
        async with RolloutEngine([model], sandbox="none", ray="auto", run_dir=run_dir, **options) as engine:
            await engine.finish(make_tasks(2))
    assert KEY in echoed[0]
    host, driver = run_dir / "logs" / "host-0-e1.jsonl", run_dir / "logs" / "driver-e1.jsonl"
    told = [line for line in lines(host) if line.get("message", "").startswith("the model said")]
    assert {line["rollout_id"] for line in told} == {"0/m/0/t0", "0/m/0/t1"}
    assert all("[key]" in line["message"] for line in told)
    starts = [line["retries"] for line in lines(host) if line.get("event") == "rollout"]
    assert sorted(starts) == [0, 0, 1, 1, 2, 2]
    for path in (host, driver, run_dir / "status.json"):
        assert KEY not in path.read_text()


class TellingAgent:
    """Logs what the model said, whatever that is."""

    async def run(self, task: Any, model: Any, sandbox: Any, limits: Any, on_turn: Any) -> Any:
        import logging

        completion = await model.complete(task.messages())
        logging.getLogger("rollout_engine.agents.telling").debug("the model said %s", completion.message["content"])
        raise RuntimeError("and that was all")


async def test_a_host_that_does_not_see_the_run_directory_logs_to_ray(
    shared_ray: SharedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is moved away before the host looks for it, as where it is on a disk of the driver's own."""
    run_dir = tmp_path / "run"
    make = OpenRun._make_plan

    def elsewhere(run: OpenRun, host_id: str, node_id: str) -> HostPlan:
        return replace(make(run, host_id, node_id), run_dir=str(tmp_path / "not-here"))

    monkeypatch.setattr(OpenRun, "_make_plan", elsewhere)
    async with RolloutEngine([scripted()], sandbox="none", ray="auto", run_dir=run_dir) as engine:
        run_id = engine.run_id
        await engine.finish(make_tasks(3))
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["driver-e1.jsonl"]

    def in_rays_log() -> list[str]:
        texts = [path.read_text(errors="replace") for path in (shared_ray.session_dir / "logs").glob("worker-*.err")]
        return [line for text in texts for line in text.splitlines() if run_id in line and '"event":"rollout"' in line]

    found = await until(lambda: len(in_rays_log()) == 3 and in_rays_log(), "three lines in Ray's own log")
    assert {json.loads(line)["host_id"] for line in found} == {"host-0-e1"}


async def test_the_status_names_the_node_of_each_host(shared_ray: SharedRay, tmp_path: Path) -> None:
    import socket

    run_dir = tmp_path / "run"
    async with RolloutEngine([scripted()], sandbox="none", ray="auto", run_dir=run_dir, hosts_per_node=2) as engine:
        await engine.finish(make_tasks(4))
    status = parse_status(read_status(run_dir, MAX_STATUS_BYTES) or b"", "x")
    assert [(host.node, host.slots) for host in status.hosts] == [(socket.gethostname(), 256)] * 2
    assert len({host.pid for host in status.hosts}) == 2
