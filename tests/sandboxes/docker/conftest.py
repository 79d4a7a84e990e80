"""A provider for the tests of the docker sandbox, and a look at what is left in the daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import docker_here
import pytest
from docker import APIClient
from docker.utils import kwargs_from_env

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider, DockerSandbox
from rollout_engine.sandboxes.docker.owner import OWNER, PREPARED, RUN


class Daemon:
    """The daemon as somebody outside of the engine sees it."""

    def __init__(self, api: APIClient) -> None:
        self.api = api

    def left(self, run: str) -> list[str]:
        """Names of everything that carries the run's label."""
        mine = {"label": f"{RUN}={run}"}
        names = [found["Names"][0] for found in self.api.containers(all=True, filters=mine)]
        names += [found["Name"] for found in self.api.networks(filters=mine)]
        names += [found["Name"] for found in self.api.volumes(filters=mine)["Volumes"] or []]
        images = self.api.images(filters={"label": [PREPARED, f"{RUN}={run}"]})
        return names + [str(found["RepoTags"]) for found in images]

    def owned(self) -> int:
        return len(self.api.containers(all=True, filters={"label": OWNER}))


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
