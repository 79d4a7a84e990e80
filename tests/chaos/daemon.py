"""A Docker daemon of the suite's own, which nobody misses when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from docker import APIClient
from docker.errors import NotFound

from tests.chaos.work import IMAGE
from tests.ray.rays import ROOT, blocking_until, command, descendants, processes

SCRIPT = ROOT / ".ci/docker.py"


class Daemon:
    """Started over an empty `state`, with an image that needs no network.

    Its address is DOCKER_HOST of this process from then on. Whoever makes it calls `stop`.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self.start()

    def start(self) -> None:
        """Returns once it answers."""
        os.environ["DOCKER_HOST"] = self._ask("start", IMAGE).removeprefix("export DOCKER_HOST=").strip()

    def _ask(self, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            env={
                **os.environ,
                "ROLLOUT_DOCKER_STATE": str(self._state),
                "ROLLOUT_DOCKER_OPTIONS": f"--cgroup-parent=/{self._state.parent.name}",  # the place's
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    @property
    def pid(self) -> int:
        return int((self._folder / "pid").read_text())

    @property
    def _folder(self) -> Path:
        return Path(os.environ["DOCKER_HOST"].removeprefix("unix://")).parent

    def kill(self) -> None:
        """SIGKILL. `start` brings up another one over the same state."""
        pids = [self.pid, *(pid for pid in descendants(self.pid) if command(pid).startswith("containerd "))]
        os.kill(self.pid, signal.SIGKILL)
        blocking_until(lambda: not set(pids) & set(processes()), "the daemon and its containerd have ended")

    def mounts(self, place: str) -> bool:
        """Whether something is mounted there by it: there its successors unmount it, too."""
        return place.startswith((f"{self._state}/", "/run/"))

    def left(self) -> list[str]:
        """Everything that the engine made in it and is still there. Nobody else uses it."""
        api = APIClient(os.environ["DOCKER_HOST"], timeout=30)
        try:
            listed = [each for each in api.containers(all=True) if _is_there(api, each["Id"])]
            containers = [f"container {each['Names']} {each['State']}" for each in listed]
            images = [
                str(each["RepoTags"]) for each in api.images() if f"{IMAGE}:latest" not in (each["RepoTags"] or ())
            ]
            kept = {"bridge", "host", "none"}
            return containers + images + [each["Name"] for each in api.networks() if each["Name"] not in kept]
        finally:
            api.close()

    def forgotten(self) -> set[int]:
        """Processes of containers that its API does not know: a daemon was killed while it started them."""
        api = APIClient(os.environ["DOCKER_HOST"], timeout=30)
        try:
            known = {each["Id"] for each in api.containers(all=True)}
        finally:
            api.close()
        shims = {pid: command(pid).split() for pid in processes() if "/containerd-shim" in command(pid)}
        return {below for pid, line in shims.items() if not known & set(line) for below in descendants(pid)}

    def sweep(self) -> None:
        """Ends the shims that killed daemons forgot; only while there is no container."""
        for pid in processes():
            line = command(pid)
            if "/containerd-shim" in line or line.startswith("runc "):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._ask("stop")
        self.sweep()
        os.environ.pop("DOCKER_HOST", None)


def _is_there(api: APIClient, container: str) -> bool:
    """A daemon that was killed while it removed a container may list it until its next start, and have it no more."""
    try:
        api.inspect_container(container)
    except NotFound:
        return False
    return True
