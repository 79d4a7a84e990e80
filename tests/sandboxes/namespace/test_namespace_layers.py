"""Layers of the namespace sandbox. Run: pytest tests/sandboxes/namespace/test_namespace_layers.py"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from rollout_engine.errors import SandboxDied, SandboxStartError, SetupError
from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox


async def sh(box: NamespaceSandbox, script: str, **options: str) -> str:
    result = await box.exec(["sh", "-c", script], **options)  # type: ignore[arg-type]
    return (result.stdout + result.stderr).decode()


def busybox_root(directory: Path) -> Path:
    """A root with one static program, owned by whoever runs the boxes."""
    if not os.path.exists("/bin/busybox"):
        pytest.skip("needs busybox (package busybox-static)")
    (directory / "bin").mkdir(parents=True)
    for name in ("sh", "cat", "ls", "id", "rm", "mkdir", "touch"):
        target = directory / "bin" / name
        target.write_bytes(Path("/bin/busybox").read_bytes())
        target.chmod(0o755)
    (directory / "etc").mkdir()
    (directory / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nworker:x:7:7::/:/bin/sh\n")
    return directory


def open_up(path: Path) -> None:
    """Lets an ordinary user reach a folder of pytest's."""
    for parent in [path, *path.parents]:
        if parent.owner() == "root" and parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)


async def prepared(provider: NamespaceProvider, files: dict[str, bytes], *commands: str) -> str:
    """The layer of a recipe."""
    return (await provider.prepare(SandboxSpec(), Recipe(files, commands))).layers[-1]


