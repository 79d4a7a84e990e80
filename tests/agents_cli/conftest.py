"""What the tests of agent programs share: a task that needs a shell, and a model that is served over HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollout_engine.config import ModelSpec
from rollout_engine.models.server import ModelServer
from rollout_engine.specs import Task
from tests import docker_here
from tests.contracts.conftest import namespace_missing

SCRIPT = "printf 'forty-two' > out.txt\ncat out.txt"
VERIFIER = {
    "type": "code",
    "code": "def verify(env, final_answer, conversation):\n"
    "    written = list(env.files('out.txt'))\n"
    "    return float(bool(written) and env.read_file('out.txt').strip() == 'forty-two')\n",
}


def shell_task(task_id: str = "t", **fields: Any) -> Task:
    """Solved by a file that only the sandbox's shell can write; verified in a sandbox of its own."""
    given: dict[str, Any] = {
        "prompt": "Write forty-two into out.txt.",
        "solution": {"script": SCRIPT},
        "environment": {},
    }
    return Task(task_id=task_id, verifier=VERIFIER, **{**given, **fields})


def behind(url: str, name: str = "m", **fields: Any) -> dict[str, Any]:
    """The config's model for one that is served there."""
    return {
        "name": name,
        "kind": "openai",
        "model": name,
        "base_url": url,
        "seed_header": True,
        "call_retries": 0,
        **fields,
    }


BACKENDS = ["namespace", pytest.param("docker", marks=pytest.mark.docker)]
"""Parameters: where agent programs run without a network."""
ENVIRONMENTS: dict[str, dict[str, Any]] = {"namespace": {}, "docker": {"image": "pybox"}}


def needs_backend(backend: str) -> None:
    """Skips where it is not here; with ROLLOUT_REQUIRE=1 that is a failure."""
    if backend == "namespace":
        needs_namespaces()
    elif (missing := docker_here.missing()) is not None:
        pytest.skip(missing)


def needs_namespaces() -> None:
    """Skips where there are none; with ROLLOUT_REQUIRE=1 that is a failure."""
    missing = namespace_missing(None)
    if missing is not None and os.environ.get("ROLLOUT_REQUIRE") == "1":
        pytest.fail(f"ROLLOUT_REQUIRE=1: {missing}")
    if missing is not None:
        pytest.skip(missing)


Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts model servers: name -> options of a scripted model. Gives the URL."""
    opened: list[ModelServer] = []

    async def start(tasks: list[Task], **models: dict[str, Any]) -> str:
        specs = {name: ModelSpec(name=name, kind="scripted", options=options) for name, options in models.items()}
        server = ModelServer(specs, solutions={task.task_id: task.solution for task in tasks if task.solution})
        await server.__aenter__()
        opened.append(server)
        return server.url

    yield start
    for server in opened:
        await server.__aexit__()
