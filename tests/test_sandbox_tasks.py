"""The bundled tasks with sandboxes: each is whole, its solution passes, and doing nothing does not.

One test: .venv/bin/pytest tests/test_sandbox_tasks.py -k shape
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rollout_engine.models.acting import FUTILE
from rollout_engine.models.pieces import pieces_of_script
from rollout_engine.specs import Task
from rollout_engine.tasks import read_tasks
from tests.contracts.conftest import namespace_missing
from tests.helpers import make_config, scripted
from tests.rig import bench

FILE = Path(__file__).parent.parent / "examples" / "tasks" / "sandbox.jsonl"
TASKS = list(read_tasks(FILE))
BY_ID = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.task_id)


def test_there_are_enough_of_each_kind() -> None:
    assert len(TASKS) >= 15
    assert len({task.task_id for task in TASKS}) == len(TASKS)
    kinds = {task.task_id.partition("-")[0] for task in TASKS}
    assert kinds == {"mend", "write", "shell", "data", "service"}
    assert sum(bool(task.services) for task in TASKS) >= 2


@BY_ID
def test_a_task_has_its_shape(task: Task) -> None:
    assert task.needs_sandbox
    assert task.script
    assert task.script.strip() not in FUTILE
    verifier = dict(task.verifier or {})
    if verifier.pop("type") == "code":
        (code,) = verifier.values()
        names = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
        assert names == ["verify"]
    else:
        assert set(verifier) == {"command", "files", "reward"}
        assert verifier["reward"] == "exit_code"
        assert not set(verifier["files"]) & set(task.files)
    assert all(service.health for service in task.services)


@BY_ID
def test_a_solution_can_be_given_in_several_turns(task: Task) -> None:
    assert len(pieces_of_script(task.script or "", 9)) >= 2


@BY_ID
async def test_the_solution_passes_and_a_futile_attempt_does_not(task: Task) -> None:
    missing = namespace_missing(None)
    if missing is not None:
        pytest.skip(missing)
    models = [scripted("good", turns=2), scripted("bad", skill=0.0)]
    async with bench(make_config(*models, agent="tool_loop", sandbox="namespace")) as rig:
        good, bad = await rig.run(task, "good"), await rig.run(task, "bad")
    assert (good.status, good.failure_message, good.passed) == ("completed", None, True)
    assert (bad.status, bad.failure_message, bad.passed) == ("completed", None, False)
