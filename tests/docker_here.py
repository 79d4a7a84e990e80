"""The Docker daemon of the tests: whether one answers (`.ci/docker.py start` makes one), and what is left in it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time

from docker import APIClient
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from rollout_engine.sandboxes.docker.engine import Engine, probe
from rollout_engine.sandboxes.docker.owner import MADE, OWNER, RUN

IMAGES = ("busybox", "pybox")
GONE_S = 120.0


@functools.cache
def missing() -> str | None:
    """Why not, or None. With ROLLOUT_REQUIRE=1 an absent daemon is a failure, not a skip."""
    try:
        probe(Engine().address)
        client = APIClient(timeout=60, **kwargs_from_env())
        try:
            for image in IMAGES:
                client.inspect_image(image)
        finally:
            client.close()
    except (DockerException, OSError) as error:
        reason = f'no Docker daemon with the test images: eval "$(.ci/docker.py start)" ({error})'
        if os.environ.get("ROLLOUT_REQUIRE") == "1":
            raise RuntimeError(reason) from error
        return reason
    return None


def left_of(run: str) -> list[str]:
    """Names of everything that carries the run's label."""
    with contextlib.closing(APIClient(**kwargs_from_env())) as api:
        return Daemon(api).left(run)


class Daemon:
    """The daemon as somebody outside of the engine sees it."""

    def __init__(self, api: APIClient) -> None:
        self.api = api

    def left(self, run: str) -> list[str]:
        """Names of everything that carries the run's label."""
        mine = {"label": f"{RUN}={run}"}
        names = [(found["Names"] or [found["Id"]])[0] for found in self.api.containers(all=True, filters=mine)]
        names += [found["Name"] for found in self.api.networks(filters=mine)]
        names += [found["Name"] for found in self.api.volumes(filters=mine)["Volumes"] or []]
        images = self.api.images(filters={"label": [MADE, f"{RUN}={run}"]})
        return names + [str(found["RepoTags"]) for found in images]

    async def gone(self, run: str, what: str = "") -> None:
        """Until nothing with that in its name is left of the run. A removal takes its time."""
        end = time.monotonic() + GONE_S
        while any(what in name for name in self.left(run)):
            assert time.monotonic() < end, self.left(run)
            await asyncio.sleep(0.05)

    def owned(self) -> int:
        return len(self.api.containers(all=True, filters={"label": OWNER}))
