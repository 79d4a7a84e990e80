"""On Ray: verifiers that ask judges over HTTP. A judge that fails costs a verdict, never a point, and says why.

One test: .venv/bin/pytest tests/ray/test_judges.py -k columns
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_engine import RolloutEngine
from rollout_engine.specs import Task
from tests.helpers import make_config, scripted
from tests.ray.rays import SharedRay
from tests.rig import answer, chat_server, served, task_of
from tests.sandboxes.backends import absent

pytestmark = pytest.mark.ray

PRICES = {"price_prompt": 1e3, "price_completion": 1e3}
COST = 13 / 1e3
"""Of one call: `answer` counts 10 + 3 tokens."""


def asking(judge: str) -> dict[str, Any]:
    return {"type": "judge", "judge": judge, "expected": "42"}


VERIFIERS: dict[str, dict[str, Any]] = {
    "judge": asking("grader"),
    "rule": {"type": "hybrid", "rule": {"type": "match", "expected": "42"}, "judge": asking("broken")},
    "second": {"type": "hybrid", "rule": {"type": "match", "expected": "41"}, "judge": asking("grader")},
    "composite": {
        "type": "composite",
        "components": {
            "right": {"verifier": {"type": "math", "expected": "\\frac{84}{2}"}, "weight": 3},
            "style": {"verifier": asking("grader")},
            "lost": {"verifier": asking("broken"), "weight": 9, "optional": True},
        },
    },
    "math": {"type": "math", "expected": "42.0"},
    "500": asking("broken"),
    "garbage": asking("garbage"),
    "slow": asking("slow"),
    "strict": {
        "type": "composite",
        "components": {"a": {"verifier": asking("grader")}, "b": {"verifier": asking("garbage")}},
    },
}


class Judges:
    """A server of several judges: one that works, and three ways of being of no use."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.inside = self.most = 0

    async def reply(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["model"]
        self.asked[name] += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            if name == "broken":
                return web.json_response({"error": {"message": "out of order"}}, status=500)
            if name == "garbage":
                return answer("I would say it is fine.")
            await asyncio.sleep(600 if name == "slow" else 0.02)
            return answer('{"score": 0.5, "reason": "half of it"}')
        finally:
            self.inside -= 1


def judges(url: str, **fields: Any) -> dict[str, Any]:
    return {name: {**served(url, name), **PRICES, **fields} for name in ("grader", "broken", "garbage", "slow")}


def tasks(names: list[str]) -> list[Task]:
    limits = {"slow": {"verify_s": 5.0}}
    return [task_of(task_id=name, verifier=VERIFIERS[name], limits=limits.get(name, {})) for name in names]


async def rows_of(config: Any, wanted: list[Task], run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run on Ray."""
    async with asyncio.timeout(240), RolloutEngine(config=config, run_dir=run_dir) as engine:
        await engine.finish(wanted)
        await engine.close()
        found: list[dict[str, Any]] = (await asyncio.to_thread(engine.tables)).rollouts.to_pylist()
    nodes = {row["node_id"] for row in found if row["num_turns"]}
    assert nodes
    assert all(len(node) > 30 for node in nodes), "what was started ran on a node of Ray's"
    return found


async def test_columns_have_every_part_what_it_cost_and_why_there_is_no_score(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    if importlib.util.find_spec("math_verify") is None:
        absent("math-verify is not installed: pip install 'rollout-engine[math]'")
    served_by = Judges()
    async with chat_server(served_by.reply) as url:
        config = make_config(
            scripted(tokens=7), k=2, ray="auto", judges=judges(url), retry={"max_retries": 0, "breaker_failures": 0}
        )
        found = await rows_of(config, tasks(list(VERIFIERS)), tmp_path / "run")
    assert len(found) == 2 * len(VERIFIERS)
    assert {row["status"] for row in found} == {"completed"}
    scored = {
        (row["task_id"], row["score"]): dict(row["score_components"]) for row in found if row["score"] is not None
    }
    assert scored == {
        ("judge", 0.5): {},
        ("rule", 1.0): {"rule": 1.0},
        ("second", 0.5): {"rule": 0.0, "judge": 0.5},
        ("composite", 0.875): {"right": 1.0, "style": 0.5},
        ("math", 1.0): {},
    }
    why = {(row["task_id"], row["failure_type"]): row["failure_message"] for row in found if row["score"] is None}
    assert {kind for kind in why} == {
        ("500", "VerifierUnavailable"),
        ("garbage", "VerifierBadReturn"),
        ("slow", "VerifierTimeout"),
        ("strict", "VerifierBadReturn"),
    }
    assert "judge broken could not be asked: ModelServerError" in why["500", "VerifierUnavailable"]
    assert "judge garbage gave no usable verdict in 3 tries" in why["garbage", "VerifierBadReturn"]
    assert "within 5 s" in why["slow", "VerifierTimeout"]
    assert "component b: judge garbage" in why["strict", "VerifierBadReturn"]
    used = {row["task_id"]: (row["judge_calls"], row["judge_completion_tokens"]) for row in found}
    assert used == {
        "judge": (1, 3),
        "rule": (0, 0),
        "second": (1, 3),
        "composite": (2, 3),
        "math": (0, 0),
        "500": (1, 0),
        "garbage": (3, 9),
        "slow": (1, 0),
        "strict": (4, 12),
    }
    for row in found:
        answered = row["judge_completion_tokens"] / 3
        assert row["judge_cost_usd"] == (pytest.approx(answered * COST) if answered else None)
        assert (row["completion_tokens"], row["cost_usd"]) == (7, None), "the agent's own use is apart"
    assert sum(served_by.asked.values()) == sum(row["judge_calls"] for row in found)


async def test_what_judges_cost_ends_a_run_at_its_budget_with_every_row_accounted_for(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    async with chat_server(Judges().reply) as url:
        config = make_config(ray="auto", judges=judges(url), max_cost_usd=10 * COST, host={"slots": 2, "prefetch": 0})
        wanted = [task_of(task_id=f"t{number}", verifier=asking("grader")) for number in range(100)]
        found = await rows_of(config, wanted, tmp_path / "run")
    assert len({row["task_id"] for row in found}) == len(found) == 100
    cancelled = [row for row in found if row["status"] == "cancelled"]
    assert {row["failure_type"] for row in cancelled} == {"BudgetSpent"}
    assert 0 < len(cancelled) <= 90
    assert sum(row["judge_cost_usd"] or 0 for row in found) >= 10 * COST


async def test_a_judges_limit_holds_over_the_cluster_and_its_breaker_spares_other_judges(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    served_by = Judges()
    rules = {"max_retries": 0, "breaker_failures": 3, "breaker_trips": 1, "breaker_pause_s": 0.1}
    async with chat_server(served_by.reply) as url:
        config = make_config(
            ray="auto", hosts_per_node=2, judges=judges(url, max_concurrency=3), retry=rules, host={"slots": 4}
        )
        wanted = [
            task_of(task_id=f"{judge}-{number}", verifier=asking(judge))
            for number in range(60)
            for judge in ("grader", "broken")
        ]
        found = await rows_of(config, wanted, tmp_path / "run")
    kinds = Counter((row["task_id"].split("-")[0], row["score"], row["failure_type"]) for row in found)
    assert kinds["grader", 0.5, None] == 60
    assert kinds["broken", None, "CircuitOpen"] > 0
    assert kinds["broken", None, "CircuitOpen"] + kinds["broken", None, "VerifierUnavailable"] == 60
    assert served_by.asked["broken"] == kinds["broken", None, "VerifierUnavailable"] < 60
    assert served_by.most <= 6, "three of each judge"
