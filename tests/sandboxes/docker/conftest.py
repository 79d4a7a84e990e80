"""A provider for the tests of the docker sandbox, and a look at what is left in the daemon."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from docker import APIClient
from docker.utils import kwargs_from_env

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider, DockerSandbox
from tests import docker_here
from tests.docker_here import Daemon


@pytest.fixture(autouse=True)
def needs_a_daemon(request: pytest.FixtureRequest) -> None:
    reason = docker_here.missing() if request.node.get_closest_marker("docker") else None
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def daemon(needs_a_daemon: None) -> Iterator[Daemon]:
    api = APIClient(**kwargs_from_env())
    yield Daemon(api)
    api.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short wherever the other folders are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[DockerProvider]:
    """One provider for a module's tests that only open and close."""
    if docker_here.missing() is not None:
        pytest.skip(docker_here.missing() or "")
    made = DockerProvider(run="tests", image="pybox")
    yield made
    await made.close()


@pytest.fixture
async def sandbox(shared: DockerProvider) -> AsyncIterator[DockerSandbox]:
    opened = await shared.open(SandboxSpec(memory_bytes=256 * 2**20, processes=64))
    yield opened
    await opened.close()
