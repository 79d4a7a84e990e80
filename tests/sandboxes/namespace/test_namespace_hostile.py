"""Hostile code in the namespace sandbox. Run: pytest tests/sandboxes/namespace/test_namespace_hostile.py"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rollout_engine.errors import ExecTimeout
from rollout_engine.sandboxes.base import MAX_OUTPUT_BYTES, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox, seccomp
from tests.sandboxes.busy import Heartbeat, cut_off

ATTEMPTS = Path(__file__).with_name("attempts.py")
MIB = 2**20
LIMIT_S = 60.0
HIGH = 2**28
"""Ids of boxes begin here."""
NEEDS_FILTER = {
    "user namespace",
    "clone user namespace",
    "ptrace",
    "keys",
    "type for the user",
    "read memory of another",
}


async def sh(box: NamespaceSandbox, script: str, timeout_s: float = LIMIT_S, user: str | None = None) -> str:
    result = await box.exec(["sh", "-c", script], timeout_s=timeout_s, user=user)
    return (result.stdout + result.stderr).decode(errors="replace")


async def python(box: NamespaceSandbox, code: str, timeout_s: float = LIMIT_S) -> str:
    result = await box.exec(["/usr/bin/python3", "-c", code], timeout_s=timeout_s)
    return (result.stdout + result.stderr).decode(errors="replace")


BOMB = f"""
# of {os.getpid()}
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
"""


class Targets(NamedTuple):
    """What listens on the host for boxes to reach."""

    port: int
    abstract: str


@pytest.fixture
def targets() -> Iterator[Targets]:
    name = f"rollout-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield Targets(tcp.getsockname()[1], name)


@pytest.fixture
async def neighbour(provider: NamespaceProvider) -> AsyncIterator[NamespaceSandbox]:
    """Another's sandbox: must neither notice nor be reached."""
    opened = await provider.open(SandboxSpec())
    await opened.write_file("mine", b"untouched")
    yield opened
    assert (await opened.exec(["cat", "mine"], timeout_s=LIMIT_S)).stdout == b"untouched"
    await opened.close()


