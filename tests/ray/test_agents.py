"""On Ray: runs of agent programs, their proxies served by a host that is an actor and that may be killed.

One test: .venv/bin/pytest tests/ray/test_agents.py -k "killed and namespace"
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_engine import RolloutEngine
from rollout_engine.store import open_run, read_rollouts
from tests.agents_cli.conftest import BACKENDS, ENVIRONMENTS, Serve, behind, needs_backend, serve, shell_task
from tests.agents_cli.test_engine_run import check_run
from tests.agents_cli.tiny import agents, left, processes, tiny
from tests.docker_here import left_of
from tests.models.conftest import stream_to
from tests.ray.rays import SharedRay, alive, descendants, kill_process, until
from tests.rig import chat_server

pytestmark = pytest.mark.ray
__all__ = ["serve"]

K = 4
NAP = f"602.{os.getpid()}"
RUN_S = 300.0


async def test_a_run_of_an_agent_program(serve: Serve, shared_ray: SharedRay, tmp_path: Path) -> None:
    await check_run(serve, tmp_path / "run", "auto")


@dataclass
class Halting:
    """A model whose first K streams halt in the middle, until their caller is gone; later ones come to their end."""

    halted: int = 0
    cut: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(event({"delta": {"role": "assistant", "content": "Do"}}))
        if self.halted < K:
            self.halted += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.cut += 1
        await response.write(event({"delta": {"content": "ne."}, "finish_reason": "stop"}) + b"data: [DONE]\n\n")
        return response


def event(choice: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2} if "finish_reason" in choice else None
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}], "usage": usage}).encode() + b"\n\n"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_host_that_is_killed_in_mid_stream_takes_its_agents_along_and_they_are_run_again(
    shared_ray: SharedRay, tmp_path: Path, backend: str
) -> None:
    needs_backend(backend)
    task, model = shell_task(environment=ENVIRONMENTS[backend]), Halting()
    async with asyncio.timeout(RUN_S), chat_server(model.chat) as url, RolloutEngine(
        [behind(url)], k=K, agent="command", agent_options=tiny("stream", NAP), sandbox=backend, ray="auto",
        run_dir=tmp_path / "run",
    ) as engine:  # fmt: skip
        host = shared_ray.host_pid()
        running = asyncio.create_task(engine.finish([task]))
        # Each agent has the first half of its answer: it started what sleeps.
        naps = await until(lambda: len(found := processes(f"sleep\0{NAP}")) == K and found, "all are in mid-stream", 90)
        assert (model.halted, model.cut) == (K, 0)
        doomed = [host, *descendants(host), *agents(), *(pid for pid, _ in naps)]
        kill_process(host)
        await until(lambda: not alive(doomed), "the agents, what they started, and their boxes are gone", 60)
        await until(lambda: model.cut == K, "the calls upstream have ended", 60)
        await running
    rows = read_rollouts(tmp_path / "run").to_pylist()
    assert sorted((row["attempt"], row["retries"], row["status"], row["score"]) for row in rows) == [
        (attempt, 1, "completed", 1.0) for attempt in range(K)
    ], rows
    run = open_run(tmp_path / "run")
    for row in rows:
        (turn,) = run.turns(row["rollout_id"])
        assert turn.completion.message["content"] == row["final_answer"] == "Done."
        assert json.loads(row["evidence"])["calls"]["agent"]["begun"] == 1
    await until(lambda: not left() and not processes(NAP), "nothing of an agent is left")
    if backend == "docker":
        assert left_of(engine.run_id) == []
