"""Sandboxes: one contract (base.py), one file per backend, each imported only when a run asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

from rollout_engine.errors import InputError
from rollout_engine.plugins import find
from rollout_engine.sandboxes.auto import AutoProvider
from rollout_engine.sandboxes.base import Recipe, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.paced import PacedProvider
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

LABELLED = ("docker",)
"""Backends whose boxes outlive a killed host, so that they are labelled with where they come from."""

_MIB = 2**20


class Origin(NamedTuple):
    """Whose sandboxes they are; what is left of them is found and removed by it."""

    run: str
    host: str
    epoch: int


def make_provider(
    name: str,
    *,
    creations_per_minute: Mapping[str, float] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    origin: Origin | None = None,
    **options: Any,
) -> SandboxProvider:
    """The provider called `name`: `auto`, a built-in, an entry point, or `module:attribute`. Raises InputError.

    `creations_per_minute`: backend -> sandboxes that it is asked for in a minute; one that is not named is not held.
    `settings`: backend -> further options, so that `auto` too hands each its own.
    """
    rates, settings = creations_per_minute or {}, settings or {}
    if name == "auto":
        make = partial(make_provider, creations_per_minute=rates, settings=settings, origin=origin)
        isolating = {each: partial(make, each) for each in ISOLATING if each in PROVIDERS}
        return AutoProvider(isolating, partial(make, "local", **options))
    options = {**settings.get(name, {}), **options}
    if origin is not None and name in LABELLED:
        options = {**origin._asdict(), **options}
    factory = find(name, PROVIDERS, "sandbox", group=ENTRY_POINTS, where="sandbox")
    provider = cast("SandboxProvider", factory(**options))
    return PacedProvider(provider, rates[name]) if name in rates else provider


def check_options(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises InputError about options that a backend's factory does not take. Nothing is made."""
    for name, options in settings.items():
        where = f"sandbox_options.{name}"
        factory = find(name, PROVIDERS, "sandbox", group=ENTRY_POINTS, where=where)
        own = [option for option in options if option in Origin._fields]
        if own:
            raise InputError(f"{own[0]!r} is the engine's own", where, "leave it out")
        try:
            inspect.signature(factory).bind(**options)
        except TypeError as error:
            raise InputError(f"the {name} sandbox cannot be made so: {error}", where, "correct that option") from error


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
