"""What every sandbox's network and mounts must do: a listener of its own, and directories of the node.

One test: .venv/bin/pytest tests/contracts/test_network.py -k listener
"""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from rollout_engine.errors import SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tests.contracts.conftest import Backend

CLIENT = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
s.sendall(b"hello")
print(s.recv(9).decode(), end="")
"""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(5) + b", 42")
    await writer.drain()
    writer.close()


async def test_the_host_answers_on_a_listener_of_the_sandbox(sandbox: Sandbox) -> None:
    listener = await sandbox.listen()
    start = asyncio.start_unix_server if listener.sock.family == socket.AF_UNIX else asyncio.start_server
    async with await start(_answer, sock=listener.sock):
        done = await sandbox.exec(["python3", "-c", CLIENT, str(listener.port)], timeout_s=120)
    await listener.close()
    assert done.stdout == b"hello, 42", done


async def test_two_sandboxes_listen_at_one_port(provider: SandboxProvider, sandbox: Sandbox, backend: Backend) -> None:
    """The second is refused only where they share their host's network."""
    other = await provider.open(SandboxSpec())
    first = await sandbox.listen()
    try:
        if backend.isolated:
            await (await other.listen(first.port)).close()
        with pytest.raises(OSError, match=r"in use") as taken:
            await sandbox.listen(first.port)
        assert taken.value.errno == errno.EADDRINUSE
    finally:
        await first.close()
        await first.close()
        await other.close()


async def test_a_mounted_directory_is_seen_and_what_is_done_to_it_stays_inside(
    provider: SandboxProvider, backend: Backend, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "run").write_text("#!/bin/sh\necho mounted\n")
    (programs / "run").chmod(0o755)
    for directory in (programs, *programs.parents[:3]):
        directory.chmod(0o755)
    spec = SandboxSpec(mounts=((str(programs), "/opt/deep/programs"),))
    if not backend.isolated:
        with pytest.raises(SandboxUnavailable, match="mounts nothing"):
            await provider.open(spec)
        return
    sandbox = await provider.open(spec)
    try:
        assert (await sandbox.exec(["/opt/deep/programs/run"])).stdout == b"mounted\n"
        await sandbox.exec(["sh", "-c", "rm /opt/deep/programs/run; echo x > /opt/deep/programs/new"])
    finally:
        await sandbox.close()
    assert sorted(path.name for path in programs.iterdir()) == ["run"]


@pytest.mark.parametrize("mount", [("/no/such/directory", "/opt/x"), ("/usr", "opt/x"), ("/usr", "/opt/../etc")])
async def test_a_mount_that_cannot_be_is_named(
    provider: SandboxProvider, backend: Backend, mount: tuple[str, str]
) -> None:
    if not backend.isolated:
        pytest.skip("it mounts nothing")
    with pytest.raises(SandboxStartError, match="directory"):
        await provider.open(SandboxSpec(mounts=(mount,)))
