"""The backends that isolate, by name: namespaces as root and as an ordinary user, and docker."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import SandboxProvider, SandboxSpec
from tests import docker_here

ORDINARY_USER = 61_234
"""An id that nobody has."""
ISOLATING = ["root", "user", pytest.param("docker", marks=pytest.mark.docker)]
"""Parameters of a fixture that gives `working` providers."""


def absent(reason: str) -> None:
    """Skips, except where ROLLOUT_REQUIRE says that everything must be there."""
    if os.environ.get("ROLLOUT_REQUIRE") == "1":
        pytest.fail(f"ROLLOUT_REQUIRE=1: {reason}")
    pytest.skip(reason)


def run_as(kind: str) -> int | None:
    """Which id the launcher takes for a kind of namespaces."""
    if os.geteuid() != 0 and kind == "root":
        absent("needs root")
    return ORDINARY_USER if kind == "user" and os.geteuid() == 0 else None


async def working(kind: str) -> SandboxProvider:
    """A provider that has shown that it works; the caller closes it."""
    if kind == "docker":
        reason = docker_here.missing()
        if reason is not None:
            absent(reason)
        return make_provider("docker", run="tests", image="pybox")
    made = make_provider("namespace", run_as=run_as(kind))
    try:
        await (await made.open(SandboxSpec())).close()
    except SandboxUnavailable as error:
        await made.close()
        absent(str(error))
    return made


class Kept:
    """A provider that outlives a bench."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def close(self) -> None:
        return None
