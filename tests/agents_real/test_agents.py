"""The real agent programs, unchanged, in sandboxes without a network: shell tool, a file, an end, and a verdict.

`.venv/bin/python .ci/agents.py` installs them.
One test: .venv/bin/pytest tests/agents_real/test_agents.py -k "codex and namespace"
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.agents.cli import claude_code, codex, gemini, mini_swe_agent, opencode
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.install import Installer
from rollout_engine.engine import RolloutEngine
from rollout_engine.store import open_run, read_rollouts
from tests.agents_cli.conftest import BACKENDS, Serve, behind, needs_backend, serve, shell_task
from tests.docker_here import left_of
from tests.ray.rays import command, until

__all__ = ["serve"]
pytestmark = pytest.mark.ray

CACHE = os.environ.get("AGENTS_CACHE") or str(Path(__file__).parents[2] / ".cache" / "agents")
K = int(os.environ.get("AGENTS_K", "4"))
SLOTS = int(os.environ.get("AGENTS_SLOTS", "4"))
"""In flight at once: these programs keep a core busy for seconds each, and have up to 600 MB."""
RAY = os.environ.get("AGENTS_RAY", "auto")
"""off: in this process."""
END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent waits for; to the others it is an echo."""
SCRIPT = f"printf 'forty-two' > out.txt\necho {END}"
AGENTS: dict[str, Factory] = {
    "opencode": opencode.AGENT,
    "codex": codex.AGENT,
    "claude_code": claude_code.AGENT,
    "mini_swe_agent": mini_swe_agent.AGENT,
    "gemini": gemini.AGENT,
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "namespace": {"memory_mb": 4096, "disk_mb": 1024},
    "docker": {"image": "pybox", "memory_mb": 4096},
}
WITHOUT = {("gemini", "docker"): "the image has no node"}


def needs(agent: str, backend: str) -> None:
    """Skips where the program or the backend is not here; with ROLLOUT_REQUIRE=1 that is a failure."""
    if (agent, backend) in WITHOUT:
        pytest.skip(WITHOUT[agent, backend])
    package = AGENTS[agent].program.package
    assert package is not None
    place = Installer(package, CACHE, 1.0).place
    if not place.is_dir():
        (pytest.fail if os.environ.get("ROLLOUT_REQUIRE") == "1" else pytest.skip)(f"no {place}: run .ci/agents.py")
    needs_backend(backend)


def left(mark: str) -> list[str]:
    """Processes with this in their environment, in whatever sandbox: agents, and what they started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(command(int(pid))[:200])
        except OSError:
            continue
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_program_does_a_task(
    serve: Serve, request: pytest.FixtureRequest, tmp_path: Path, agent: str, backend: str
) -> None:
    needs(agent, backend)
    if RAY == "auto":
        request.getfixturevalue("shared_ray")
    task = shell_task("file", solution={"script": SCRIPT}, environment=ENVIRONMENTS[backend])
    mark = f"ROLLOUT_MARK={secrets.token_hex(8)}"
    options = {"cache": CACHE, "env": dict([mark.split("=")])}
    url = await serve([task], can={"skill": 1.0, "turns": 2}, cannot={"skill": 0.0, "turns": 2})
    async with RolloutEngine(
        [behind(url, "can"), behind(url, "cannot")], k=K, agent=agent, agent_options=options, sandbox=backend,
        ray=RAY, run_dir=tmp_path / "run", host={"slots": SLOTS}, limits={"max_turns": 6, "agent_s": 900},
    ) as engine:  # fmt: skip
        await engine.finish([task])
    # mini-swe-agent takes no answer without a call for an end.
    stubborn = agent == "mini_swe_agent"
    rows = read_rollouts(tmp_path / "run").to_pylist()
    assert sorted((row["model"], row["attempt"]) for row in rows) == sorted(product(("can", "cannot"), range(K)))
    assert {(row["status"], row["retries"], row["verifier_isolation"], row["sandbox"]) for row in rows} == {
        ("completed", 0, "fresh", backend), *([("truncated", 0, "fresh", backend)] if stubborn else []),
    }, rows  # fmt: skip
    assert Counter((row["model"], row["stop_reason"], row["score"]) for row in rows) == {
        ("can", "finished", 1.0): K,
        ("cannot", "max_turns" if stubborn else "finished", 0.0): K,
    }, rows
    run = open_run(tmp_path / "run")
    for row in rows:
        turns = run.turns(row["rollout_id"])
        found = json.loads(row["evidence"])
        assert len(turns) == row["num_turns"] == found["calls"]["agent"]["answered"]
        assert row["prompt_tokens"] == sum(turn.completion.usage.prompt_tokens for turn in turns) > 0
        assert found["program"] == agent
        assert found["usage"]["agree"] is (None if stubborn else True)
        assert sum(found["calls"]["agent"]["tool_calls"].values()) >= 2
        if row["model"] == "can":
            assert row["agent_exit_code"] == 0
            assert len(turns) == (2 if stubborn else 3)
            assert all(turn.kept is None for turn in turns), "each call goes on from the one before"
            assert found["ended"] == "exit"
            assert any(message["role"] == "tool" for turn in turns for message in turn.messages)
    await until(lambda: not left(mark), "nothing of the agents is left")
    if backend == "docker":
        assert left_of(engine.run_id) == []
