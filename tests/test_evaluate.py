"""`engine.evaluate`: a generated task is valid or not, with reasons, and only a valid one costs rollouts.

One test: .venv/bin/pytest tests/test_evaluate.py -k parse
"""

from __future__ import annotations

from rollout_engine.config import ModelSpec
from rollout_engine.engine import RolloutEngine

GOOD = "def verify(env, final_answer=None):\n    return '42' in (final_answer or '')"
MODELS = [ModelSpec(name=name, kind="scripted", options={"skill": skill}) for name, skill in (("s", 1.0), ("w", 0.0))]


async def test_code_that_does_not_parse_is_a_task_that_is_not_valid() -> None:
    async with RolloutEngine(MODELS, k=2, ray="off") as engine:
        for code, reason in (
            ("def verify(env:\n    return 1", "is no Python"),
            ("x = 1", "defines no verifier function"),
            ("def verify(env):\n    return 1.0", "looks at none of its inputs"),
        ):
            found = await engine.evaluate("Say 42.", code)
            assert (found.validity, found.reward, found.scores) == (0.0, 0.0, {"s": [], "w": []})
            assert any(reason in each for each in found.reasons)
    assert engine.progress.done == 0


async def test_a_valid_task_has_scores_by_model_and_a_reward() -> None:
    async with RolloutEngine(MODELS, k=2, ray="off", sandbox="auto") as engine:
        found = await engine.evaluate("Say 42.", GOOD, solution="42")
    assert (found.validity, found.reasons) == (1.0, ())
    assert found.scores == {"s": [1.0, 1.0], "w": [0.0, 0.0]}
    assert (found.separation, found.reward) == (1.0, 0.25)
