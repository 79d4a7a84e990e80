"""The forwarder alone, as a process of this machine: bytes, ends and connections pass as they are, in any number.

One test: .venv/bin/pytest tests/sandboxes/docker/test_forwarder.py -k half
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollout_engine.sandboxes.docker.supply import compiled

LIMIT_S = 60.0
LINKS = 256
"""Connections at once, as in forward.c."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = compiled()
    if binary is None:
        pytest.skip("no C compiler with a static libc")
    path = tmp_path_factory.mktemp("forwarder") / "supervisor"
    path.write_bytes(binary)
    path.chmod(0o755)
    return path


@contextlib.asynccontextmanager
async def forwarding(program: Path, path: Path, port: int = 0) -> AsyncIterator[int]:
    """Gives the port. Its standard input ends with the block, and so must it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program, "forward", str(port), str(path), stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        yield int(said) if said else -(await process.wait())
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), LIMIT_S)


@contextlib.asynccontextmanager
async def served(program: Path, folder: Path, serve: Serve) -> AsyncIterator[int]:
    """A port that is led to a server."""
    running: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()

    path = folder / "s"
    async with await asyncio.start_unix_server(one, path), forwarding(program, path) as port:
        yield port
    for task in running:
        task.cancel()


async def connected(port: int) -> Talk:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), LIMIT_S)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def said_back(port: int, data: bytes) -> bytes:
    reader, writer = await connected(port)

    async def say() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    saying = asyncio.create_task(say())
    heard = await reader.read(-1)
    await saying
    writer.close()
    return heard


async def test_each_piece_comes_before_the_next_is_sent(program: Path, tmp_path: Path) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(50):
            writer.write(b"piece\n")
            await writer.drain()
            assert await reader.readline() == b"heard\n"

    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, stream) as port:
        reader, writer = await connected(port)
        for _ in range(50):
            assert await reader.readline() == b"piece\n"
            writer.write(b"heard\n")
        assert await reader.read() == b""
        writer.close()


async def test_half_closed_is_half_closed_on_the_other_side(program: Path, tmp_path: Path) -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(-1)
        writer.write(b"%d bytes" % len(data))
        await writer.drain()

    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, answer_at_the_end) as port:
        assert await said_back(port, b"x" * 1_000_000) == b"1000000 bytes"


async def test_more_connections_than_it_takes_at_once_all_get_their_own(program: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, echo) as port:
        sent = [bytes([number % 256]) * 20_000 + b"%d" % number for number in range(LINKS + 100)]
        assert await asyncio.gather(*(said_back(port, data) for data in sent)) == sent


async def test_a_slow_reader_holds_back_its_own_writer_and_nobody_else(program: Path, tmp_path: Path) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if await reader.readline() == b"flood\n":
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        writer.write(b"quick")

    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, flood) as port:
        slow, slow_writer = await connected(port)
        slow_writer.write(b"flood\n")
        await slow.readexactly(1)
        before = -1
        while sent != before:  # until it stands still
            before = sent
            reader, writer = await connected(port)
            writer.write(b"hello\n")
            assert await reader.read() == b"quick"
            writer.close()
        slow_writer.transport.abort()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
async def test_a_program_that_goes_away_is_gone_for_the_server(program: Path, tmp_path: Path, reset: bool) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        try:
            await reader.read()
        finally:
            gone.set()

    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, wait) as port:
        _, writer = await connected(port)
        if reset:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.write(b"here\n")
        await writer.drain()
        writer.close()
        await gone.wait()


async def test_a_server_that_goes_away_is_gone_for_the_program(program: Path, tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.transport.abort()

    async with asyncio.timeout(LIMIT_S), served(program, tmp_path, hang_up) as port:
        reader, writer = await connected(port)
        writer.write(b"line\n")
        assert await reader.read() == b""
        writer.close()


async def test_without_a_server_connections_are_closed_and_it_lives_on(program: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S), forwarding(program, tmp_path / "s") as port:
        reader, writer = await connected(port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        async with await asyncio.start_unix_server(echo, tmp_path / "s"):
            assert await said_back(port, b"there") == b"there"


async def test_a_port_that_is_taken_is_told_by_its_errno(program: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with forwarding(program, tmp_path / "s", taken.getsockname()[1]) as code:
            assert -code == errno.EADDRINUSE


async def test_connections_that_end_leave_no_descriptor(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with asyncio.timeout(LIMIT_S), await asyncio.start_unix_server(echo, path), forwarding(program, path) as port:
        [pid] = [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_mine(name, path)]
        before = len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(20):
            assert await said_back(port, b"x") == b"x"
        while len(os.listdir(f"/proc/{pid}/fd")) > before:
            await asyncio.sleep(0.01)


def _is_mine(name: str, path: Path) -> bool:
    try:
        return str(path).encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
