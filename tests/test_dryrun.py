"""The dry run: a verifier must not pass the untouched sandbox, and must pass the task's own solution.

One test: .venv/bin/pytest tests/test_dryrun.py -k solution
"""

from __future__ import annotations

from typing import Any

from rollout_engine.config import RunConfig
from rollout_engine.dryrun import dry_run
from rollout_engine.evaluation import judge
from rollout_engine.probe import Finding, Probe
from rollout_engine.specs import Task

READS = "def verify(env, final_answer=None):\n    return env.read_file('out').strip() == 'made'"


def sandboxed(verifier: dict[str, Any], script: str) -> Task:
    fields: dict[str, Any] = {"files": {"in": "x"}, "setup": ["mv in ready"], "environment": {"trusted": True}}
    return Task(task_id="t", prompt="Make out.", verifier=verifier, solution={"script": script}, **fields)


def script(command: str) -> dict[str, Any]:
    return {"type": "script", "command": command}


async def found(*tasks: Task) -> list[str]:
    return [finding.what for finding in await dry_run(tasks, RunConfig(sandbox="local"))]


async def test_a_good_task_has_nothing_against_it() -> None:
    assert await found(sandboxed(script("test -e ready && grep -q made out"), "echo made > out")) == []


async def test_a_verifier_that_passes_the_untouched_sandbox_or_fails_the_solution_is_named() -> None:
    assert await found(sandboxed(script("true"), "echo made > out")) == ["the untouched sandbox passes (score 1)"]
    assert await found(sandboxed(script("false"), "echo made > out")) == ["the solution does not pass (score 0)"]


async def test_a_solution_that_fails_and_a_verifier_that_raises_are_the_task_s_own_fault() -> None:
    (broken,) = await found(sandboxed(script("grep -q made out"), "echo why; exit 3"))
    assert "the solution ended with 3: why" in broken
    (raises,) = await found(sandboxed({"type": "code", "code": READS}, "echo made > out"))
    assert "FileNotFoundError" in raises


async def test_code_that_cannot_be_right_is_not_run_at_all() -> None:
    constant = {"type": "code", "code": "def verify(env, final_answer=None):\n    return 1.0"}
    assert any("constant" in reason or "input" in reason for reason in await found(sandboxed(constant, "true")))


async def test_a_final_answer_is_a_solution_too() -> None:
    task = Task(task_id="t", prompt="Say 4.", verifier={"type": "match", "expected": "4"}, solution="5")
    assert await found(task) == ["the solution does not pass (score 0)"]


def test_trouble_of_the_machine_is_no_verdict_on_the_task() -> None:
    trouble = Finding(None, None, "sandbox", "SandboxStartError: no memory")
    assert judge(Probe(trouble, None)) == (
        None,
        ("could not be checked: the untouched sandbox: sandbox: SandboxStartError: no memory",),
    )
    assert judge(Probe(Finding(0.0, False), None)) == (1.0, ())
