"""What the runs do that are struck: short rollouts with a shell, against models behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.models.server_call import tasks_of
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.specs import EnvironmentSpec, Task

MODELS = {"strong": 0.8, "weak": 0.3}
"""Name -> skill, strongest first."""
LATENCY_MS = 300.0
K = 4
SLOTS = 12
LEASE_S = 20.0
"""Longer than a loaded machine holds a process up: a host that ends for that was not struck."""
SEED = 5
IMAGE = "busybox"


def work(tasks: int, dockers: int) -> Iterator[Task]:
    """The first `dockers` tasks run in docker sandboxes, the others in namespaces."""
    for number in range(tasks):
        yield Task(
            task_id=f"t{number}",
            prompt=f"Write {number} into answer.txt.",
            environment=EnvironmentSpec(image=IMAGE if number < dockers else None),
            verifier={"type": "script", "command": f'[ "$(cat answer.txt)" = {number} ]', "reward": "exit_code"},
            solution={"script": f"echo {number} > answer.txt"},
        )


def serve(tasks: list[Task], port: int = 0) -> ServerProcess:
    """The models in a process of their own, listening."""
    options = {"latency_ms": LATENCY_MS, "latency_dist": "exponential", "turns": 2}
    models = {
        name: ModelSpec(name=name, kind="scripted", options={"skill": skill, **options})
        for name, skill in MODELS.items()
    }
    server = ServerProcess(models, solutions=tasks_of(tasks).solutions, port=port)
    server.start()
    return server


def config_of(url: str, ray: str) -> RunConfig:
    """A run against those models, on the cluster at that address. What a strike brings about is tried again soon."""
    models = [
        {"name": name, "kind": "openai", "model": name, "base_url": url, "seed_header": True, "call_timeout_s": 30.0}
        for name in MODELS
    ]
    return RunConfig.model_validate(
        {
            "models": models,
            "k": K,
            "seed": SEED,
            "agent": "tool_loop",
            "sandbox": "tests.chaos.boxes:Mixed",
            "ray": ray,
            "host": {"slots": SLOTS, "lease_s": LEASE_S},
            "limits": {"start_s": 60.0, "agent_s": 120.0, "verify_s": 60.0, "close_s": 20.0},
            "retry": {"max_retries": 4, "backoff_s": 0.2, "backoff_max_s": 5.0, "breaker_pause_s": 1.0},
        }
    )
