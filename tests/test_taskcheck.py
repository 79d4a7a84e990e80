"""Verifiers that no reward should rest on are found before a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.taskcheck import Finding, check_verifiers
from rollout_engine.types import Isolation, Score, Trajectory


class Own:
    """A verifier of the user's own, which does what its `how` says."""

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        self.how = spec["how"]
        self.isolation = Isolation.FRESH if self.how == "sandboxed" else Isolation.PURE

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        assert trajectory.messages[-1]["content"] == trajectory.final_answer
        if self.how == "hangs":
            await asyncio.sleep(3600)
        if self.how == "raises":
            return Score(1.0 / len(trajectory.final_answer or ""))
        if self.how == "nan":
            return Score(float("nan"))
        return Score(1.0 if self.how == "passes" else 0.0)


def task(verifier: dict[str, Any], solution: str | None = None) -> Task:
    return Task(task_id="t", prompt="2+2?", verifier=verifier, solution=solution)


def own(how: str, solution: str | None = None) -> Task:
    return task({"type": f"{__name__}:Own", "how": how}, solution)


async def found(*tasks: Task, timeout_s: float = 60.0) -> list[str]:
    findings = await check_verifiers(tasks, timeout_s=timeout_s)
    assert all(finding.task_id == "t" for finding in findings)
    return [finding.what for finding in findings]


async def test_a_good_task_has_no_findings() -> None:
    good = {"type": "match", "pattern": r"A:\s*(.*)", "compare": "numeric", "expected": "4"}
    assert await found(task(good, "2+2 is 4\nA: 4"), task(good)) == []


async def test_a_solution_that_its_own_verifier_fails() -> None:
    assert await found(task({"type": "match", "expected": "4"}, "five")) == ["fails (score 0) the task's own solution"]


async def test_a_verifier_that_passes_what_it_should_not() -> None:
    assert await found(task({"type": "match", "expected": ""})) == ["passes an empty answer"]
    passed = ["passes an empty answer", "passes a very long answer", "passes a garbage answer"]
    assert await found(own("passes", "x")) == passed


async def test_a_pattern_that_hangs_is_found_by_the_long_answer() -> None:
    slow = {"type": "match", "pattern": r"(?:(?:\w+|\W+)+)+Z", "expected": "x"}
    hangs = {"type": "match", "pattern": r"(o|oo|.)+\Z(?<=Q)", "expected": "x"}
    assert any("very long answer" in what for what in await found(task(slow), task(hangs), timeout_s=0.3))


async def test_a_verifier_that_raises_hangs_or_gives_no_number() -> None:
    assert await found(own("raises")) == ["raises ZeroDivisionError (float division by zero) on an empty answer"]
    assert (await found(own("hangs"), timeout_s=0.02))[0] == "does not end within 0.04 s on an empty answer"
    assert (await found(own("nan")))[0] == "gives the score nan to an empty answer"


async def test_one_that_needs_a_sandbox_is_noted() -> None:
    assert await check_verifiers([own("sandboxed")]) == [
        Finding("t", "the verifier needs a sandbox: --dry-run tries it", "note")
    ]


async def test_one_that_cannot_be_made() -> None:
    (what,) = await found(task({"type": "match"}))
    assert what.startswith("the verifier cannot be made: verifier.expected: a required field is missing")


async def test_tasks_may_come_asynchronously() -> None:
    async def tasks() -> AsyncIterator[Task]:
        yield task({"type": "match", "expected": ""})

    assert [finding.what for finding in await check_verifiers(tasks())] == ["passes an empty answer"]


PURE = "def verify(env, final_answer=None):\n    return {}"


async def test_verifier_code_is_run_and_found_out() -> None:
    def code(returned: str) -> Task:
        return task({"type": "code", "code": PURE.format(returned)}, "4")

    assert await found(code("final_answer == '4'")) == []
    assert await found(code("final_answer != '4'")) == [
        "passes an empty answer",
        "passes a very long answer",
        "passes a garbage answer",
        "fails (score 0) the task's own solution",
    ]
    assert "ZeroDivisionError" in (await found(code("1 / len(final_answer)")))[0]
