"""A run of an agent program through the whole engine: k attempts of two models over HTTP, and nothing left of it.

One test: .venv/bin/pytest tests/agents_cli/test_engine_run.py -k in_process
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from rollout_engine.commands.rollout_view import print_rollout, rollout_document
from rollout_engine.engine import RolloutEngine
from rollout_engine.store import open_run, read_rollouts
from tests.agents_cli.conftest import Serve, behind, needs_namespaces, shell_task
from tests.agents_cli.tiny import left, tiny
from tests.ray.rays import until


async def check_run(serve: Serve, path: Path, ray: str) -> None:
    """Runs two tasks, k = 4, a model that can and one that cannot, and checks every row."""
    needs_namespaces()
    tasks = [shell_task("t0"), shell_task("t1")]
    url = await serve(tasks, can={"skill": 1.0, "turns": 2}, cannot={"skill": 0.0, "turns": 2})
    models = [behind(url, "can"), behind(url, "cannot")]
    async with RolloutEngine(
        models, k=4, agent="command", agent_options=tiny(), sandbox="namespace", ray=ray, run_dir=path
    ) as engine:
        await engine.finish(tasks)
    rows = read_rollouts(path).to_pylist()
    assert Counter((row["model"], row["status"], row["score"]) for row in rows) == {
        ("can", "completed", 1.0): 8,
        ("cannot", "completed", 0.0): 8,
    }
    run = open_run(path)
    for row in rows:
        turns = run.turns(row["rollout_id"])
        assert [turn.role for turn in turns] == ["agent"] * 3
        assert row["agent_exit_code"] == 0
        assert row["prompt_tokens"] == sum(turn.completion.usage.prompt_tokens for turn in turns) > 0
        assert json.loads(row["evidence"])["usage"]["agree"] is True
    await until(lambda: not left(), "no program is left")


async def test_in_process(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await check_run(serve, tmp_path / "run", "off")
    run = open_run(tmp_path / "run")
    row = next(row for row in read_rollouts(tmp_path / "run").to_pylist() if row["model"] == "can")
    print_rollout(run, rollout_document(run, row), full=False)
    shown = capsys.readouterr().out
    for said in ("agent program", "exit code 0", "3 of 3 calls answered; shell 2×", "the end of its stdout"):
        assert said in shown


async def test_a_cancelled_run_leaves_no_program(serve: Serve, tmp_path: Path) -> None:
    needs_namespaces()
    task = shell_task()
    url = await serve([task], m={"skill": 1.0, "turns": 2})
    engine = RolloutEngine(
        [behind(url)], k=4, agent="command", agent_options=tiny("stubborn"), sandbox="namespace", ray="off",
        run_dir=tmp_path / "run",
    )  # fmt: skip
    async with engine:
        running = asyncio.create_task(engine.finish([task]))
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(left):
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait({running})
    await until(lambda: not left(), "no program is left")
