"""What an agent may try in a docker sandbox: attempts that would work where nothing forbids them, and do no harm.

python -m pytest tests/sandboxes/docker/test_docker_hostile.py
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path

import pytest

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider, DockerSandbox
from tests.sandboxes.busy import Heartbeat, cut_off

pytestmark = pytest.mark.docker

ATTEMPTS = r"""
import ctypes, json, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(name, *arguments):
    ctypes.set_errno(0)
    done = getattr(libc, name)(*arguments)
    return 0 if done >= 0 else ctypes.get_errno()
def opens(path, flags):
    try: os.close(os.open(path, flags))
    except OSError as error: return error.errno
    return 0
def reads(path):
    try: return 0 if open(path, "rb").read(10) else -1
    except OSError as error: return error.errno
def forked(attempt):
    child = os.fork()
    if child == 0: os._exit(attempt())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
PTRACE_ATTACH, KEY_SPEC_SESSION, CLONE_NEWUSER, CLONE_NEWNS, ADD_KEY, BPF = 16, -3, 0x10000000, 0x20000, 248, 321
print(json.dumps({
    "core_pattern": opens("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "sysrq": opens("/proc/sysrq-trigger", os.O_WRONLY),
    "drop_caches": opens("/proc/sys/vm/drop_caches", os.O_WRONLY),
    "release_agent": opens("/sys/fs/cgroup/memory/notify_on_release", os.O_WRONLY),
    "kcore": reads("/proc/kcore"), "keys": reads("/proc/keys"),
    "mount": forked(lambda: call("mount", b"x", b"/mnt", b"tmpfs", 0, None)),
    "mknod": call("mknod", b"/tmp/disk", 0o60600, os.makedev(254, 0)),
    "kmsg": opens("/dev/kmsg", os.O_RDONLY), "mem": opens("/dev/mem", os.O_RDONLY),
    "user_namespace": forked(lambda: call("unshare", CLONE_NEWUSER)),
    "mount_namespace": forked(lambda: call("unshare", CLONE_NEWNS)),
    "add_key": call("syscall", ADD_KEY, b"user", b"x", b"y", 1, KEY_SPEC_SESSION),
    "bpf": call("syscall", BPF, 0, None, 0),
    "ptrace": forked(lambda: call("ptrace", PTRACE_ATTACH, 1, None, None)),
    "raw_socket": forked(lambda: call("socket", socket.AF_PACKET, socket.SOCK_RAW, 3)),
    "supervisor_output": opens("/proc/1/fd/1", os.O_WRONLY),
    "supervisor_memory": opens("/proc/1/mem", os.O_RDWR),
    "supervisor_environment": reads("/proc/1/environ"),
    "supervisor_program": opens("/.rollout-engine/supervisor", os.O_WRONLY),
    "docker_socket": [path for path in ("/var/run/docker.sock", "/run/docker.sock") if os.path.exists(path)],
    "interfaces": os.listdir("/sys/class/net"),
}))
"""
BOMB = r"""
import os
while True:
    try: os.fork()
    except OSError: pass
"""
COMET = r"""
import os, signal
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: continue
    os.setsid()
    try: os.kill(-1, signal.SIGCONT)
    except OSError: pass
"""
"""Never where it was seen, and wakes whoever was stopped."""
LIMIT_S = 120.0
HARMLESS = {"docker_socket": [], "interfaces": ["lo"]}


async def attempts(sandbox: DockerSandbox, user: str | None = None) -> dict[str, object]:
    result = await sandbox.exec(["python3", "-c", ATTEMPTS], user=user, timeout_s=LIMIT_S)
    assert result.ok, result
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("user", [None, "nobody"])
async def test_no_door_to_the_host_opens(sandbox: DockerSandbox, user: str | None) -> None:
    found = await attempts(sandbox, user)
    opened = {name: value for name, value in found.items() if value == 0}
    assert opened == {}
    assert {name: found[name] for name in HARMLESS} == HARMLESS


async def test_a_setuid_file_gives_nothing(sandbox: DockerSandbox) -> None:
    await sandbox.exec(["sh", "-c", "cp /bin/cat /tmp && chmod 4755 /tmp/cat; echo s > /root/s; chmod 600 /root/s"])
    assert (await sandbox.exec(["/tmp/cat", "/root/s"])).ok
    assert (await sandbox.exec(["stat", "-c", "%a", "/tmp/cat"])).stdout == b"4755\n"
    assert not (await sandbox.exec(["/tmp/cat", "/root/s"], user="nobody")).ok


async def test_the_hosts_ports_and_sockets_are_out_of_reach(sandbox: DockerSandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0rollout-test-{os.getpid()}")
        abstract.listen()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        script = (
            "import socket, sys\n"
            "port, name = int(sys.argv[1]), '\\0' + sys.argv[2]\n"
            "for family, to in ((socket.AF_INET, ('127.0.0.1', port)), (socket.AF_UNIX, name)):\n"
            "    try: socket.socket(family).connect(to); print('reached', to)\n"
            "    except OSError as error: print('no', error.errno)\n"
        )
        result = await sandbox.exec(["python3", "-c", script, str(port), f"rollout-test-{os.getpid()}"])
    assert result.stdout.count(b"no ") == 2, result


async def test_links_lead_nowhere_on_the_host(sandbox: DockerSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    await sandbox.exec(["sh", "-c", f"ln -s {tmp_path} out; ln -s {tmp_path}/secret file; ln -s /proc/1/root root"])
    for path in ("file", "out/secret", f"root{tmp_path}/secret", f"../../../../..{tmp_path}/secret"):
        with pytest.raises((FileNotFoundError, PermissionError)):
            await sandbox.read_file(path)
    (tmp_path / "upload").write_text("x")
    await sandbox.exec(["mkdir", "-p", str(tmp_path)])
    await sandbox.upload(tmp_path / "upload", "out/planted")
    await sandbox.write_file("out/written", b"x")
    assert sorted(os.listdir(tmp_path)) == ["secret", "upload"]
    assert await sandbox.read_file(f"{tmp_path}/planted") == b"x"


async def test_killing_everything_leaves_the_sandbox_alive(sandbox: DockerSandbox) -> None:
    job = await sandbox.start(["sleep", "100"])
    await sandbox.exec(["sh", "-c", "kill -9 1; kill -STOP 1; kill -9 -1"])
    assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"
    assert (await sandbox.poll(job)).exit_code == -9


async def test_an_image_in_ruins_still_serves_the_engine(sandbox: DockerSandbox) -> None:
    poison = "echo /tmp/x.so > /etc/ld.so.preload; rm -f /etc/passwd; mkfifo /etc/passwd; echo kept > /workspace/kept"
    await sandbox.exec(["sh", "-c", poison])
    await sandbox.exec(["rm", "-rf", "/bin", "/usr", "/lib", "/lib64"])
    assert await sandbox.read_file("kept", max_bytes=100) == b"kept\n"


async def test_the_supervisor_program_and_its_mount_stay(sandbox: DockerSandbox) -> None:
    for order in ("rm -f /.rollout-engine/supervisor", "mv /.rollout-engine /gone", "umount /.rollout-engine"):
        assert not (await sandbox.exec(["sh", "-c", order])).ok


async def test_a_fork_bomb_stays_within_its_sandbox(sandbox: DockerSandbox, shared: DockerProvider) -> None:
    neighbour = await shared.open(SandboxSpec())
    await sandbox.write_file("kept", b"x")
    bomb = await sandbox.start(["python3", "-c", BOMB])
    async with asyncio.timeout(LIMIT_S):
        while (await sandbox.exec(["true"])).exit_code != 126:
            await asyncio.sleep(0.05)
        assert await sandbox.read_file("kept") == b"x"
        assert (await neighbour.exec(["true"])).ok
        await sandbox.stop(bomb)
    started = time.monotonic()
    await sandbox.close()
    assert time.monotonic() - started < 60
    await neighbour.close()


async def test_those_who_flee_and_wake_each_other_do_not_survive_a_quiesce(sandbox: DockerSandbox) -> None:
    kept = await sandbox.start(["sh", "-c", "sleep 100 & wait"])
    await asyncio.gather(*(sandbox.exec(["python3", "-c", COMET]) for _ in range(5)))
    await sandbox.quiesce([kept])
    names = (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout.split()
    assert (names.count(b"python3"), names.count(b"sleep")) == (0, 1)
    assert (await sandbox.poll(kept)).exit_code is None


async def test_a_memory_hog_is_named_and_its_neighbour_untouched(
    sandbox: DockerSandbox, shared: DockerProvider
) -> None:
    neighbour = await shared.open(SandboxSpec())
    hog, other = await asyncio.gather(sandbox.exec(["tail", "/dev/zero"], timeout_s=LIMIT_S), neighbour.exec(["true"]))
    assert (hog.exit_code, hog.oom, other.ok) == (-9, True, True)
    filler = await sandbox.exec(["sh", "-c", "head -c 1000000000 /dev/zero > /dev/shm/fill"], timeout_s=LIMIT_S)
    assert not filler.ok
    assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"
    await neighbour.close()


async def test_endless_output_and_ignored_signals_end_at_the_limit(sandbox: DockerSandbox) -> None:
    script = "trap '' TERM INT HUP; while :; do head -c 1000000 /dev/zero; done"
    async with Heartbeat() as heart:
        partial = await cut_off(sandbox, ["sh", "-c", script], lambda found: found.truncated)
    assert partial.truncated
    assert heart.longest < 0.5


async def test_messages_of_the_supervisor_cannot_be_faked_by_output(sandbox: DockerSandbox) -> None:
    """Output that looks like the supervisor's own messages stays output."""
    fake = (5 + 9).to_bytes(4, "little") + b"\x03" + (1).to_bytes(4, "little") + b"\0" * 9
    result = await sandbox.exec(["cat"], stdin=fake * 3)
    assert (result.stdout, result.exit_code) == (fake * 3, 0)


async def test_sandboxes_do_not_reach_each_other(shared: DockerProvider) -> None:
    """Neither without a network, nor by the ones that a task asks for: each has its own."""
    serve = "import socket, time; s = socket.create_server(('0.0.0.0', 7777)); print('up', flush=True); time.sleep(100)"
    where = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    where += "s.connect(('192.0.2.1', 9)); print(s.getsockname()[0])"
    first, second = [await shared.open(SandboxSpec(network="bridge")) for _ in range(2)]
    job = await first.start(["python3", "-c", serve])
    async with asyncio.timeout(LIMIT_S):
        while b"up" not in (await first.poll(job)).stdout:
            await asyncio.sleep(0.02)
    address = (await first.exec(["python3", "-c", where])).stdout.decode().strip()
    call = f"import socket; socket.create_connection(('{address}', 7777), 5); print('in')"
    assert (await first.exec(["python3", "-c", call])).stdout == b"in\n"
    assert b"in" not in (await second.exec(["python3", "-c", call], timeout_s=LIMIT_S)).stdout
    lonely = await shared.open(SandboxSpec())
    assert b"in" not in (await lonely.exec(["python3", "-c", call], timeout_s=LIMIT_S)).stdout
    for sandbox in (first, second, lonely):
        await sandbox.close()


async def test_the_first_process_tells_nothing(sandbox: DockerSandbox) -> None:
    for name in ("environ", "maps", "mem", "fd/0", "exe", "root/etc", "stack"):
        looked = await sandbox.exec(["sh", "-c", f"cat /proc/1/{name} || ls /proc/1/{name}/"])
        assert (looked.exit_code != 0, looked.stdout) == (True, b""), name


async def test_a_limited_disk_holds_bytes_and_files(shared: DockerProvider) -> None:
    spec = SandboxSpec(memory_bytes=256 * 2**20, disk_bytes=16 * 2**20, inodes=500, require_limits=True)
    sandbox = await shared.open(spec)
    files = "n = 0\nwhile n < 10**6:\n  open(f'f{n}', 'w').close(); n += 1"
    assert b"No space left" in (await sandbox.exec(["python3", "-c", files])).stderr
    assert int((await sandbox.exec(["sh", "-c", "ls -f | wc -l"])).stdout) <= 500
    for place in ("/tmp/f", "/dev/shm/f"):
        assert b"No space left" in (await sandbox.exec(["sh", "-c", f"head -c 300000000 /dev/zero > {place}"])).stderr
    for place in ("/root/f", "/etc/f", "/var/f"):
        assert b"Read-only" in (await sandbox.exec(["sh", "-c", f"echo x > {place}"])).stderr
    await sandbox.close()
