"""What is docker's own: images, limits, labels, and faults that are told apart by type.

python -m pytest tests/sandboxes/docker/test_docker_provider.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from docker.errors import APIError

from rollout_engine.errors import SandboxAway, SandboxDied, SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes import PROVIDERS, Origin, make_provider
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.docker import (
    DockerImageMissing,
    DockerNetworksExhausted,
    DockerProvider,
    DockerSandbox,
    capabilities,
    supply,
)
from rollout_engine.sandboxes.docker.owner import OWNER, Owner
from tests.docker_here import Daemon

pytestmark = pytest.mark.docker


@contextlib.asynccontextmanager
async def opened(provider: DockerProvider, spec: SandboxSpec) -> AsyncIterator[DockerSandbox]:
    sandbox = await provider.open(spec)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def out(sandbox: Sandbox, script: str, user: str | None = None) -> str:
    result = await sandbox.exec(["sh", "-c", script], user=user)
    assert result.ok, result
    return result.stdout.decode().strip()


async def test_its_container_is_confined_limited_and_labelled(daemon: Daemon) -> None:
    provider = DockerProvider(run="r1", host="h1", epoch=7, image="pybox")
    spec = SandboxSpec(memory_bytes=64 * 2**20, cpus=0.5, processes=33, label="rollout-1")
    async with opened(provider, spec) as sandbox:
        found = daemon.api.inspect_container(sandbox.container)
        assert sandbox.limits_enforced == "memory:cgroup,cpus:cgroup,processes:cgroup"
    await provider.close()
    host, config = found["HostConfig"], found["Config"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"]) == (2**26, 2**26, 5 * 10**8, 33)
    assert (host["NetworkMode"], host["Privileged"], host["SecurityOpt"]) == ("none", False, ["no-new-privileges"])
    values = {name.removeprefix("rollout-engine."): value for name, value in config["Labels"].items()}
    assert (values["run"], values["host"], values["epoch"], values["rollout"]) == ("r1", "h1", "7", "rollout-1")


@pytest.mark.parametrize("name", ["docker", "auto"])
async def test_a_hosts_sandboxes_are_labelled_with_their_origin(
    name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PROVIDERS, "namespace")  # `auto` then takes docker
    provider = make_provider(name, settings={"docker": {"image": "pybox"}}, origin=Origin("r2", "h2", 3))
    sandbox = await provider.open(SandboxSpec())
    labels = daemon.api.inspect_container(sandbox.container)["Config"]["Labels"]  # type: ignore[attr-defined]
    await provider.close()
    values = [labels[f"rollout-engine.{label}"] for label in ("run", "host", "epoch")]
    assert values == ["r2", "h2", "3"]


async def test_a_provider_that_closes_leaves_those_of_another_host_of_its_process_alone(daemon: Daemon) -> None:
    one, other = (DockerProvider(run="r3", host=host, image="pybox") for host in ("h1", "h2"))
    async with opened(other, SandboxSpec()) as sandbox:
        await (await one.open(SandboxSpec())).close()
        await one.close()
        assert (await sandbox.exec(["true"])).ok
    await other.close()


async def test_a_missing_image_is_named_with_its_remedy(shared: DockerProvider) -> None:
    with pytest.raises(DockerImageMissing, match=r"'no/such:1'.*docker pull no/such:1"):
        await shared.open(SandboxSpec(image="no/such:1"))


async def test_a_spec_without_any_image() -> None:
    provider = DockerProvider()
    with pytest.raises(SandboxStartError, match="image"):
        await provider.open(SandboxSpec())
    await provider.close()


async def test_an_unknown_runtime_and_an_unknown_user_are_start_errors(shared: DockerProvider) -> None:
    provider = DockerProvider(image="busybox", runtime="no-such-runtime")
    with pytest.raises(SandboxStartError, match="no-such-runtime"):
        await provider.open(SandboxSpec())
    await provider.close()
    with pytest.raises(SandboxStartError, match="nobody-knows"):
        await shared.open(SandboxSpec(user="nobody-knows"))


def make_root(folder: Path) -> None:
    (folder / "root/bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", folder / "root/bin/busybox")
    (folder / "root/data").write_text("from the directory")
    with tarfile.open(folder / "root.tar", "w") as tar:
        tar.add(folder / "root", arcname=".")


async def test_a_tar_and_a_directory_become_images(daemon: Daemon, tmp_path: Path) -> None:
    make_root(tmp_path)
    provider = DockerProvider(run="imports")
    for spec in (SandboxSpec(directory=str(tmp_path / "root")), SandboxSpec(tar=str(tmp_path / "root.tar"))):
        async with opened(provider, spec) as sandbox:
            assert (await sandbox.exec(["/bin/busybox", "cat", "/data"])).stdout == b"from the directory"
    with pytest.raises(SandboxStartError, match="nowhere"):
        await provider.open(SandboxSpec(tar="/nowhere.tar"))
    await provider.close()
    assert daemon.left("imports") == []


async def test_a_saved_image_is_no_root(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "saved.tar").write_bytes(b"".join(daemon.api.get_image("busybox")))
    provider = DockerProvider(run="saved")
    with pytest.raises(SandboxStartError, match="docker load -i"):
        await provider.open(SandboxSpec(tar=str(tmp_path / "saved.tar")))
    await provider.close()
    assert daemon.left("saved") == []


@pytest.mark.parametrize("supervise", [True, False])
async def test_users(supervise: bool) -> None:
    provider = DockerProvider(image="pybox", supervise=supervise)
    async with opened(provider, SandboxSpec(user="nobody")) as sandbox:
        assert await out(sandbox, "id -un; touch /workspace/mine; stat -c %U /workspace/mine") == "nobody\nnobody"
        await sandbox.write_file("deep/file", b"x")
        assert await out(sandbox, "stat -c %U deep/file; rm deep/file") == "nobody"
        assert await out(sandbox, "id -u; id -g", user="33:34") == "33\n34"
        assert await out(sandbox, "id -u", user="root") == "0"
        assert (await sandbox.exec(["true"], user="nobody-knows")).exit_code == 126
    await provider.close()


@pytest.mark.parametrize("supervise", [True, False])
async def test_out_of_memory_is_told_from_other_kills(supervise: bool) -> None:
    provider = DockerProvider(image="pybox", supervise=supervise)
    async with opened(provider, SandboxSpec(memory_bytes=64 * 2**20)) as sandbox:
        killed = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        hog = await sandbox.exec(["tail", "/dev/zero"])
        after = await sandbox.exec(["sh", "-c", "kill -9 $$"])
    assert [(each.exit_code, each.oom) for each in (killed, hog, after)] == [(-9, False), (-9, True), (-9, False)]
    await provider.close()


async def test_exit_codes_are_exact(sandbox: DockerSandbox) -> None:
    assert [(await sandbox.exec(["sh", "-c", f"exit {code}"])).exit_code for code in (126, 129, 137, 255)] == [
        126,
        129,
        137,
        255,
    ]


async def until_ended(sandbox: Sandbox, job: str) -> None:
    while (await sandbox.poll(job)).exit_code is None:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("supervise", [True, False])
async def test_a_container_that_is_removed_from_outside(supervise: bool, daemon: Daemon) -> None:
    provider = DockerProvider(image="pybox", supervise=supervise)
    async with opened(provider, SandboxSpec()) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        job = await sandbox.start(["sleep", "100"])
        await sandbox.exec(["true"])
        await asyncio.to_thread(daemon.api.remove_container, sandbox.container, force=True)
        for call in (running, sandbox.exec(["true"]), sandbox.read_file("x"), sandbox.write_file("x", b"")):
            with pytest.raises(SandboxDied):
                await call
        with pytest.raises(SandboxDied):
            await sandbox.download("x", Path("/nowhere"))
        with pytest.raises(SandboxDied):
            await until_ended(sandbox, job)
    await provider.close()


LIMIT_S = 60.0


class Wire:
    """A relay to the daemon that can be cut: a daemon that dies."""

    def __init__(self, path: Path) -> None:
        self.path, self._target = path, os.environ["DOCKER_HOST"].removeprefix("unix://")
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        self.path.unlink(missing_ok=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        there, back = await asyncio.open_unix_connection(self._target)
        self._writers.append(back)
        if writer.is_closing():  # it was cut meanwhile
            back.transport.abort()
            return
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pour(reader, back), self._pour(there, writer))

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sockets that the package could not connect
@pytest.mark.parametrize("supervise", [True, False])
async def test_a_daemon_that_dies_is_away(supervise: bool, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.sandboxes.docker.provider.REAP_S", 1.0)
    async with Wire(short / "d.sock") as wire:
        provider = DockerProvider(run="cut", engine_host=f"unix://{wire.path}", image="pybox", supervise=supervise)
        sandbox = await provider.open(SandboxSpec())
        running = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        await sandbox.exec(["true"])
        await wire.cut()
        for call in (running, sandbox.exec(["true"]), provider.open(SandboxSpec())):
            with pytest.raises(SandboxAway):
                await asyncio.wait_for(call, LIMIT_S)
        await asyncio.wait_for(sandbox.close(), LIMIT_S)
        await asyncio.wait_for(provider.close(), LIMIT_S)
    sweeper = DockerProvider(run="cut")
    await sweeper.close()


class BrittleWire(Wire):
    """Dies by itself, once: when the daemon is to fill something."""

    whole = True

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if data.startswith(b"PUT ") and self.whole:
                self.whole = False
                await self.cut()
                return
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_daemon_that_dies_while_it_is_supplied_is_left_nothing(
    daemon: Daemon, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "_volumes", {})  # as in a new process
    async with BrittleWire(short / "d.sock") as wire:
        provider = DockerProvider(run="supplied", engine_host=f"unix://{wire.path}", image="pybox")
        with pytest.raises(SandboxAway):
            await provider.open(SandboxSpec())
        assert not wire.whole
        await wire.__aenter__()
        await (await provider.open(SandboxSpec())).close()
        await provider.close()
    mine = {"label": f"{OWNER}={Owner.me()}"}
    assert daemon.api.containers(all=True, filters=mine) == []


async def test_no_daemon_at_all(tmp_path: Path) -> None:
    provider = make_provider("docker", engine_host=f"unix://{tmp_path}/none.sock", image="pybox")
    with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
        await provider.open(SandboxSpec())
    await provider.close()


async def test_networks_none_bridge_and_the_end_of_the_address_pools(daemon: Daemon) -> None:
    provider = DockerProvider(run="nets", image="busybox")
    interfaces = "ls /sys/class/net"
    async with opened(provider, SandboxSpec()) as sandbox:
        assert await out(sandbox, interfaces) == "lo"
    async with opened(provider, SandboxSpec(network="bridge")) as sandbox:
        assert "eth0" in await out(sandbox, interfaces)
    taken = [f"rollout-test-{number}" for number in range(40)]
    try:
        with contextlib.suppress(APIError):
            for name in taken:
                await asyncio.to_thread(daemon.api.create_network, name)
        with pytest.raises(DockerNetworksExhausted, match="default-address-pools"):
            await provider.open(SandboxSpec(network="bridge"))
    finally:
        for name in taken:
            with contextlib.suppress(APIError):
                await asyncio.to_thread(daemon.api.remove_network, name)
    await provider.close()
    assert daemon.left("nets") == []


async def test_required_limits_hold_the_disk_too(shared: DockerProvider) -> None:
    spec = SandboxSpec(image="busybox", require_limits=True, disk_bytes=8 * 2**20, inodes=400)
    async with opened(shared, spec) as sandbox:
        assert sandbox.limits_enforced.endswith("disk:tmpfs,inodes:tmpfs")
        await sandbox.write_file("a/b", b"x")
        assert await sandbox.read_file("a/b") == b"x"
        for script in ("head -c 20000000 /dev/zero > big", "for i in $(seq 1000); do : > f$i || exit 1; done"):
            for folder in ("/workspace", "/tmp"):
                assert not (await sandbox.exec(["sh", "-c", script], cwd=folder)).ok
                await sandbox.exec(["sh", "-c", "rm -f big f*"], cwd=folder)
        assert not (await sandbox.exec(["touch", "/root/file"])).ok
        await out(sandbox, 'cd "$HOME" && touch file')


async def test_capabilities_say_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    found = await capabilities()
    assert found.reachable
    assert found.version
    assert "runc" in found.runtimes
    assert found.limits == ("memory", "processes", "cpus")
    assert found.supervisor
    absent = await capabilities(f"unix://{tmp_path}/none.sock")
    assert not absent.reachable
    assert "DOCKER_HOST" in absent.advice[0]
    assert not (await capabilities("ssh://x")).reachable


async def test_a_job_stopped_at_any_moment_of_its_start_has_ended(sandbox: DockerSandbox) -> None:
    for number in range(200):
        job = await sandbox.start(["sh", "-c", "sleep 100 & sleep 100 & wait"])
        await asyncio.sleep(number % 7 * 0.0002)
        await sandbox.stop(job)
        assert (await sandbox.poll(job)).exit_code == -9
    async with asyncio.timeout(LIMIT_S):  # what is killed needs a core to end
        while int(await out(sandbox, "ls /proc | grep -c '^[0-9]'")) >= 8:
            await asyncio.sleep(0.05)
