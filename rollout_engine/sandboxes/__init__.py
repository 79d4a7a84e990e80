"""Sandboxes: one contract (base.py), one file per backend, each imported only when a run asks for it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from rollout_engine.plugins import find
from rollout_engine.sandboxes.auto import AutoProvider
from rollout_engine.sandboxes.base import Recipe, SandboxProvider, SandboxSpec
from rollout_engine.specs import EnvironmentSpec, Task

PROVIDERS: dict[str, str] = {
    "docker": "rollout_engine.sandboxes.docker:DockerProvider",
    "local": "rollout_engine.sandboxes.local:LocalProvider",
    "namespace": "rollout_engine.sandboxes.namespace:NamespaceProvider",
}
"""Name -> `module:attribute` of a factory that takes the provider's options as keywords."""

ENTRY_POINTS = "rollout_engine.sandboxes"
"""Installed packages add backends under this entry-point group."""

ISOLATING = ("namespace", "docker")
"""What `auto` tries, best first; a backend that is not registered above is passed over."""

_MIB = 2**20


def make_provider(name: str, **options: Any) -> SandboxProvider:
    """The provider called `name`: `auto`, a built-in, an entry point, or `module:attribute`. Raises InputError."""
    if name == "auto":
        isolating = {each: partial(make_provider, each) for each in ISOLATING if each in PROVIDERS}
        return AutoProvider(isolating, partial(make_provider, "local", **options))
    factory = find(name, PROVIDERS, "sandbox", group=ENTRY_POINTS, where="sandbox")
    return cast("SandboxProvider", factory(**options))


def task_recipe(task: Task, timeout_s: float) -> Recipe:
    """A task's files and setup commands, as a provider prepares them."""
    files = {path: text.encode() for path, text in task.files.items()}
    return Recipe(files, tuple(task.setup), timeout_s)


def sandbox_spec(task: Task, environment: EnvironmentSpec | None = None, label: str = "") -> SandboxSpec:
    """What a task's sandbox is made from; limits that the environment leaves open keep the spec's defaults.

    `environment` None: the task's own. Env keys and variables are folded into it by `tasks.resolve` before.
    """
    env = environment or task.environment or EnvironmentSpec()
    limits: dict[str, Any] = {
        "memory_bytes": None if env.memory_mb is None else env.memory_mb * _MIB,
        "cpus": env.cpus,
        "processes": env.processes,
        "disk_bytes": None if env.disk_mb is None else env.disk_mb * _MIB,
        "inodes": env.inodes,
    }
    return SandboxSpec(
        image=env.image,
        directory=env.directory,
        tar=env.tar,
        env={**env.env, **task.env_variables},
        workdir=env.workdir,
        user=env.user,
        network=env.network,
        require_limits=env.require_limits,
        trusted=env.trusted,
        label=label or task.task_id,
        **{name: value for name, value in limits.items() if value is not None},
    )
