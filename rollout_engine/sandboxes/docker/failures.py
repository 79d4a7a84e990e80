"""What the Engine API's answers mean: its errors as ours, by type and status, never by text."""

from __future__ import annotations

import tempfile

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException, Timeout

from rollout_engine.disk import ELSEWHERE, full, is_full
from rollout_engine.errors import (
    SandboxAway,
    SandboxDied,
    SandboxError,
    SandboxOutOfMemory,
    SandboxStartError,
    SandboxUnavailable,
    clip,
)

UNREACHABLE_FIX = "start the Docker daemon, or set DOCKER_HOST to where it listens"

NO_SUBNET_STATUSES = frozenset({400, 403, 404})
"""How engines of different age refuse a network that names nothing which could be invalid or missing."""


class DockerImageMissing(SandboxStartError):
    """The image is not on this node; the engine never pulls by itself."""

    retryable = False


class DockerNetworksExhausted(SandboxStartError):
    """The daemon has no subnet left for another network ("all predefined address pools ... fully subnetted")."""


def translate(error: Exception, what: str, *, known: bool = True) -> SandboxError:
    """The typed form of whatever a call to the daemon raised. `known`: it has answered before."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, APIError):
        return SandboxError(clip(f"docker: {what}: {explanation(error)}"))
    if isinstance(error, Timeout):
        return SandboxError(f"docker: {what}: the daemon did not answer in time")
    if isinstance(error, OSError) and is_full(error):
        return full(error, tempfile.gettempdir(), ELSEWHERE)
    if isinstance(error, DockerException | RequestException | OSError):
        # A socket that refuses is one that a daemon has listened at, and that its successor will listen at again.
        lost = SandboxAway if known or isinstance(error, ConnectionRefusedError) else SandboxUnavailable
        return lost(clip(f"docker: {what}: the daemon cannot be reached ({error}); {UNREACHABLE_FIX}"))
    return SandboxError(clip(f"docker: {what}: {type(error).__name__}: {error}"))


def explanation(error: APIError) -> str:
    return f"{error.status_code or '?'} {error.explanation or error}"


def died(name: str, why: str = "its container is gone") -> SandboxDied:
    return SandboxDied(f"docker: sandbox {name} has ended: {why}")


def out_of_memory(name: str) -> SandboxOutOfMemory:
    return SandboxOutOfMemory(f"docker: sandbox {name} was ended by the kernel: out of the memory that it may use")


def image_missing(image: str) -> DockerImageMissing:
    fix = f"`docker pull {image}` or `docker load` it on every node"
    return DockerImageMissing(f"docker: there is no image {image!r} on this node; {fix}")


def networks_exhausted(error: APIError) -> DockerNetworksExhausted:
    fix = (
        "remove unused ones (`docker network prune`), use network `none`, "
        'or give the daemon more and smaller subnets: "default-address-pools": [{"base": "10.200.0.0/16", "size": 26}]'
    )
    return DockerNetworksExhausted(clip(f"docker: no subnet is left for another network; {fix} ({explanation(error)})"))
