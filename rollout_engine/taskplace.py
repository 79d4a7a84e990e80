"""Whether the run's sandbox backend fits what a task, its agent and its verifier want of one."""

from __future__ import annotations

from rollout_engine.agents import agent_needs_sandbox
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.specs import EnvironmentSpec, Task
from rollout_engine.verifiers.base import Verifier, runs_code, takes_sandbox

_ISOLATING = "run with --sandbox auto, namespace or docker"


def needs_sandbox(task: Task, config: RunConfig) -> bool:
    """Whether anything of the task's rollouts happens in a sandbox: by the task's own word, or by the agent's."""
    return task.needs_sandbox or agent_needs_sandbox(config.agent)


def check_place(task: Task, verifier: Verifier, config: RunConfig, named: str = "environment") -> None:
    """Raises InputError where the backend cannot hold a resolved task; `named` is the field of its environment."""
    environment = task.environment or EnvironmentSpec()
    if not needs_sandbox(task, config) and not takes_sandbox(verifier):
        return
    if config.sandbox == "none":
        raise _nowhere(task, config, named)
    if config.sandbox == "docker" and environment.root is None and "image" not in config.backend("docker"):
        raise InputError(
            "the docker sandbox needs an image, directory or tar, and the task names none",
            f"{named}.image" if named == "environment" else named,
            'name one, or one for all such tasks in the config: sandbox_options.docker = {image = "..."}',
        )
    if config.sandbox == "local":
        _check_local(environment, takes_sandbox(verifier) and runs_code(verifier))


def _nowhere(task: Task, config: RunConfig, named: str) -> InputError:
    fix = "run with --sandbox auto"
    if task.needs_sandbox:
        fix += ", or drop environment, files, setup, services and tools from the task"
        return InputError("the task needs a sandbox, and the run has none", named, fix)
    if needs_sandbox(task, config):
        return InputError(f"the agent {config.agent} needs a sandbox, and the run has none", "environment", fix)
    return InputError("the verifier needs a sandbox, and the run has none", "verifier", fix)


def _check_local(environment: EnvironmentSpec, code: bool) -> None:
    """The local sandbox isolates nothing and holds no limit."""
    if environment.require_limits:
        raise InputError(
            "the task requires its limits, and the local sandbox holds none", "environment.require_limits", _ISOLATING
        )
    if code and not environment.trusted:
        raise InputError(
            "the task's code would run without isolation",
            "verifier",
            f"{_ISOLATING}, or say trusted = true in the task's environment",
        )
