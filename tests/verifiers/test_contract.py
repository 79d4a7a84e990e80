"""What every verifier keeps to, whatever it is: the same suite over each type that the engine has.

make one T=tests/verifiers/test_contract.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from rollout_engine.errors import InputError, SandboxUnavailable, VerifierError
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Isolation, Score, Trajectory, Usage
from rollout_engine.verification import judge_of
from rollout_engine.verifiers import VERIFIERS, make_verifier
from rollout_engine.verifiers.base import Verifier, takes_sandbox
from rollout_engine.verifiers.case import enter_case
from rollout_engine.verifiers.nesting import types_in
from rollout_engine.verifiers.workshop import Workshop
from tests.helpers import make_config, scripted
from tests.rig import Bench, bench, task_of
from tests.sandboxes.backends import ISOLATING, absent, working

CODE = "def verify(env, final_answer=None):\n    return final_answer is not None and '42' in final_answer"
MATCH = {"type": "match", "pattern": r"(\d+)", "expected": "42"}
SPECS: dict[str, dict[str, Any]] = {
    "code": {"type": "code", "code": CODE},
    "match": MATCH,
    "math": {"type": "math", "expected": "42"},
    "judge": {"type": "judge", "prompt": "{answer}"},
    "script": {"type": "script", "command": "grep -q 42 answer"},
    "hybrid": {"type": "hybrid", "rule": MATCH, "judge": {"type": "match", "expected": "a judge would see it"}},
    "composite": {"type": "composite", "components": {"a": {"verifier": MATCH}, "b": {"verifier": MATCH, "weight": 2}}},
}


def test_each_type_is_in_this_suite() -> None:
    assert set(SPECS) == set(VERIFIERS)


@pytest.fixture(params=SPECS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "math" and importlib.util.find_spec("math_verify") is None:
        absent("math-verify is not installed")
    return str(request.param)


@pytest.fixture
async def made() -> AsyncIterator[Bench]:
    """A bench with a judge that finds right what is 42: its reply is the answer that it is shown, as a verdict."""
    judges = {"says": {"kind": f"{__name__}:Echo"}}
    async with bench(make_config(scripted(), judges=judges)) as bench_:
        yield bench_


class Echo:
    """A judge's client: finds right what holds 42."""

    def __init__(self, spec: Any, api_key: str | None) -> None:
        pass

    async def complete(self, messages: Any, **_: Any) -> Any:
        verdict = "correct" if "42" in messages[-1]["content"] else "incorrect"
        return Completion({"role": "assistant", "content": f'{{"verdict": "{verdict}"}}'}, "stop", Usage(1, 1))

    async def close(self) -> None:
        pass


@dataclass
class Judged:
    """A verifier of each type in the place that it needs."""

    kind: str
    verifier: Verifier
    box: Sandbox | None
    bench: Bench

    async def score(self, answer: str | None) -> Score:
        rollout = self.bench.rollout(task_of())
        enter_case(partial(judge_of, rollout._prepared, rollout._resources, rollout.record))
        if self.box is not None:
            await self.box.write_file("answer", (answer or "").encode())
        task = Task(task_id="t", prompt="p", verifier=SPECS[self.kind])
        return await self.verifier.verify(task, Trajectory(final_answer=answer), self.box)


@pytest.fixture
async def judged(kind: str, made: Bench) -> AsyncIterator[Judged]:
    shop = Workshop()
    verifier = make_verifier(SPECS[kind], timeout_s=120.0, workshop=shop)
    provider = await working(ISOLATING[0]) if takes_sandbox(verifier) else None
    box = await provider.open(SandboxSpec()) if provider is not None else None
    if kind == "code" and await shop.warm() is None:
        absent("the warm verifier does not work here")
    yield Judged(kind, verifier, box, made)
    if box is not None and provider is not None:
        await box.close()
        await provider.close()
    await shop.close()


async def test_right_is_a_pass_wrong_is_a_zero_and_so_is_nothing(judged: Judged) -> None:
    right = await judged.score("It is 42")
    assert right.value == 1.0
    assert right.passed is not False
    for wrong in ("It is 41", "", None, "\x00\u202e", "x" * 100_000):
        score = await judged.score(wrong)
        assert score.value == 0.0
        assert not score.passed
        assert all(math.isfinite(part) for part in score.components.values())


async def test_it_keeps_nothing_from_one_verdict_to_the_next(judged: Judged) -> None:
    first = [await judged.score(answer) for answer in ("42", "41", "42")]
    assert first[0] == first[2] != first[1]


async def test_many_at_once_are_judged_each_by_itself(judged: Judged) -> None:
    if judged.box is not None:
        return  # one sandbox is one verdict's
    answers = ["It is 42", "It is 41"] * 6
    scores = await asyncio.gather(*(judged.score(answer) for answer in answers))
    assert [score.value for score in scores] == [1.0, 0.0] * 6


async def test_it_lets_itself_be_cancelled(judged: Judged) -> None:
    task = asyncio.create_task(judged.score("42"))
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(120):
        await asyncio.gather(task, return_exceptions=True)
        assert (await judged.score("42")).value == 1.0


def test_it_says_where_it_runs_and_refuses_what_it_does_not_know(kind: str) -> None:
    assert isinstance(make_verifier(SPECS[kind]).isolation, Isolation)
    with pytest.raises(InputError, match=r"verifier\.colour: unknown field"):
        make_verifier({**SPECS[kind], "colour": "red"})
    assert dict(types_in(SPECS[kind]))["verifier.type"] == kind


async def test_what_it_needs_and_has_not_is_no_finding(kind: str) -> None:
    """Outside of any host: no sandbox, no judge, no processes."""
    verifier = make_verifier(SPECS[kind])
    asked = verifier.verify(task_of(), Trajectory(final_answer="It is 42"), None)
    if kind in ("match", "hybrid", "composite"):
        assert (await asked).value == 1.0
    else:
        with pytest.raises((VerifierError, SandboxUnavailable)):
            await asked


async def test_its_row_is_complete(kind: str, made: Bench) -> None:
    if takes_sandbox(make_verifier(SPECS[kind])):
        return  # this bench has no sandboxes; tests/verifiers/test_script.py has
    row = await made.run(task_of(verifier=SPECS[kind]))
    assert (row.status, row.score, row.passed, row.failure_type) == ("completed", 1.0, True, None)
    assert row.verifier_isolation in ("pure", "fresh")
    assert row.hook_errors == []
