"""What the daemon is told about a container: confinement, limits and labels; and which limits then hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.types import HostConfig, LogConfig, Mount

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import mounted, supply
from rollout_engine.sandboxes.docker.images import Image

DROPPED_CAPABILITIES = ["AUDIT_WRITE", "MKNOD", "NET_RAW"]
"""Beyond what Docker drops by default: no program of a task needs them."""
_IDLE = ["sleep", "2147483647"]
SCRATCH = "/tmp"
_SCRATCH_SHARE = 4
"""Of a limited disk, one part in so many is /tmp, the rest the working directory."""
_SHM_BYTES, _SHM_SHARE, _DISK_SHARE = 64 * 2**20, 4, 2
"""Files in memory are within the memory limit, and no kill frees them: /dev/shm is at most so large and one part in so
many of the memory, a limited disk one part in two, so that filling them never leaves the supervisor without any."""


@dataclass(frozen=True, slots=True)
class Body:
    """A container to be created."""

    spec: SandboxSpec
    image: Image
    name: str
    labels: Mapping[str, str]
    network: str
    runtime: str | None
    supervisor: str | None
    """The volume that holds it; None: commands run by the Engine's exec."""
    sockets: Path | None = None
    """The folder of this host in which the container finds Unix sockets."""

    def config(self, api: APIClient) -> dict[str, Any]:
        made: dict[str, Any] = api.create_container_config(
            self.image.id,
            [] if self.supervisor else _IDLE[1:],
            entrypoint=[supply.PROGRAM] if self.supervisor else _IDLE[:1],
            stdin_open=self.supervisor is not None,
            user="0",
            working_dir=self.spec.workdir,
            environment=self.environment(),
            labels=dict(self.labels),
            hostname="sandbox",
            host_config=self._host(api),
        )
        # The end of the attach stream is then the end of the supervisor's stdin: a dead owner leaves nothing.
        made["StdinOnce"] = self.supervisor is not None
        return made

    def _host(self, api: APIClient) -> HostConfig:
        spec = self.spec
        return api.create_host_config(
            init=self.supervisor is None,
            auto_remove=self.supervisor is not None,
            network_mode=self.network,
            mem_limit=spec.memory_bytes,
            memswap_limit=spec.memory_bytes,
            shm_size=min(_SHM_BYTES, spec.memory_bytes // _SHM_SHARE),
            nano_cpus=int(spec.cpus * 1e9),
            pids_limit=spec.processes,
            cap_drop=DROPPED_CAPABILITIES,
            security_opt=["no-new-privileges"],
            runtime=self.runtime,
            log_config=LogConfig(type=LogConfig.types.NONE),
            read_only=spec.require_limits,
            mounts=self._mounts(),
        )

    def environment(self) -> dict[str, str]:
        """With a read-only root, home is where a task may write."""
        home = {"HOME": self.spec.workdir} if self.spec.require_limits else {}
        return {**home, **self.spec.env}

    def _mounts(self) -> list[Mount]:
        mounts = _limited_disk(self.spec, self.labels) if self.spec.require_limits else []
        mounts += [Mount(at, path, type="bind", read_only=True) for path, at in self.spec.mounts]
        if self.supervisor is not None:
            mounts.append(Mount(supply.FOLDER, self.supervisor, read_only=True))
        if self.sockets is not None:
            mounts.append(Mount(mounted.FOLDER, str(self.sockets), type="bind", read_only=True))
        return mounts


def _limited_disk(spec: SandboxSpec, labels: Mapping[str, str]) -> list[Mount]:
    """A read-only root with size-limited tmpfs volumes where a task writes.

    Storage drivers hold no quota on ordinary file systems. Volumes, not tmpfs mounts: the archive API sees them. They
    start empty (`archive.fill` puts in what the image has there), and are anonymous, so they go with the container.
    """
    disk = min(spec.disk_bytes, spec.memory_bytes // _DISK_SHARE)
    scratch = disk // _SCRATCH_SHARE
    parts = {spec.workdir: disk - scratch, SCRATCH: scratch}
    return [_volume(path, size, spec.inodes // len(parts), labels) for path, size in parts.items()]


def _volume(path: str, size: int, inodes: int, labels: Mapping[str, str]) -> Mount:
    mode = "1777" if path == SCRATCH else "0777"
    options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={size},nr_inodes={inodes},nosuid,nodev,mode={mode}"}
    mount = Mount(path, None, type="volume")
    mount["VolumeOptions"] = {"DriverConfig": {"Name": "local", "Options": options}, "Labels": dict(labels)}
    return mount


def unenforceable(info: Mapping[str, Any]) -> list[str]:
    """The limits that this daemon cannot hold at all."""
    asked = {"memory": "MemoryLimit", "processes": "PidsLimit", "cpus": "CpuCfsQuota"}
    return [limit for limit, field in asked.items() if not info.get(field)]


def limits_enforced(info: Mapping[str, Any], spec: SandboxSpec) -> str:
    lacking = unenforceable(info)
    held = [f"{limit}:cgroup" for limit in ("memory", "cpus", "processes") if limit not in lacking]
    if spec.require_limits:
        held += ["disk:tmpfs", "inodes:tmpfs"]
    return ",".join(held) or "none"
