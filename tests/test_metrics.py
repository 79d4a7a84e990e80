"""Metrics are counted once, documented, and served as they were counted.

One test: .venv/bin/pytest tests/test_metrics.py -k scraped
"""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError
from rollout_engine.metrics import CATALOGUE, SECONDS, Kind, Metrics, Snapshot, cumulative, grown
from rollout_engine.prometheus import Endpoint
from tests.helpers import make_config, make_tasks, scripted

DOC = Path(__file__).parent.parent / "docs" / "metrics.md"

Events = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("look"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


def test_the_page_of_metrics_is_the_catalogue() -> None:
    rows = re.findall(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOC.read_text(), re.MULTILINE)
    said = {name: (kind, () if labels == "–" else tuple(labels.split(", ")), what) for name, kind, labels, what in rows}
    assert said == {name: (metric.kind.value, metric.labels, metric.help) for name, metric in CATALOGUE.items()}


def test_no_label_can_hold_a_task_or_a_rollout() -> None:
    used = {label for metric in CATALOGUE.values() for label in metric.labels}
    assert used <= {"model", "status", "boundary", "phase", "kind"}


@given(Events)
def test_what_a_tally_has_grown_adds_up_to_what_it_counted(events: list[tuple[str, str, float]]) -> None:
    """However often it is looked at, and whatever happens in between: nothing is lost and nothing counted twice."""
    metrics, seen = Metrics(), Snapshot()
    counted: dict[str, float] = {}
    growths = []
    for what, label, value in [*events, ("look", "", 0)]:
        if what == "count":
            metrics.count("rollout_scores", value, label)
            counted[label] = counted.get(label, 0) + value
        else:
            now = pickle.loads(pickle.dumps(metrics.snapshot()))
            growths.append(grown(seen, now))
            seen = now
    for label, total in counted.items():
        assert sum(growth.get(("rollout_scores", (label,)), 0) for growth in growths) == total


@given(st.lists(st.floats(0, 10_000)))
def test_a_bucket_counts_what_is_not_above_its_bound(seconds: list[float]) -> None:
    metrics = Metrics()
    for each in seconds:
        metrics.observe("rollout_exchange_seconds", each)
    for buckets in metrics.snapshot().histograms.values():
        for bound, count in cumulative(buckets):
            assert count == sum(each <= float(bound) for each in seconds)


def scrape(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, parsed as Prometheus does it."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def test_a_run_without_ray_is_scraped_and_its_numbers_are_those_of_its_rows(tmp_path: Path) -> None:
    flaky = scripted("flaky", p_500=0.3, p_429=0.3) | {"call_retries": 3, "max_concurrency": 4, "price_completion": 2.0}
    config = make_config(flaky, scripted("good"), k=4, metrics={"port": 0}, retry={"backoff_s": 0.01})
    async with RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        await engine.finish(make_tasks(8))
        url = engine.metrics_url
        assert url is not None
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        async with asyncio.timeout(60):
            while sum(found.get("rollout_ended_total", {}).values()) < 64:
                await asyncio.sleep(0.1)
                found = await asyncio.to_thread(scrape, url)
        rows = await asyncio.to_thread(lambda: engine.tables().rollouts)
    statuses = rows.group_by(["model", "status"]).aggregate([([], "count_all")]).to_pylist()
    assert found["rollout_ended_total"] == {
        (("host", "driver"), ("model", row["model"]), ("status", row["status"])): row["count_all"] for row in statuses
    }
    tokens = sum(rows["completion_tokens"].to_pylist())
    host = (("host", "host-0-e1"),)
    served = found["rollout_tokens_total"]
    assert sum(value for labels, value in served.items() if ("kind", "completion") in labels) >= tokens > 0
    assert found["rollout_model_rate_limited_total"][(*host, ("model", "flaky"))] > 0
    assert found["rollout_model_retries_total"][(*host, ("model", "flaky"))] > 0
    assert found["rollout_cost_usd_total"][(*host, ("model", "flaky"))] > 0
    assert found["rollout_model_call_seconds_count"][(*host, ("model", "good"))] == 32
    assert found["rollout_model_call_seconds_bucket"][(*host, ("le", "+Inf"), ("model", "good"))] == 32
    assert found["rollout_slots"][host] == config.host.slots
    assert {name for name, metric in CATALOGUE.items() if metric.kind is Kind.GAUGE} <= found.keys()
    assert not any(label == "task" for samples in found.values() for labels in samples for label, _ in labels)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, url)


def test_counters_of_a_lost_host_stay_and_its_gauges_go() -> None:
    metrics = Metrics()
    metrics.count("rollout_scores", 3, "m")
    metrics.gauge("rollout_slots", 7)
    metrics.observe("rollout_exchange_seconds", SECONDS[-1] * 2)
    endpoint = Endpoint("127.0.0.1", 0)
    try:
        endpoint.publish("host-0", metrics.snapshot())
        assert scrape(endpoint.url)["rollout_slots"] == {(("host", "host-0"),): 7}
        endpoint.forget("host-0")
        found = scrape(endpoint.url)
    finally:
        endpoint.close()
    assert "rollout_slots" not in found
    assert found["rollout_scores_total"] == {(("host", "host-0"), ("model", "m")): 3}
    assert found["rollout_exchange_seconds_bucket"][("host", "host-0"), ("le", "600.0")] == 0
    assert found["rollout_exchange_seconds_count"][(("host", "host-0"),)] == 1


async def test_a_port_that_is_taken_is_told_before_anything_runs(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = RolloutEngine(config=make_config(metrics={"port": port}), run_dir=tmp_path / "run")
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            await engine.__aenter__()
    assert caught.value.where == "metrics.port"
    assert not (tmp_path / "run").exists()
