"""Several servers of one model: who shares a prefix stays together, and who dies moves only its own.

One test: .venv/bin/pytest tests/models/test_balance.py -k dies
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.config import ModelSpec
from rollout_engine.models.balance import FAILURES, LOAD_FACTOR, PROBE_S, Balance, Health
from rollout_engine.models.server import ModelServer
from tests.models.conftest import ask, client, context

SERVERS = st.integers(2, 8)


def balance_of(count: int, limit: int | None = None) -> Balance:
    return Balance([f"http://server-{number}/v1" for number in range(count)], limit)


def kill(balance: Balance, number: int, now: float = 0.0) -> None:
    for _ in range(FAILURES):
        balance.began(number)
        balance.ended(number, now, fault=True)


@settings(max_examples=60)
@given(SERVERS, st.lists(st.tuples(st.integers(0, 99), st.text(max_size=8)), min_size=1, max_size=30))
def test_a_key_always_goes_to_the_same_server_on_every_host(count: int, keys: list[tuple[int, str]]) -> None:
    one, other = balance_of(count), balance_of(count)
    for key in keys:
        assert one.pick(key) == one.pick(key) == other.pick(key)


@settings(max_examples=60)
@given(SERVERS, st.integers(0, 7), st.integers(1, 200))
def test_a_server_that_dies_moves_only_its_own_keys_and_gets_them_back(count: int, dies: int, keys: int) -> None:
    balance, dies = balance_of(count), dies % count
    before = {key: balance.pick(key) for key in range(keys)}
    kill(balance, dies)
    for key, number in before.items():
        now = balance.pick(key)
        assert now != dies
        assert now == number or number == dies
    balance.probed(dies, PROBE_S, well=True)
    balance.began(dies)
    balance.ended(dies, PROBE_S, fault=False)
    assert {key: balance.pick(key) for key in range(keys)} == before


@settings(max_examples=60)
@given(SERVERS, st.lists(st.integers(0, 3), min_size=1, max_size=200))
def test_no_server_gets_much_more_than_the_mean(count: int, keys: list[int]) -> None:
    """However uneven the keys are: calls that only begin are the hardest case."""
    balance = balance_of(count)
    for begun, key in enumerate(keys, 1):
        number = balance.pick(key)
        balance.began(number)
        assert balance.servers[number].in_flight <= math.ceil(LOAD_FACTOR * begun / count)


@settings(max_examples=60)
@given(SERVERS, st.integers(), st.data())
def test_a_retry_goes_to_another_server(count: int, key: int, data: st.DataObject) -> None:
    balance, tried = balance_of(count), set[int]()
    for _ in range(count):
        number = balance.pick(key, tried)
        assert number not in tried
        tried.add(number)
    assert balance.pick(key, tried) in tried  # all were tried: any is better than none


def test_keys_are_spread_evenly() -> None:
    balance = balance_of(4)
    shares = Counter(balance.pick(("round", key)) for key in range(4000))
    assert all(850 <= share <= 1150 for share in shares.values())


def test_a_sick_server_is_probed_and_then_tried_with_one_call() -> None:
    balance = balance_of(2)
    key = next(key for key in range(99) if balance.pick(key) == 0)
    kill(balance, 0, now=10.0)
    assert balance.servers[0].health is Health.DOWN
    assert balance.due(10.0 + PROBE_S / 2) == []
    assert balance.due(10.0 + PROBE_S) == [0]
    balance.probed(0, 12.0, well=False)
    assert balance.due(12.0 + PROBE_S) == []  # the next probe waits longer
    balance.probed(0, 20.0, well=True)
    assert balance.pick(key) == 0
    balance.began(0)
    assert balance.pick(key) == 1  # one call is enough to find out
    balance.ended(0, 21.0, fault=True)
    assert balance.servers[0].health is Health.DOWN


def test_where_all_are_down_the_call_is_made_nevertheless() -> None:
    balance = balance_of(3)
    for number in range(3):
        kill(balance, number)
    assert balance.pick("key") == balance.order("key")[0]


async def test_calls_go_on_while_a_server_is_gone_and_come_back_to_it() -> None:
    scripted = {"m1": ModelSpec(name="m1", kind="scripted")}
    tasks = [f"t{number}" for number in range(12)]
    solutions = dict.fromkeys(tasks, "42")
    async with ModelServer(scripted, solutions=solutions) as good:
        sick = ModelServer(scripted, solutions=solutions)
        async with sick:
            url, port = sick.url, int(sick.url.rsplit(":", 1)[1].split("/")[0])
            spec = ModelSpec(
                name="m", kind="openai", model="m1", base_urls=(good.url, url), call_retries=2, seed_header=True
            )
            async with client(spec) as made:
                for task in tasks:
                    await ask(made, context(task))
                assert good.stats()["calls"] + sick.stats()["calls"] == len(tasks)
                assert min(good.stats()["calls"], sick.stats()["calls"]) > 0
                share = sick.stats()["calls"]
                await sick.__aexit__(None, None, None)
                for task in tasks:
                    assert (await ask(made, context(task)._replace(attempt=1))).message["content"] == "42"
                assert good.stats()["calls"] == 2 * len(tasks) - share
                async with ModelServer(scripted, solutions=solutions, port=port) as again, asyncio.timeout(120):
                    while not again.stats()["calls"]:
                        for task in tasks:
                            await ask(made, context(task))
                        await asyncio.sleep(0.05)
