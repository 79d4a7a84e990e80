"""Images as roots of namespace sandboxes: from a daemon, from files, hostile, broken, at once, and too many.

Run: pytest tests/sandboxes/namespace/test_namespace_images.py
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from docker.utils import kwargs_from_env

from rollout_engine.errors import SandboxError, SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.docker.failures import DockerImageMissing
from rollout_engine.sandboxes.docker.owner import OWNER, Owner
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox
from tests import docker_here
from tests.sandboxes.backends import run_as
from tests.sandboxes.namespace.conftest import working
from tests.sandboxes.namespace.test_namespace_layers import busybox_root, open_up

MIB = 2**20
_ROOT = str(Path(__file__).parents[3])


async def sh(box: NamespaceSandbox, script: str, **options: str) -> str:
    result = await box.exec(["sh", "-c", script], **options)  # type: ignore[arg-type]
    return (result.stdout + result.stderr).decode()


async def once(provider: NamespaceProvider, spec: SandboxSpec, script: str) -> str:
    """What a script says in a box of its own."""
    box = await provider.open(spec)
    try:
        return await sh(box, script)
    finally:
        await box.close()


@pytest.fixture
async def images(kind: str, tmp_path: Path) -> AsyncIterator[NamespaceProvider]:
    """A provider with a cache of its own."""
    await (await working(kind)).close()
    provider = NamespaceProvider(run_as=run_as(kind), cache=tmp_path / "cache")
    open_up(tmp_path)
    yield provider
    await provider.close()


@pytest.fixture
def api() -> Iterator[APIClient]:
    if docker_here.missing() is not None:
        pytest.skip(docker_here.missing() or "")
    client = APIClient(**kwargs_from_env())
    yield client
    client.close()


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size, made.mode = len(data), 0o755
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def pack(*entries: tuple[tarfile.TarInfo, bytes], root: Path | None = None) -> bytes:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as tar:
        if root is not None:
            tar.add(root, ".", filter=lambda member: member.replace(uid=0, gid=0, deep=False))
        for made, data in entries:
            tar.addfile(made, io.BytesIO(data))
    return spool.getvalue()


class Layout:
    """An OCI layout in the making."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._layers = directory, []  # type: tuple[Path, list[dict[str, Any]]]
        (directory / "blobs" / "sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.directory / "blobs" / "sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def layer(self, data: bytes, kind: str = "tar") -> Path:
        made = self.blob(gzip.compress(data) if kind == "tar+gzip" else data)
        self._layers.append({"mediaType": f"application/vnd.oci.image.layer.v1.{kind}", **made})
        return self.directory / "blobs" / "sha256" / made["digest"].removeprefix("sha256:")

    def finish(self, **config: Any) -> SandboxSpec:
        settings = self.blob(json.dumps({"config": config, "os": "linux"}).encode())
        manifest = self.blob(json.dumps({"config": settings, "layers": self._layers}).encode())
        (self.directory / "index.json").write_text(json.dumps({"manifests": [manifest]}))
        return SandboxSpec(directory=str(self.directory))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    made.layer(pack(root=busybox_root(tmp_path / "root")))
    return made


def size_of(spec: SandboxSpec) -> int:
    return os.path.getsize(str(spec.tar))


def held(provider: NamespaceProvider) -> list[str]:
    return sorted(path.parent.name for path in provider._sources.cache.directory.glob("*/root"))


def unfinished(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if path.name.startswith(("unpacking", "removing"))]


class TestDaemon:
    pytestmark = pytest.mark.docker

    async def test_an_image_is_exported_once_and_leaves_no_container(
        self, images: NamespaceProvider, api: APIClient
    ) -> None:
        spec = SandboxSpec(image="busybox")
        boxes = await asyncio.gather(*(images.open(spec) for _ in range(4)))
        said = await asyncio.gather(
            *(sh(box, "id -u; ls /bin/busybox; echo x > /etc/mine; cat /etc/mine") for box in boxes)
        )
        assert said == ["0\n/bin/busybox\nx\n"] * 4
        await asyncio.gather(*(box.close() for box in boxes))
        [name] = held(images)
        assert str(api.inspect_image("busybox")["Id"]).removeprefix("sha256:").startswith(name.split(".")[0])
        mine = {"ancestor": "busybox", "label": f"{OWNER}={Owner.me()}"}  # others may use the daemon meanwhile
        assert api.containers(all=True, filters=mine) == []

    async def test_python_runs_in_one_and_setup_is_prepared_on_it(self, images: NamespaceProvider) -> None:
        spec = await images.prepare(SandboxSpec(image="pybox"), Recipe({"a": b"1"}, ("echo 2 > b",)))
        assert (
            await once(images, spec, "cat a b; python3 -c 'print(3)'; cat /etc/debian_version | head -c 2")
            == "12\n3\n12"
        )

    async def test_what_the_image_says_of_environment_and_user_holds(
        self, root_provider: NamespaceProvider, api: APIClient, tmp_path: Path
    ) -> None:
        changes = ["ENV FROM_IMAGE=yes", "USER nobody"]
        api.import_image_from_data(  # type: ignore[attr-defined]
            pack(root=busybox_root(tmp_path / "root")), repository="rollout-test", tag="settings", changes=changes
        )
        (tmp_path / "image.tar").write_bytes(b"".join(api.get_image("rollout-test:settings")))
        provider = NamespaceProvider(cache=tmp_path / "cache")
        try:
            for spec in (SandboxSpec(image="rollout-test:settings"), SandboxSpec(tar=str(tmp_path / "image.tar"))):
                with pytest.raises(SandboxError, match="nobody"):  # the image names one that it does not have
                    await once(provider, spec, "true")
                assert await once(
                    provider, SandboxSpec(**{**plain(spec), "user": "worker"}), "id -u; echo $FROM_IMAGE"
                ) == ("7\nyes\n")
        finally:
            await provider.close()
            api.remove_image("rollout-test:settings", force=True)

    async def test_a_saved_image_is_read_without_the_daemon(
        self, images: NamespaceProvider, api: APIClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "saved.tar").write_bytes(b"".join(api.get_image("busybox")))
        (tmp_path / "saved.tar.gz").write_bytes(gzip.compress((tmp_path / "saved.tar").read_bytes(), 1))
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
        for name in ("saved.tar", "saved.tar.gz"):
            said = await once(images, SandboxSpec(tar=str(tmp_path / name)), "id -u; ls -d /etc/passwd /bin/sh")
            assert said == "0\n/bin/sh\n/etc/passwd\n"
        assert len(held(images)) == 1

    async def test_no_image_and_no_daemon_are_told_apart(
        self, images: NamespaceProvider, api: APIClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(DockerImageMissing, match=r"'no/such:1'.*docker pull"):
            await images.open(SandboxSpec(image="no/such:1"))
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
        with pytest.raises(SandboxUnavailable, match="needs a Docker Engine"):
            await images.open(SandboxSpec(image="busybox"))
        assert held(images) == []


def plain(spec: SandboxSpec) -> dict[str, Any]:
    return {"image": spec.image, "tar": spec.tar, "directory": spec.directory}


class TestLayout:
    async def test_layers_lie_over_each_other(self, images: NamespaceProvider, layout: Layout) -> None:
        keep = [entry("d", type=tarfile.DIRTYPE), entry("d/low", b"1"), entry("d/gone", b"1"), entry("o/low", b"1")]
        layout.layer(
            pack(*keep, entry("f", b"low"), link("l", "f"), entry("x/y", b"1"), entry("h", b"one")), "tar+gzip"
        )
        above = [
            entry("d/.wh.gone"),
            entry("o/new", b"2"),
            entry("o/.wh..wh..opq"),
            entry(".wh.f"),
            entry("l", b"file"),
        ]
        layout.layer(pack(*above, entry("x", b"a file now"), link("h2", "h", tarfile.LNKTYPE), entry(".wh.missing")))
        script = "ls -d /d/* /o/* /f /l /x; cat /l /x /h2; [ -L /l ] || echo plain"
        said = await once(images, layout.finish(Env=["A=1"]), f"{script}; echo $A")
        assert said.splitlines() == [
            "/d/low", "/l", "/o/new", "/x", "filea file nowoneplain", "1", "ls: /f: No such file or directory",
        ]  # fmt: skip

    async def test_a_layout_may_be_a_tar(self, images: NamespaceProvider, layout: Layout, tmp_path: Path) -> None:
        layout.finish()
        with tarfile.open(tmp_path / "layout.tar", "w") as tar:
            tar.add(layout.directory, ".")
        assert await once(images, SandboxSpec(tar=str(tmp_path / "layout.tar")), "id -u") == "0\n"

    @pytest.mark.parametrize("harm", ["bytes", "missing", "config", "index", "zstd", "digest", "platform", "cut"])
    async def test_a_broken_image_is_one_clear_error(
        self, images: NamespaceProvider, layout: Layout, harm: str
    ) -> None:
        blob = layout.layer(pack(entry("f", b"x" * 100)), "tar+zstd" if harm == "zstd" else "tar")
        spec = layout.finish()
        index = layout.directory / "index.json"
        if harm in ("bytes", "cut"):
            data = blob.read_bytes()
            blob.write_bytes(data[:700] + b"y" + data[701:] if harm == "bytes" else data[:-1024])
        elif harm == "missing":
            blob.unlink()
        elif harm in ("index", "digest", "platform"):
            manifest = json.loads(index.read_text())["manifests"][0]
            change = {"digest": "sha256:../../etc"} if harm == "digest" else {"platform": {"architecture": "s390x"}}
            index.write_text("{" if harm == "index" else json.dumps({"manifests": [{**manifest, **change}]}))
        elif harm == "config":
            for path in (layout.directory / "blobs" / "sha256").iterdir():
                if path.read_bytes().startswith(b'{"config": {}'):
                    path.write_bytes(b"{}")
        with pytest.raises(SandboxStartError, match=str(layout.directory)) as caught:
            await images.open(spec)
        assert "\n" not in str(caught.value)
        assert (
            held(images) == unfinished(images._sources.cache.directory) == []
            if images._sources.cache.directory.exists()
            else True
        )

    @pytest.mark.parametrize("size", [0, 100, 10_240 - 512])
    async def test_a_tar_that_was_cut_is_refused(self, images: NamespaceProvider, tmp_path: Path, size: int) -> None:
        """Also where the cut is between two files."""
        whole = pack(*(entry(f"f{number}", b"x" * 512) for number in range(20)))
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(SandboxStartError, match=r"cut|unpack|read"):
            await images.open(SandboxSpec(tar=str(tmp_path / "cut.tar")))
        assert held(images) == []


class TestHostile:
    """Each lands inside of its own root, or ends the unpacking."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        made = tmp_path / "outside"
        made.mkdir(mode=0o777)
        (made / "secret").write_text("of the host")
        made.chmod(0o777)
        return made

    @pytest.mark.parametrize(
        "how", ["dots", "absolute", "link", "hard link", "hard link dots", "whiteout", "whiteout dots", "opaque"]
    )
    async def test_nothing_outside_is_read_written_or_removed(
        self, images: NamespaceProvider, layout: Layout, outside: Path, how: str
    ) -> None:
        up = "../" * 20 + str(outside).lstrip("/")
        layers = {
            "dots": [entry(f"{up}/planted", b"x")],
            "absolute": [entry(f"{outside}/planted", b"x")],
            "link": [link("way", str(outside)), entry("way/planted", b"x")],
            "hard link": [link("stolen", f"{outside}/secret", tarfile.LNKTYPE)],
            "hard link dots": [link("stolen", f"{up}/secret", tarfile.LNKTYPE)],
            "whiteout": [link("way", str(outside)), entry("way/.wh.secret")],
            "whiteout dots": [entry(".wh..."), entry(f"{up}/.wh.secret")],
            "opaque": [link("way", str(outside)), entry("way/.wh..wh..opq")],
        }
        layout.layer(pack(*layers[how]))
        try:
            said = await once(images, layout.finish(), "cat /stolen /way/secret; true")
            assert "of the host" not in said
        except SandboxStartError as error:
            assert "cannot unpack" in str(error)  # noqa: PT017
        assert os.listdir(outside) == ["secret"]
        assert (outside / "secret").stat().st_nlink == 1

    def test_the_same_archives_do_harm_where_nothing_holds_them(self, outside: Path, tmp_path: Path) -> None:
        up = "../" * 20 + str(outside).lstrip("/")
        data = pack(entry(f"{up}/planted", b"x"), link("way", str(outside)), entry("way/too", b"x"))
        (tmp_path / "plain").mkdir()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(tmp_path / "plain", filter="fully_trusted")
        assert sorted(os.listdir(outside)) == ["planted", "secret", "too"]

    async def test_devices_and_setuid_bits_stay_out(self, images: NamespaceProvider, layout: Layout) -> None:
        """Not only of boxes: the tree lies on the host, where a setuid program of root's would work for anybody."""
        disk = {"type": tarfile.BLKTYPE, "devmajor": 254, "devminor": 0}
        shell = entry("setuid", b"x", mode=0o6755)
        layout.layer(pack(entry("disk", **disk), entry("pipe", type=tarfile.FIFOTYPE), shell))
        assert await once(images, layout.finish(), "ls /disk /pipe 2>&1 | grep -c No; ls -l /setuid | cut -c1-10") == (
            "2\n-rwxr-xr-x\n"
        )
        cache = images._sources.cache.directory
        modes = [path.lstat().st_mode for path in cache.rglob("*") if path.is_file() and not path.is_symlink()]
        assert modes
        assert not any(mode & 0o6000 for mode in modes)

    @pytest.mark.parametrize("place", ["proc", "dev", "tmp", "workspace", "sys", "etc", "dev/shm"])
    @pytest.mark.parametrize("target", ["outside", "/proc/1/root", "../../../../../../.."])
    async def test_links_in_the_place_of_what_is_mounted_lead_nowhere(
        self, root_provider: NamespaceProvider, layout: Layout, outside: Path, tmp_path: Path, place: str, target: str
    ) -> None:
        layout.layer(pack(link(place, str(outside) if target == "outside" else target)))
        provider = NamespaceProvider(cache=tmp_path / "cache")
        try:
            box = await provider.open(layout.finish())
            await sh(box, "echo x > planted; echo x > /tmp/planted; echo x > /etc/planted; echo x > /dev/shm/planted")
            assert "of the host" not in await sh(box, f"cat {outside}/secret /etc/secret /tmp/secret /workspace/secret")
            assert "root:" not in (await sh(box, "cat /etc/shadow"))
            await box.close()
        except SandboxError as error:
            assert len(str(error)) < 400  # noqa: PT017
        finally:
            await provider.close()
        assert os.listdir(outside) == ["secret"]
        assert "planted" not in os.listdir("/etc")
        assert "planted" not in os.listdir("/tmp")

    async def test_one_that_is_too_large_or_has_too_many_files_is_refused(
        self, kind: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gzip bomb is stopped by what it becomes, not by what it is."""
        await (await working(kind)).close()
        layout.layer(pack(entry("zeros", bytes(64 * MIB))), "tar+gzip")
        spec = layout.finish()
        open_up(tmp_path)
        provider = NamespaceProvider(run_as=run_as(kind), cache=tmp_path / "small", cache_bytes=48 * MIB)
        with pytest.raises(SandboxStartError, match=r"more than the .* bytes"):
            await provider.open(spec)
        await provider.close()
        monkeypatch.setattr("rollout_engine.sandboxes.namespace.sources.MAX_ROOT_ENTRIES", 5)
        provider = NamespaceProvider(run_as=run_as(kind), cache=tmp_path / "few")
        with pytest.raises(SandboxStartError, match="more than 5 files"):
            await provider.open(spec)
        await provider.close()
        assert unfinished(tmp_path / "few") == unfinished(tmp_path / "small") == []


SLOW_OWNER = """
import asyncio, sys
from pathlib import Path
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider
async def main():
    provider = NamespaceProvider(cache=Path(sys.argv[1]))
    box = await provider.open(SandboxSpec(tar=sys.argv[2]))
    print((await box.exec(["cat", "/mark"])).stdout.decode(), flush=True)
    await box.close()
    await provider.close()
asyncio.run(main())
"""


def start_owner(cache: Path, tar: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", SLOW_OWNER, str(cache), str(tar)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _ROOT})


class TestTogether:
    async def test_two_hosts_unpack_the_same_image_once(self, root_provider: NamespaceProvider, tmp_path: Path) -> None:
        root = pack(
            entry("mark", b"here"),
            *(entry(f"f{n}", b"x" * 2000) for n in range(3000)),
            root=busybox_root(tmp_path / "r"),
        )
        (tmp_path / "root.tar").write_bytes(root)
        owners = [start_owner(tmp_path / "cache", tmp_path / "root.tar") for _ in range(3)]
        seen: set[str] = set()
        while any(owner.poll() is None for owner in owners):
            with_cache = tmp_path / "cache"
            seen |= {path.name for path in with_cache.glob("unpacking.*")} if with_cache.exists() else set()
            await asyncio.sleep(0.005)
        assert [owner.communicate()[0].strip() for owner in owners] == ["here"] * 3
        assert len(seen) <= 1, seen  # none, where it was over before it was looked for
        assert len(list((tmp_path / "cache").glob("*/root"))) == 1
        assert unfinished(tmp_path / "cache") == []

    async def test_a_host_that_is_killed_while_it_unpacks_leaves_nothing_that_is_used(
        self, root_provider: NamespaceProvider, tmp_path: Path
    ) -> None:
        files = (entry(f"f{number}", b"x" * 4000) for number in range(20_000))
        (tmp_path / "root.tar").write_bytes(pack(*files, entry("mark", b"here"), root=busybox_root(tmp_path / "r")))
        cache = tmp_path / "cache"
        owner = start_owner(cache, tmp_path / "root.tar")
        end = time.monotonic() + 120
        while len(list(cache.glob("unpacking.*/root/f*"))) < 50:
            assert time.monotonic() < end
            assert owner.poll() is None
            await asyncio.sleep(0.005)
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
        assert not list(cache.glob("*/about.json"))
        assert len(unfinished(cache)) == 1
        provider = NamespaceProvider(cache=cache)
        assert await once(provider, SandboxSpec(tar=str(tmp_path / "root.tar")), "cat /mark; ls / | grep -c ^f") == (
            "here20000\n"
        )
        await provider.close()
        assert unfinished(cache) == []

    async def test_closing_ends_an_unpacking_under_way(self, root_provider: NamespaceProvider, tmp_path: Path) -> None:
        files = (entry(f"f{number}", b"x" * 4000) for number in range(20_000))
        (tmp_path / "root.tar").write_bytes(pack(*files))
        cache = tmp_path / "cache"
        provider = NamespaceProvider(cache=cache)
        opening = asyncio.create_task(provider.open(SandboxSpec(tar=str(tmp_path / "root.tar"))))
        async with asyncio.timeout(120):
            while len(list(cache.glob("unpacking.*/root/f*"))) < 50:
                await asyncio.sleep(0.005)
        await provider.close()
        with pytest.raises(SandboxStartError, match="closed"):
            await opening
        assert unfinished(cache) == []


class TestBounded:
    @pytest.fixture
    def tars(self, tmp_path: Path) -> list[SandboxSpec]:
        root = busybox_root(tmp_path / "root")
        made = []
        for number in range(4):
            (tmp_path / f"{number}.tar").write_bytes(pack(entry("mark", b"%d" % number), root=root))
            made.append(SandboxSpec(tar=str(tmp_path / f"{number}.tar")))
        return made

    async def test_the_longest_unused_goes_first(self, kind: str, tars: list[SandboxSpec], tmp_path: Path) -> None:
        await (await working(kind)).close()
        open_up(tmp_path)
        size = size_of(tars[0])
        provider = NamespaceProvider(run_as=run_as(kind), cache=tmp_path / "cache", cache_bytes=int(size * 2.7))
        places = []
        for spec in (tars[0], tars[1], tars[0], tars[2]):
            before = set(held(provider)) if (tmp_path / "cache").exists() else set()
            assert await once(provider, spec, "cat /mark") == str(tars.index(spec))
            await let_go(provider)
            places.append(set(held(provider)) - before)
        assert set(held(provider)) == places[0] | places[3]
        assert await once(provider, tars[1], "cat /mark") == "1"  # is made again
        await provider.close()

    async def test_what_is_in_use_is_never_removed(self, kind: str, tars: list[SandboxSpec], tmp_path: Path) -> None:
        """Neither by its own host nor by another's; once it is free the next one makes room."""
        await (await working(kind)).close()
        open_up(tmp_path)
        size = size_of(tars[0])
        first, second = (
            NamespaceProvider(run_as=run_as(kind), cache=tmp_path / "cache", cache_bytes=int(size * 1.5))
            for _ in range(2)
        )
        box = await first.open(tars[0])
        [used] = held(first)
        for provider in (first, second):
            for spec in tars[1:3]:
                assert await once(provider, spec, "cat /mark") == str(tars.index(spec))
        assert await sh(box, "cat /mark; ls /bin/sh") == "0/bin/sh\n"
        assert await once(second, tars[0], "cat /mark") == "0"
        assert used in held(first)
        await box.close()
        await let_go(first)
        await let_go(second)
        assert await once(second, tars[3], "cat /mark") == "3"
        assert used not in held(first)
        assert await once(first, tars[0], "cat /mark") == "0"  # the launcher does not go on with the one that went
        await first.close()
        await second.close()


async def let_go(provider: NamespaceProvider) -> None:
    """Until it holds no root any more."""
    async with asyncio.timeout(60):
        while provider._sources._held:
            await asyncio.sleep(0.02)
