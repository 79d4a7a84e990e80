"""Parts of the namespace sandbox by themselves. Run: pytest tests/sandboxes/namespace/test_namespace_parts.py"""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_engine.sandboxes.namespace import capabilities, isolated
from rollout_engine.sandboxes.namespace.command import Tail
from rollout_engine.sandboxes.namespace.helper import archive, groups, limits, wire
from rollout_engine.sandboxes.namespace.process import LAUNCHER

HEAD = struct.Struct("<BIHQ")


def entry(kind: int, name: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    return HEAD.pack(kind, 0o4777, len(name), len(data) if size is None else size) + name + data


class TestArchive:
    def test_a_tree_arrives_as_it_was(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "deep" / "file").write_bytes(b"x" * 3_000_000)
        (source / "deep" / "run").write_bytes(b"#!")
        (source / "deep" / "run").chmod(0o755)
        (source / "link").symlink_to("deep/file")
        stream = io.BytesIO()
        archive.write(stream, str(source), 2**40, 1000, links=True)
        stream.seek(0)
        archive.read(stream, str(tmp_path / "copy"), 2**40, 1000, links=True)
        assert (tmp_path / "copy" / "link").read_bytes() == b"x" * 3_000_000
        assert (tmp_path / "copy" / "deep" / "run").stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "copy" / "deep" / "er").is_dir()

    @pytest.mark.parametrize(
        "stream",
        [
            entry(2, b"../out", b"x"),
            entry(2, b"/out", b"x"),
            entry(2, b"a//b", b"x"),
            entry(2, b"nul\0", b"x"),
            entry(2, b".", b"x"),
            entry(3, b"link", b"/etc"),
            entry(9, b"odd"),
            entry(2, b"short", b"x", size=50),
            entry(2, b"huge", b"", size=2**63),
            b"garbage",
        ],
    )
    def test_a_hostile_stream_makes_nothing_outside(self, tmp_path: Path, stream: bytes) -> None:
        target = tmp_path / "in" / "target"
        target.mkdir(parents=True)
        with pytest.raises((OSError, archive.TooMuch)):
            archive.read(io.BytesIO(stream + entry(0, b"")), str(target), 1000, 1000, links=False)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        assert not any(path.is_symlink() for path in target.iterdir())

    def test_no_setuid_bit_arrives(self, tmp_path: Path) -> None:
        archive.read(io.BytesIO(entry(2, b"file", b"x") + entry(0, b"")), str(tmp_path), 1000, 1000, links=False)
        assert (tmp_path / "file").stat().st_mode & 0o7000 == 0

    def test_a_link_in_the_way_is_replaced_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "t").mkdir()
        (tmp_path / "secret").write_bytes(b"kept")
        (tmp_path / "t" / "file").symlink_to(tmp_path / "secret")
        archive.read(io.BytesIO(entry(2, b"file", b"x") + entry(0, b"")), str(tmp_path / "t"), 1000, 1000, links=False)
        assert (tmp_path / "secret").read_bytes() == b"kept"


