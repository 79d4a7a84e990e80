"""The backends that the sandbox contract is run against. A backend registers by one entry in BACKENDS."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider
from tests import docker_here

ORDINARY_USER = 61_234
"""An id that nobody has: the launcher gives up root for it."""


@dataclass(frozen=True)
class Backend:
    """How a backend is made here, why it cannot be (None: it can), and what it claims beyond the contract."""

    make: Callable[[Path], SandboxProvider]
    missing: Callable[[], str | None] = lambda: None
    isolated: bool = True
    """Has a file system and processes of its own."""


def make_local(directory: Path) -> SandboxProvider:
    return make_provider("local", directory=directory)


def make_namespace(directory: Path) -> SandboxProvider:
    return make_provider("namespace")


def make_namespace_user(directory: Path) -> SandboxProvider:
    return make_provider("namespace", run_as=ORDINARY_USER)


def make_docker(directory: Path) -> SandboxProvider:
    return make_provider("docker", image="pybox")


@functools.cache
def namespace_missing(run_as: int | None) -> str | None:
    """Why namespace sandboxes do not work here; tried out once, in a thread as fixtures may run in a loop."""
    if run_as is not None and os.geteuid() != 0:
        return "the suite is an ordinary user itself; see namespace"
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _try_namespace(run_as)).result()


async def _try_namespace(run_as: int | None) -> str | None:
    provider = NamespaceProvider(run_as=run_as)
    try:
        await provider.facts()
    except SandboxUnavailable as error:
        return str(error)
    finally:
        await provider.close()
    return None


BACKENDS: dict[str, Backend] = {
    "namespace": Backend(make_namespace, missing=lambda: namespace_missing(None)),
    "namespace-user": Backend(make_namespace_user, missing=lambda: namespace_missing(ORDINARY_USER)),
    "docker": Backend(make_docker, docker_here.missing),
    "local": Backend(make_local, isolated=False),
}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.docker] if name == "docker" else []) for name in sorted(BACKENDS)]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = BACKENDS[request.param]
    reason = found.missing()
    if reason is not None and os.environ.get("ROLLOUT_REQUIRE") == "1":
        pytest.fail(f"ROLLOUT_REQUIRE=1: {request.param}: {reason}")
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return found


@pytest.fixture
def factory(backend: Backend) -> Callable[[Path], SandboxProvider]:
    return backend.make


@pytest.fixture
async def provider(backend: Backend, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    directory = tmp_path / "provider"
    directory.mkdir()
    made = backend.make(directory)
    yield made
    await made.close()


@pytest.fixture
async def sandbox(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    opened = await provider.open(SandboxSpec(env={"FROM_SPEC": "spec"}, label="contract"))
    yield opened
    await opened.close()
