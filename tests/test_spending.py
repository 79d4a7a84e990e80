"""Budgets of cost and tokens count everything that was used, thrown-away tries too, and end a run with all its rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.engine import RolloutEngine
from rollout_engine.runstore import read_run
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.schema import batch_to_records, records_to_batch
from rollout_engine.specs import Task
from rollout_engine.spending import Spending, Used, all_used_by
from rollout_engine.types import RolloutRecord, StopReason, Turn
from tests.helpers import make_config, make_tasks, scripted
from tests.test_driver import assert_each_key_once, driving

PRICED = {"price_prompt": 0.0, "price_completion": 1e6}
"""A dollar a completion token."""


class Stumbles:
    """Asks once, and then falls over in the first `falls` tries of each task."""

    tries: ClassVar[Counter[str]] = Counter()

    def __init__(self, falls: int) -> None:
        self._falls = falls

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        messages = task.messages()
        completion = await model.complete(messages)
        on_turn(Turn(0, [*messages, completion.message], completion))
        Stumbles.tries[task.task_id] += 1
        if Stumbles.tries[task.task_id] <= self._falls:
            raise OSError("the agent's disk went away")
        return StopReason.FINISHED


def stumbling(falls: int) -> dict[str, Any]:
    Stumbles.tries.clear()
    return {
        "agent": "tests.test_spending:Stumbles",
        "agent_options": {"falls": falls},
        "retry": {"max_retries": 3, "backoff_s": 0.0, "breaker_failures": 0},
        "host": {"slots": 2, "prefetch": 0.0},
    }


async def test_what_a_thrown_away_try_used_is_in_the_row_that_its_rollout_gets() -> None:
    config = make_config({**scripted(tokens=1), **PRICED}, **stumbling(falls=2))
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(3))
        assert drive.driver.board.spending.used.cost_usd == pytest.approx(9.0)
        assert drive.driver.progress.cost_usd == pytest.approx(9.0)
    assert {(row.retries, row.cost_usd, row.thrown_cost_usd) for row in rows} == {(2, 1.0, 2.0)}
    assert {row.thrown_completion_tokens for row in rows} == {2 * row.completion_tokens for row in rows}
    assert all(row.thrown_prompt_tokens == 2 * row.prompt_tokens > 0 for row in rows)


async def test_tries_that_are_thrown_away_spend_the_budget() -> None:
    """With rows alone, five dollars would pay for five of these; with all their tries, for two at most."""
    config = make_config({**scripted(tokens=1, latency_ms=50), **PRICED}, max_cost_usd=5.0, **stumbling(falls=2))
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(20))
        used = drive.driver.board.spending.used
    assert_each_key_once(rows, 20)
    statuses = Counter(row.status for row in rows)
    assert statuses["completed"] <= 3
    assert statuses["cancelled"] == 20 - statuses["completed"]
    assert used.cost_usd is not None
    assert 5.0 <= used.cost_usd <= 5.0 + 2 + 2
    recorded = [row.cost_usd or 0.0 for row in rows] + [row.thrown_cost_usd or 0.0 for row in rows]
    assert sum(recorded) == pytest.approx(used.cost_usd), "every dollar is in some row"


async def test_a_budget_of_tokens_ends_a_run_cleanly_and_its_rows_name_it() -> None:
    config = make_config(scripted(tokens=10), k=2, max_tokens=300, host={"slots": 2, "prefetch": 0.0}, plan_ahead=10)
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(40))
        assert any("the budget of 300 tokens is spent" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 80)
    assert {row.status for row in rows} == {"completed", "cancelled"}
    each = max(row.prompt_tokens + row.completion_tokens for row in rows)
    used = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    assert 300 <= used <= 300 + 6 * each
    cancelled = [row for row in rows if row.status == "cancelled"]
    assert {(row.failure_boundary, row.failure_type, row.score) for row in cancelled} == {
        ("cancel", "BudgetSpent", None)
    }
    assert all("max_tokens" in (row.failure_message or "") for row in cancelled)


async def run_of(path: Path, *, resume: bool = False, **fields: Any) -> Counter[str]:
    model = scripted(tokens=10, latency_ms=30)
    options = {"sandbox": "none", "ray": "off", "host": {"slots": 2, "prefetch": 0.0}, **fields}
    async with RolloutEngine([model], run_dir=path, resume=resume, retry_failed=resume, **options) as engine:
        await engine.finish(make_tasks(20))
    return Counter(read_run(path).rollouts["status"].to_pylist())


async def test_a_larger_budget_runs_the_rest_and_what_was_used_before_counts(tmp_path: Path) -> None:
    first = await run_of(tmp_path / "run", max_tokens=100)
    assert first["completed"] + first["cancelled"] == 20
    assert 0 < first["completed"] < 20
    again = await run_of(tmp_path / "run", resume=True, max_tokens=100)
    assert again == first, "the same budget is spent already"
    assert await run_of(tmp_path / "run", resume=True, max_tokens=100_000) == {"completed": 20}


async def test_thrown_away_tries_of_an_earlier_epoch_count_after_a_resume(tmp_path: Path) -> None:
    path, model = tmp_path / "run", {**scripted(tokens=1), **PRICED}
    options = {"sandbox": "none", "ray": "off", **stumbling(falls=2)}
    async with RolloutEngine([model], run_dir=path, **options) as engine:
        await engine.finish(make_tasks(2))
    async with RolloutEngine([model], run_dir=path, resume=True, max_cost_usd=6.0, **options) as engine:
        await engine.finish(make_tasks(4))
    assert Counter(read_run(path).rollouts["status"].to_pylist()) == {"completed": 2, "cancelled": 2}


# -- the account ------------------------------------------------------------------------------------------------------


def row(key: int, tokens: int, cost: float | None) -> RolloutRecord:
    return RolloutRecord(key, 0, "t", "m", 0, prompt_tokens=tokens, completion_tokens=2 * tokens, cost_usd=cost)


TRIES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 100), st.one_of(st.none(), st.integers(0, 9))), max_size=40
)


@settings(max_examples=100)
@given(TRIES)
def test_what_rows_and_thrown_away_tries_used_adds_up_in_the_rows(tries: list[tuple[int, int, int | None]]) -> None:
    """Of each key, all tries but the last are thrown away; some last ones are rows that no host made."""
    spending = Spending(make_config(), Used(1, 1, None))
    last = {key: index for index, (key, _, _) in enumerate(tries)}
    committed = []
    for index, (key, tokens, cost) in enumerate(tries):
        record = row(key, tokens, None if cost is None else float(cost))
        if last[key] != index:
            spending.throw(key, records_to_batch([record]))
            continue
        if key % 2:
            spending.stamp_record(record)
            batch = records_to_batch([record])
        else:
            batch = spending.stamp(records_to_batch([record]))
        committed += batch_to_records(batch)
        spending.commit(batch)
    total = Used(1, 1, None).plus(all_used_by(records_to_batch(committed)))
    assert spending.used == total
    assert total.prompt_tokens == 1 + sum(tokens for _, tokens, _ in tries)
    assert (total.cost_usd or 0.0) == sum(cost or 0 for _, _, cost in tries)
