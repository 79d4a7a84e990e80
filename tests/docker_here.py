"""Whether a Docker daemon with the test images answers here; `.ci/docker.py start` makes one."""

from __future__ import annotations

import functools
import os

from docker import APIClient
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from rollout_engine.sandboxes.docker.engine import Engine, probe

IMAGES = ("busybox", "pybox")


@functools.cache
def missing() -> str | None:
    """Why not, or None. With ROLLOUT_REQUIRE=1 an absent daemon is a failure, not a skip."""
    try:
        probe(Engine().address)
        client = APIClient(timeout=10, **kwargs_from_env())
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