class TestPrepared:
    async def test_files_and_commands_are_there_for_every_box(self, provider: NamespaceProvider) -> None:
        layer = await prepared(provider, {"data/in.txt": b"input"}, "mkdir made; echo x > made/y")
        boxes = await asyncio.gather(*(provider.open(SandboxSpec(layers=(layer,))) for _ in range(8)))
        said = await asyncio.gather(
            *(sh(box, "cat data/in.txt made/y; echo $$ > made/y; rm data/in.txt") for box in boxes)
        )
        assert said == ["inputx\n"] * 8
        late = await provider.open(SandboxSpec(layers=(layer,)))
        assert await sh(late, "cat data/in.txt made/y") == "inputx\n"
        await asyncio.gather(*(box.close() for box in [*boxes, late]))

    async def test_the_same_recipe_runs_once(self, provider: NamespaceProvider) -> None:
        command = "head -c 8 /dev/urandom | od -An -tx1 > /id"
        names = await asyncio.gather(*(prepared(provider, {}, command) for _ in range(5)))
        assert len(set(names)) == 1
        first, second = [await provider.open(SandboxSpec(layers=(names[0],))) for _ in range(2)]
        assert await first.read_file("/id") == await second.read_file("/id")

    async def test_a_setup_that_fails_says_so(self, provider: NamespaceProvider) -> None:
        with pytest.raises(SetupError, match="exited with 3: why"):
            await prepared(provider, {}, "echo why; exit 3")

    async def test_a_layer_that_was_dropped_for_newer_ones_is_made_again(self) -> None:
        provider = NamespaceProvider(max_layers=2)
        layers = [await prepared(provider, {"f": bytes([number])}) for number in range(4)]
        for number, layer in enumerate(layers):
            box = await provider.open(SandboxSpec(layers=(layer,)))
            assert await box.read_file("f") == bytes([number])
        await provider.close()

    async def test_prepared_layers_survive_the_launcher(self, provider: NamespaceProvider) -> None:
        layer = await prepared(provider, {"f": b"1"})
        old = await provider.open(SandboxSpec(layers=(layer,)))
        assert provider.launcher_pid is not None
        os.kill(provider.launcher_pid, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await old.exec(["sleep", "100"])
        new = await provider.open(SandboxSpec(layers=(layer,)))
        assert await new.read_file("f") == b"1"


class TestExport:
    async def test_a_workspace_goes_to_its_verifier_as_the_agent_left_it(self, provider: NamespaceProvider) -> None:
        layer = await prepared(provider, {"keep": b"k", "gone": b"g", "d/old": b"o", "e/old": b"o"})
        agent = await provider.open(SandboxSpec(layers=(layer,)))
        await sh(agent, "rm gone; rm -r d; mkdir d; echo new > d/new; echo evil > /etc/evil; ln -s /etc/shadow link")
        verifier = await provider.open(SandboxSpec(layers=(layer, await agent.export(["/workspace"]))))
        assert await sh(verifier, "ls . d e") == ".:\nd\ne\nkeep\nlink\n\nd:\nnew\n\ne:\nold\n"
        assert "No such file" in await sh(verifier, "cat /etc/evil")
        assert await sh(verifier, "echo mine > keep; rm e/old; cat keep") == "mine\n"
        with pytest.raises(SandboxDied):
            await agent.exec(["true"])

    async def test_an_export_can_be_used_again(self, provider: NamespaceProvider) -> None:
        agent = await provider.open(SandboxSpec())
        await agent.write_file("answer", b"42")
        layer = await agent.export(["."])
        for _ in range(3):
            verifier = await provider.open(SandboxSpec(layers=(layer,)))
            assert await verifier.read_file("answer") == b"42"
            await verifier.write_file("answer", b"changed")
            await verifier.close()
        await provider.release(layer)
        with pytest.raises(SandboxStartError, match="gone"):
            await provider.open(SandboxSpec(layers=(layer,)))

    async def test_everything_can_go(self, provider: NamespaceProvider) -> None:
        agent = await provider.open(SandboxSpec())
        await sh(agent, "echo x > /etc/mine; echo y > /opt/mine; rm /etc/hosts")
        verifier = await provider.open(SandboxSpec(layers=(await agent.export(["*"]),)))
        assert await sh(verifier, "cat /etc/mine /opt/mine; ls /etc/hosts 2>&1 | grep -c cannot") == "x\ny\n1\n"

    @pytest.mark.parametrize("path", ["out", "deep/etc", "way/etc", "missing", "../../../../tmp/no"])
    async def test_no_link_leads_an_export_elsewhere(self, provider: NamespaceProvider, path: str) -> None:
        """What comes is the link itself, and it leads nowhere but into the new box."""
        agent = await provider.open(SandboxSpec())
        await sh(agent, "ln -s /etc out; ln -s /proc/1/root deep; ln -s / way; echo mine > /etc/mine")
        verifier = await provider.open(SandboxSpec(layers=(await agent.export([path]),)))
        assert await sh(verifier, "ls /etc/mine /workspace/*/mine 2>/dev/null; find /workspace -type f | head -1") == ""
        await verifier.close()

    async def test_a_daemon_writes_nothing_after_the_export(self, provider: NamespaceProvider) -> None:
        agent = await provider.open(SandboxSpec())
        await agent.exec(["sh", "-c", "setsid sh -c 'while :; do date +%N > reward; done' >/dev/null 2>&1 &"])
        async with asyncio.timeout(60):
            while not (await agent.exec(["test", "-s", "reward"])).ok:
                await asyncio.sleep(0.01)
        verifier = await provider.open(SandboxSpec(layers=(await agent.export(["."]),)))
        first = await verifier.read_file("reward")
        await asyncio.sleep(0.05)
        assert await verifier.read_file("reward") == first


class TestRoots:
    async def test_a_directory_as_root(self, provider: NamespaceProvider, kind: str, tmp_path: Path) -> None:
        root = busybox_root(tmp_path / "root")
        open_up(tmp_path)
        if kind == "user" and os.geteuid() == 0:
            for path in [root, *root.rglob("*")]:
                os.chown(path, 61_234, 61_234)
        box = await provider.open(SandboxSpec(directory=str(root)))
        assert await sh(box, "ls -a / | cat") == ".\n..\nbin\ndev\netc\nproc\nworkspace\n"
        assert (await sh(box, "id -u; touch /bin/new && rm -rf /etc && mkdir /etc && ls /etc")) == "0\n"
        await box.close()
        assert (root / "etc" / "passwd").exists()
        assert not (root / "bin" / "new").exists()

    async def test_another_user_of_the_roots_own(self, root_provider: NamespaceProvider, tmp_path: Path) -> None:
        box = await root_provider.open(SandboxSpec(directory=str(busybox_root(tmp_path / "root")), user="worker"))
        assert await sh(box, "id -u; id -g") == "7\n7\n"

    async def test_a_tar_is_unpacked_once(self, root_provider: NamespaceProvider, tmp_path: Path) -> None:
        root = busybox_root(tmp_path / "root")
        with tarfile.open(tmp_path / "root.tar.gz", "w:gz") as archive:
            archive.add(root, ".", filter=lambda member: member.replace(uid=0, gid=0, deep=False))
            entry = tarfile.TarInfo("home/worker")
            entry.type, entry.uid, entry.gid, entry.mode = tarfile.DIRTYPE, 7, 7, 0o755
            archive.addfile(entry)
        provider = NamespaceProvider(cache=tmp_path / "cache")
        spec = SandboxSpec(tar=str(tmp_path / "root.tar.gz"))
        boxes = await asyncio.gather(*(provider.open(spec) for _ in range(3)))
        assert await sh(boxes[0], "id -u; touch /home/worker/x && ls /home/worker", user="worker") == "7\nx\n"
        assert len(list((tmp_path / "cache").glob("*/root"))) == 1
        await provider.close()

    async def test_no_name_in_a_tar_leads_out(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        with tarfile.open(tmp_path / "evil.tar", "w") as archive:
            link = tarfile.TarInfo("way")
            link.type, link.linkname = tarfile.SYMTYPE, str(outside)
            archive.addfile(link)
            for name in ("way/a", f"../../../../../../../../..{outside}/b", f"{outside}/c"):
                entry = tarfile.TarInfo(name)
                entry.size = 1
                archive.addfile(entry, io.BytesIO(b"x"))
        provider = NamespaceProvider(cache=tmp_path / "cache")
        with pytest.raises(SandboxStartError):
            await provider.open(SandboxSpec(tar=str(tmp_path / "evil.tar")))
        await provider.close()
        assert list(outside.iterdir()) == []
        assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith("unpacking")] == []

    async def test_a_root_that_is_not_there(self, provider: NamespaceProvider) -> None:
        for spec in (
            SandboxSpec(directory="/no/such"),
            SandboxSpec(tar="/no/such"),
            SandboxSpec(tar="a", directory="b"),
        ):
            with pytest.raises(SandboxStartError):
                await provider.open(spec)


class TestBeyond:
    async def test_users(self, root_provider: NamespaceProvider) -> None:
        box = await root_provider.open(SandboxSpec(user="agent"))
        assert await sh(box, "id -un; cd; pwd; touch x") == "agent\n/home/agent\n"
        assert await sh(box, "id -u; id -g; id -G", user="33:7") == "33\n7\n7\n"
        assert await sh(box, "touch /made && stat -c %U /made", user="root") == "root\n"
        await box.write_file("deep/file", b"x")
        assert await sh(box, "stat -c %U deep deep/file") == "agent\nagent\n"
        with pytest.raises(PermissionError):
            await box.write_file("/etc/passwd", b"x")
        with pytest.raises(PermissionError):
            await box.read_file("/root/x")

    @pytest.mark.parametrize("mode", ["ranges", "shared", "plain"])
    async def test_every_mode_of_root(self, root_provider: NamespaceProvider, mode: str) -> None:
        provider = NamespaceProvider(mode=mode)
        layer = await prepared(provider, {"f": b"1", "d/g": b"2"}, "chown 7 f")
        box = await provider.open(SandboxSpec(layers=(layer,)))
        assert await sh(box, "stat -c %u f; rm -r d; mkdir d; ls d; id -u") == "7\n0\n"
        assert (await provider.facts())["mode"] == mode
        await provider.close()

    @pytest.mark.parametrize("mode", ["ranges", "plain"])
    async def test_the_way_of_older_kernels(self, root_provider: NamespaceProvider, mode: str) -> None:
        provider = NamespaceProvider(mode=mode, pretend_old_kernel=True, max_layers=4)
        for number in range(6):
            layer = await prepared(provider, {"f": b"1", "d/g": bytes([number])})
            agent = await provider.open(SandboxSpec(layers=(layer,)))
            await sh(agent, "echo 2 > f; ls / /usr > /dev/null")
            exported = await agent.export(["."])
            verifiers = [await provider.open(SandboxSpec(layers=(layer, exported))) for _ in range(3)]
            assert await verifiers[2].read_file("f") == b"2\n"
            assert await verifiers[0].read_file("d/g") == bytes([number])
            await asyncio.gather(*(box.close() for box in verifiers))
        assert await (await provider.open(SandboxSpec(layers=(layer,)))).read_file("f") == b"1"
        await provider.close()

    async def test_limits_that_cannot_be_held_are_refused_on_demand(self, kind: str) -> None:
        if kind == "root" and os.geteuid():
            pytest.skip("needs root")
        provider = NamespaceProvider(control_groups=False)
        with pytest.raises(SandboxStartError, match="cpu, memory, pids"):
            await provider.open(SandboxSpec(require_limits=True))
        box = await provider.open(SandboxSpec())
        assert box.limits_enforced == "memory:rlimit_data,processes:pid_max,disk:tmpfs,inodes:tmpfs"
        await provider.close()
