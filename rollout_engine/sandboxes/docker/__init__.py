"""Sandboxes from the Docker Engine: importing this imports the package `docker`."""

from rollout_engine.sandboxes.docker.doctor import DockerCapabilities, capabilities
from rollout_engine.sandboxes.docker.failures import DockerImageMissing, DockerNetworksExhausted
from rollout_engine.sandboxes.docker.provider import DockerProvider
from rollout_engine.sandboxes.docker.reaper import Reaped
from rollout_engine.sandboxes.docker.sandbox import DockerSandbox

__all__ = [
    "DockerCapabilities",
    "DockerImageMissing",
    "DockerNetworksExhausted",
    "DockerProvider",
    "DockerSandbox",
    "Reaped",
    "capabilities",
]