class TestWire:
    @pytest.mark.parametrize("size", [0, 1000, wire.MAX_PACKET, 3_000_000])
    def test_messages_of_any_size(self, size: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            wire.send(ours, {"a": ["ü", "\udcff"]}, b"x" * size, (ours.fileno(),))
            message = wire.receive(theirs)
            assert (message.header, message.blob) == ({"a": ["ü", "\udcff"]}, b"x" * size)
            assert [os.get_inheritable(fd) for fd in message.fds] == [False]
            message.drop()

    @pytest.mark.parametrize(
        "data", [b"\0", b"\0\0\0\0\0", b"\x01\5\0\0\0", b"\0\2\0\0\0[]", b"\0\4\0\0\0\xff\xff\xff\xff"]
    )
    def test_nonsense_is_refused(self, data: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.send(data)
            with pytest.raises(wire.BadMessage):
                wire.receive(theirs)


class TestLimits:
    def test_version_2_is_preferred_where_it_has_controllers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tree of files stands in for the kernel's: this shows the choice, not the holding."""
        own = tmp_path / "user.slice" / "session"
        own.mkdir(parents=True)
        for path, handed in ((own, ""), (own.parent, "memory pids cpu")):
            (path / "cgroup.controllers").write_text("cpu memory pids")
            (path / "cgroup.subtree_control").write_text(handed)
        (own / "cgroup.subtree_control").chmod(0o444)
        monkeypatch.setattr(limits, "_mounts", lambda: {"cgroup2": str(tmp_path)})
        monkeypatch.setattr(limits, "_own_groups", lambda: {"cgroup2": "/user.slice/session"})

        def write(path: str, text: str) -> None:
            if path == str(own / "cgroup.subtree_control"):
                raise OSError(16, "a group with processes hands nothing down")
            Path(path).write_text(text)

        monkeypatch.setattr(limits, "write", write)
        found = limits.find_controllers()
        assert found == [limits.Controller(name, 2, str(own.parent)) for name in ("memory", "pids", "cpu")]
        monkeypatch.setattr(groups, "write", write)
        made = groups.Groups(found)
        monkeypatch.setattr(groups, "_open_entry", lambda path: os.open(path, os.O_CREAT | os.O_WRONLY))
        paths = made.take("7", limits.Limits(2**26, 0.5, 64, 2**20, 100)).paths
        assert paths == [f"{own.parent}/{made.owner}/7"]
        assert Path(paths[0], "memory.max").read_text() == str(2**26)
        assert Path(paths[0], "cpu.max").read_text() == "50000 100000"
        assert Path(paths[0], "pids.max").read_text() == "65"

    def test_groups_of_a_real_version_2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With whatever controller v2 has here; those of memory and the like are often v1's on the same machine."""
        root = limits._mounts().get("cgroup2")
        offered = Path(root, "cgroup.controllers").read_text().split() if root and os.access(root, os.W_OK) else []
        if not offered:
            pytest.skip("needs a writable cgroup v2 with a controller")
        before = Path(str(root), "cgroup.subtree_control").read_text().split()
        controller = limits._find_v2(offered[0], limits._mounts(), limits._own_groups())
        assert controller is not None
        monkeypatch.setattr(groups, "_settings", lambda *_: [])
        held = groups.Groups([controller])
        try:
            assert held.controllers == [controller]
            group = held.take("1", limits.Limits(2**26, 1.0, 64, 2**20, 100))
            [path] = group.paths
            assert offered[0] in Path(path, "cgroup.controllers").read_text().split()
            with subprocess.Popen(["sleep", "100"]) as inside:
                limits.write(f"{path}/cgroup.procs", str(inside.pid))
                assert f"0::{path.removeprefix(str(root))}\n" in Path(f"/proc/{inside.pid}/cgroup").read_text()
                held.give_back(group, spoiled=True)
                assert held.sweep()
                inside.kill()
            assert not held.sweep()
        finally:
            held.close()
            for name in {offered[0]} - set(before):
                limits.write(f"{root}/cgroup.subtree_control", f"-{name}")
        assert not Path(controller.root, held.owner).exists()

    def test_an_owner_is_told_from_one_with_the_same_number(self) -> None:
        name = limits.owner_name()
        assert limits.owner_alive(name)
        prefix, boot, pid, start = name.split(".")
        for other in (f"{prefix}.{boot}.{pid}.{int(start) + 1}", f"{prefix}.00000000.{pid}.{start}", f"{prefix}.x"):
            assert not limits.owner_alive(other)


def test_a_tail_keeps_the_end() -> None:
    tail = Tail(cap=10)
    for chunk in (b"abc", b"defgh", b"ij"):
        tail.add(chunk)
    assert (tail.bytes(), tail.truncated) == (b"abcdefghij", False)
    tail.add(b"k")
    assert (tail.bytes(), tail.truncated) == (b"bcdefghijk", True)


def test_the_launcher_needs_nothing_but_the_standard_library() -> None:
    """Its memory is that of every box: the engine, an HTTP client or numpy in it would be paid a thousand times."""
    line = isolated.command(LAUNCHER, 0)
    line[-1] = line[-1].replace("main(*(0,))", "print(*sys.modules)")
    said = subprocess.run(line, capture_output=True, check=True, text=True, env={})
    names = {name.split(".")[0] for name in said.stdout.split()}
    ours = [name for name in said.stdout.split() if name.startswith("rollout_engine.")]
    assert all(name.startswith("rollout_engine.sandboxes.namespace") or name in isolated.STAND_INS for name in ours)
    assert "rollout_engine.sandboxes.namespace.provider" not in ours
    assert names <= set(sys.stdlib_module_names) | {"rollout_engine", "__main__"}
    assert not names & {
        "asyncio",
        "multiprocessing",
        "http",
        "ssl",
        "logging",
        "urllib",
        "email",
        "tarfile",
        "subprocess",
        "threading",
    }


async def test_capabilities_say_what_works_and_what_to_do() -> None:
    found = await capabilities()
    assert found[0].name == "namespace sandboxes"
    assert all(capability.fix for capability in found if not capability.works)
    assert {"limits", "system call filter"} <= {capability.name for capability in found} or not found[0].works
    if os.geteuid() == 0 and os.environ.get("ROLLOUT_REQUIRE") == "1":
        assert found[0].works