def on_host(targets: Targets) -> dict[str, str]:
    """What works for root on the host."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        line = ["/usr/bin/python3", str(ATTEMPTS), directory, str(targets.port), targets.abstract]
        said = subprocess.run(["setsid", *line], capture_output=True, check=True, timeout=120)
    found: dict[str, str] = json.loads(said.stdout)
    return found


class TestAttempts:
    async def test_none_works_that_could_have(self, box: NamespaceSandbox, targets: Targets) -> None:
        await box.write_file("attempts.py", ATTEMPTS.read_bytes())
        line = ["/usr/bin/python3", "attempts.py", "/tmp", str(targets.port), targets.abstract, "inside"]
        result = await box.exec(line, timeout_s=120)
        inside = json.loads(result.stdout)
        worked = {name for name, outcome in inside.items() if outcome == "worked"}
        allowed = set() if seccomp.program() else NEEDS_FILTER
        assert worked <= allowed, inside
        if os.geteuid() == 0:
            outside = on_host(targets)
            assert len(outside) == len(inside)
            could = {name for name, outcome in outside.items() if outcome == "worked"}
            hopeless = set(outside) - could
            assert len(could) >= 20, f"these prove nothing here: {sorted(hopeless)}"
            assert {"write core_pattern", "mount", "make a device", "setuid file", "host port", "ptrace"} <= could

    async def test_the_same_holds_for_a_background_job(self, box: NamespaceSandbox, targets: Targets) -> None:
        await box.write_file("attempts.py", ATTEMPTS.read_bytes())
        job = await box.start(
            ["/usr/bin/python3", "attempts.py", "/tmp", str(targets.port), targets.abstract, "inside"]
        )
        while (status := await box.poll(job)).exit_code is None:
            await asyncio.sleep(0.02)
        allowed = set() if seccomp.program() else NEEDS_FILTER
        assert {name for name, how in json.loads(status.stdout).items() if how == "worked"} <= allowed


class TestIdentity:
    async def test_nobody_in_a_box_is_the_hosts_root(self, provider: NamespaceProvider, kind: str) -> None:
        owners = []
        for number in range(2):
            box = await provider.open(SandboxSpec())
            mark = f"300.{os.getpid()}{number}{time.time_ns() % 10**6}"
            await box.start(["sleep", mark])
            owners.append(_owner_of(mark))
        assert all(owner != 0 for owner in owners)
        if kind == "root":
            assert min(owners) >= HIGH
            assert owners[0] != owners[1]

    async def test_root_in_a_box_has_few_capabilities_and_no_way_to_more(self, box: NamespaceSandbox) -> None:
        status = await sh(box, "grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status")
        fields = dict(line.split(":\t") for line in status.splitlines())
        for name in ("CapPrm", "CapEff", "CapBnd"):
            assert int(fields[name], 16) & ~0b10011111011 == 0
        assert (int(fields["CapInh"], 16), int(fields["CapAmb"], 16)) == (0, 0)
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == ("2" if seccomp.program() else "0")

    async def test_another_user_has_none(self, root_provider: NamespaceProvider) -> None:
        box = await root_provider.open(SandboxSpec())
        assert "CapEff:\t0000000000000000" in await sh(box, "grep CapEff /proc/self/status", user="agent")
        assert await sh(box, "cat /etc/mine; echo x > /etc/mine", user="agent") != ""


class TestSecrets:
    async def test_the_hosts_places_are_not_there(self, box: NamespaceSandbox) -> None:
        assert await sh(box, "ls -A /root /home/agent /opt /srv /mnt /media /var/lib /run /sys") == (
            "/home/agent:\n\n/media:\n\n/mnt:\n\n/opt:\n\n/root:\n\n/run:\n\n/srv:\n\n/sys:\n\n/var/lib:\n"
        )
        assert "No such file" in await sh(box, "cat /etc/shadow")
        for path in (sys.prefix, str(Path(__file__).parent), "/var/run/docker.sock", "/etc/ssh", "/etc/ssl/private"):
            assert "No such file" in await sh(box, f"ls {path}")

    async def test_the_first_process_tells_nothing(self, box: NamespaceSandbox) -> None:
        for name in ("environ", "maps", "mem", "fd", "fdinfo", "exe", "cwd", "root", "stack", "syscall"):
            said = await sh(box, f"ls -l /proc/1/{name}/. /proc/1/{name}; cat /proc/1/{name} | head -c 100")
            assert "denied" in said or "cannot read" in said, (name, said)
        said = await sh(box, "tr '\\0' ' ' < /proc/1/cmdline")
        assert said.strip() == "rollout-box-launcher"

    async def test_a_command_has_three_descriptors_and_no_environment_of_the_hosts(
        self, provider: NamespaceProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_TOKEN", "hidden")
        box = await provider.open(SandboxSpec())
        fds = await python(
            box, "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))"
        )
        assert fds == "['0', '1', '2'] 4\n"  # the fourth is the listing itself
        assert "hidden" not in await sh(box, "env; cat /proc/*/environ 2>/dev/null")

    async def test_reading_a_file_does_not_show_the_first_process(self, box: NamespaceSandbox) -> None:
        await sh(
            box,
            "ln -s /proc/self/environ env; ln -s /proc/self/fd/0 fd; ln -s /proc/1/mem mem; ln -s /proc/self/maps m",
        )
        for path in ("env", "fd", "mem", "m", "/proc/self/environ", "/proc/1/maps"):
            with pytest.raises((PermissionError, FileNotFoundError)):
                await box.read_file(path)
            with pytest.raises((PermissionError, FileNotFoundError)):
                await box.write_file(path, b"x")

    async def test_no_link_leads_an_upload_out(self, box: NamespaceSandbox, tmp_path: Path) -> None:
        outside, source = tmp_path / "outside", tmp_path / "source"
        outside.mkdir(mode=0o777)
        source.mkdir()
        (source / "file").write_bytes(b"x")
        await sh(box, f"ln -s {outside} way; ln -s ../../../../../../..{outside} up")
        for way in ("way", "up"):
            for target in (f"{way}/deep", way):
                with pytest.raises(OSError):  # noqa: PT011 - which one depends on the way
                    await box.upload(source, target)
            with pytest.raises(OSError):  # noqa: PT011
                await box.write_file(f"{way}/file", b"x")
        assert list(outside.iterdir()) == []


class TestSupervisor:
    @pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM", "SEGV", "INT", "CHLD", "USR1"])
    async def test_signals_do_not_reach_it(self, box: NamespaceSandbox, signal: str) -> None:
        await sh(box, f"kill -{signal} 1; kill -{signal} -1")
        assert await sh(box, "echo alive") == "alive\n"

    async def test_it_cannot_be_traced_or_robbed(self, box: NamespaceSandbox) -> None:
        said = await python(
            box,
            "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
            "fd = libc.syscall(434, 1, 0)\n"
            "print(libc.ptrace(16, 1, 0, 0), libc.syscall(438, fd, 0, 0), libc.syscall(310, 1, 0, 0, 0, 0, 0))",
        )
        assert said.split()[:2] == ["-1", "-1"]
        for target in ("fd/3", "oom_score_adj", "mem"):
            assert "worked" not in await sh(box, f"echo > /proc/1/{target} && echo worked")

    async def test_its_memory_score_is_out_of_reach(self, box: NamespaceSandbox) -> None:
        first, own = (await sh(box, "sleep 0.2; cat /proc/1/oom_score_adj /proc/self/oom_score_adj")).split()
        assert int(own) > int(first) or int(own) == 1000

    async def test_odd_requests_do_not_end_it(self, box: NamespaceSandbox) -> None:
        for argv in (["\udcff"], ["/"], [""], ["sh", "\0"], ["/proc/self/mem"]):
            assert (await box.exec(argv)).exit_code in (126, 127)
        with pytest.raises((OSError, ValueError)):
            await box.write_file("/", b"x")
        await sh(box, "rm -rf /etc/passwd; mkfifo /etc/passwd")
        assert (await box.exec(["true"], user="0")).ok
        with pytest.raises(Exception, match="no user"):
            await asyncio.wait_for(box.exec(["true"], user="ghost"), LIMIT_S)
        assert await sh(box, "echo alive") == "alive\n"


class TestNetwork:
    async def test_boxes_do_not_reach_each_other(self, provider: NamespaceProvider, box: NamespaceSandbox) -> None:
        other = await provider.open(SandboxSpec())
        listener = await other.listen()
        code = f"import socket; socket.create_connection(('127.0.0.1', {listener.port}), 2); print('in')"
        assert "ConnectionRefused" in await python(box, code)
        assert await python(other, code) == "in\n"
        await listener.close()
        assert "unreachable" in await python(box, "import socket; socket.create_connection(('1.1.1.1', 53), 2)")

    async def test_the_hosts_network_is_a_choice(self, provider: NamespaceProvider, targets: Targets) -> None:
        box = await provider.open(SandboxSpec(network="host"))
        code = f"import socket; socket.create_connection(('127.0.0.1', {targets.port}), 2); print('in')"
        assert await python(box, code) == "in\n"


class TestBombs:
    async def test_processes(self, provider: NamespaceProvider, neighbour: NamespaceSandbox) -> None:
        box = await provider.open(SandboxSpec(processes=100))
        async with Heartbeat() as heart:
            with pytest.raises(ExecTimeout):
                await box.exec(["/usr/bin/python3", "-c", BOMB], timeout_s=1)
            most = 101 if "processes:cgroup" in box.limits_enforced else 310
            await counted(lambda count: count > 50)
            assert (await neighbour.exec(["true"], timeout_s=LIMIT_S)).ok
            await counted(lambda count: count <= most)  # a look takes its time: it sees one that ends, and its follower
        assert heart.longest < 2
        started = time.monotonic()
        await box.close()
        assert time.monotonic() - started < LIMIT_S

    async def test_memory(self, provider: NamespaceProvider, neighbour: NamespaceSandbox, kind: str) -> None:
        box = await provider.open(SandboxSpec(memory_bytes=96 * MIB))
        result = await box.exec(
            ["/usr/bin/python3", "-c", "x = bytearray(400 << 20); print('held')"], timeout_s=LIMIT_S
        )
        assert not result.ok
        if "memory:cgroup" in box.limits_enforced:
            assert (result.exit_code, result.oom) == (-9, True)
        else:
            assert b"MemoryError" in result.stderr
        assert await sh(box, "echo alive") == "alive\n"
        assert not (await box.exec(["false"])).oom

    async def test_memory_in_many_small_processes(self, root_provider: NamespaceProvider) -> None:
        box = await root_provider.open(SandboxSpec(memory_bytes=96 * MIB))
        if "memory:cgroup" not in box.limits_enforced:
            pytest.skip("no memory control group here")
        code = "import os, time\nfor _ in range(40):\n  if not os.fork():\n    x = bytearray(8 << 20)\n    break\n"
        code += "time.sleep(60)"
        with pytest.raises(ExecTimeout):
            await box.exec(["/usr/bin/python3", "-c", code], timeout_s=2)
        assert await sh(box, "echo alive") == "alive\n"

    async def test_disk(self, provider: NamespaceProvider, neighbour: NamespaceSandbox) -> None:
        box = await provider.open(SandboxSpec(disk_bytes=16 * MIB, memory_bytes=128 * MIB))
        for place in ("/workspace/f", "/tmp/f", "/dev/shm/f", "/var/f"):
            assert "No space left" in await sh(box, f"head -c {32 * MIB} /dev/zero > {place}; rm {place}")
        with pytest.raises(OSError, match="space"):
            await box.write_file("big", b"x" * 32 * MIB)
        assert await sh(box, "rm -f big; echo alive > a; cat a") == "alive\n"

    async def test_empty_files(self, provider: NamespaceProvider, neighbour: NamespaceSandbox) -> None:
        box = await provider.open(SandboxSpec(inodes=2000))
        code = "n = 0\nwhile n < 10**6:\n  open(f'f{n}', 'w').close(); n += 1"
        assert "No space left" in await python(box, code)
        assert int(await sh(box, "ls -f | wc -l")) < 2200

    async def test_endless_output(self, provider: NamespaceProvider, box: NamespaceSandbox) -> None:
        async with Heartbeat() as heart:
            partial = await cut_off(box, ["sh", "-c", "yes & yes >&2"], lambda found: found.truncated)
        assert partial.truncated
        assert len(partial.stdout) <= MAX_OUTPUT_BYTES
        assert heart.longest < 1

    async def test_output_of_what_stays_behind(self, box: NamespaceSandbox) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            assert (await box.exec(["sh", "-c", "sleep 600 & true"], timeout_s=LIMIT_S)).ok
        assert await sh(box, "(yes &) ; echo first") != ""
        assert await sh(box, "echo alive") == "alive\n"
        assert len(os.listdir("/proc/self/fd")) < before + 50

    async def test_ignored_sigterm(self, box: NamespaceSandbox) -> None:
        with pytest.raises(ExecTimeout):
            await box.exec(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], timeout_s=0.3)
        await box.close()

    async def test_cpu(self, root_provider: NamespaceProvider) -> None:
        box = await root_provider.open(SandboxSpec(cpus=0.2))
        if "cpu:cgroup" not in box.limits_enforced:
            pytest.skip("no cpu control group here")
        code = "import time; t = time.time()\nwhile time.process_time() < 0.3: pass\nprint(time.time() - t)"
        assert float(await python(box, code)) > 0.9


def _owner_of(mark: str) -> int:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    line = Path(f"/proc/{name}/cmdline").read_bytes()
                    if mark.encode() in line and line.startswith(b"sleep"):
                        return int(Path(f"/proc/{name}/status").read_text().split("Uid:\t")[1].split("\t")[0])
                except OSError:
                    continue
    raise AssertionError(f"no process with {mark}")


async def counted(right: Callable[[int], bool]) -> None:
    """Until there is the right number of the bomb's processes."""
    async with asyncio.timeout(LIMIT_S):
        while not right(await asyncio.to_thread(running, BOMB)):
            await asyncio.sleep(0.05)


def running(mark: str) -> int:
    """Processes of the whole machine whose command line has `mark`."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += mark.encode() in path.read_bytes()
    return count
