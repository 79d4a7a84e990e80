"""Both forwarders alone, as processes of this machine: bytes, ends and connections pass as they are, in any number.

One test: .venv/bin/pytest tests/sandboxes/docker/test_forwarder.py -k half
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from rollout_engine.errors import SandboxError
from rollout_engine.sandboxes.docker.linkframes import LINKS
from rollout_engine.sandboxes.docker.links import Links
from rollout_engine.sandboxes.docker.supply import compiled

LIMIT_S = 120.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Program:
    path: Path
    way: str
    """`forward` to the socket by itself, `carry` by way of `Links`."""


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = compiled()
    if made is None:
        pytest.skip("no C compiler with a static libc")
    path = tmp_path_factory.mktemp("forwarder") / "supervisor"
    path.write_bytes(made)
    path.chmod(0o755)
    return path


@pytest.fixture(params=["forward", "carry"])
def program(binary: Path, request: pytest.FixtureRequest) -> Program:
    return Program(binary, request.param)


class Forwarding(NamedTuple):
    port: int
    """Or an errno, below zero."""
    process: asyncio.subprocess.Process
    over: asyncio.Task[None]


class Piped:
    """A process as `Links` talks to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.outlet = self

    async def read(self) -> bytes:
        return await self._out.read(65536)

    async def write(self, data: bytes) -> None:
        self._in.write(data)
        await self._in.drain()


@contextlib.asynccontextmanager
async def forwarding(program: Program, path: Path, port: int = 0) -> AsyncIterator[Forwarding]:
    """Its standard input ends with the block, and so must it."""
    pipe, carries = asyncio.subprocess.PIPE, program.way == "carry"
    argv = [program.path, program.way, str(port), *([] if carries else [str(path)])]
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    over: asyncio.Task[Any] = asyncio.ensure_future(process.wait())
    try:
        said = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        if carries and said:
            over = asyncio.ensure_future(Links(cast(Any, Piped(process)), path).carry(b""))
        yield Forwarding(int(said) if said else -(await process.wait()), process, over)
    finally:
        over.cancel()
        await asyncio.wait([over])
        process.stdin.close()
        await asyncio.wait_for(process.wait(), LIMIT_S)


@contextlib.asynccontextmanager
async def served(program: Program, folder: Path, serve: Serve) -> AsyncIterator[int]:
    """A port that is led to a server."""
    running: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()

    path = folder / "s"
    async with await asyncio.start_unix_server(one, path), forwarding(program, path) as found:
        yield found.port
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


async def test_each_piece_comes_before_the_next_is_sent(program: Program, short: Path) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(50):
            writer.write(b"piece\n")
            await writer.drain()
            assert await reader.readline() == b"heard\n"

    async with asyncio.timeout(LIMIT_S), served(program, short, stream) as port:
        reader, writer = await connected(port)
        for _ in range(50):
            assert await reader.readline() == b"piece\n"
            writer.write(b"heard\n")
        assert await reader.read() == b""
        writer.close()


async def test_half_closed_is_half_closed_on_the_other_side(program: Program, short: Path) -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(-1)
        writer.write(b"%d bytes" % len(data))
        await writer.drain()

    async with asyncio.timeout(LIMIT_S), served(program, short, answer_at_the_end) as port:
        assert await said_back(port, b"x" * 1_000_000) == b"1000000 bytes"


async def test_more_connections_than_it_takes_at_once_all_get_their_own(program: Program, short: Path) -> None:
    async with asyncio.timeout(LIMIT_S), served(program, short, echo) as port:
        sent = [bytes([number % 256]) * 20_000 + b"%d" % number for number in range(LINKS + 100)]
        assert await asyncio.gather(*(said_back(port, data) for data in sent)) == sent


async def test_a_slow_reader_holds_back_its_own_writer_and_nobody_else(program: Program, short: Path) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if await reader.readline() == b"flood\n":
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        writer.write(b"quick")

    async with asyncio.timeout(LIMIT_S), served(program, short, flood) as port:
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
async def test_a_program_that_goes_away_is_gone_for_the_server(program: Program, short: Path, reset: bool) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        try:
            await reader.read()
        finally:
            gone.set()

    async with asyncio.timeout(LIMIT_S), served(program, short, wait) as port:
        _, writer = await connected(port)
        if reset:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.write(b"here\n")
        await writer.drain()
        writer.close()
        await gone.wait()


async def test_a_server_that_goes_away_is_gone_for_the_program(program: Program, short: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.transport.abort()

    async with asyncio.timeout(LIMIT_S), served(program, short, hang_up) as port:
        reader, writer = await connected(port)
        writer.write(b"line\n")
        assert await reader.read() == b""
        writer.close()


async def test_without_a_server_connections_are_closed_and_it_lives_on(program: Program, short: Path) -> None:
    async with asyncio.timeout(LIMIT_S), forwarding(program, short / "s") as found:
        reader, writer = await connected(found.port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        async with await asyncio.start_unix_server(echo, short / "s"):
            assert await said_back(found.port, b"there") == b"there"


async def test_a_port_that_is_taken_is_told_by_its_errno(program: Program, short: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with forwarding(program, short / "s", taken.getsockname()[1]) as found:
            assert -found.port == errno.EADDRINUSE


async def test_connections_that_end_leave_no_descriptor(program: Program, short: Path) -> None:
    path = short / "s"
    async with (
        asyncio.timeout(LIMIT_S),
        await asyncio.start_unix_server(echo, path),
        forwarding(program, path) as found,
    ):
        assert await said_back(found.port, b"x") == b"x"  # it says its port before it has all that it needs
        folders = [f"/proc/{pid}/fd" for pid in (found.process.pid, os.getpid())]
        before = [len(os.listdir(folder)) for folder in folders]
        for _ in range(20):
            assert await said_back(found.port, b"x") == b"x"
        while any(len(os.listdir(folder)) > size for folder, size in zip(folders, before, strict=True)):
            await asyncio.sleep(0.01)


async def test_when_it_is_killed_all_connections_end_and_that_is_told(binary: Path, short: Path) -> None:
    ended: asyncio.Queue[bytes] = asyncio.Queue()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        ended.put_nowait(b"begun")
        ended.put_nowait(await reader.read())
        writer.close()

    path = short / "s"
    async with (
        asyncio.timeout(LIMIT_S),
        await asyncio.start_unix_server(wait, path),
        forwarding(Program(binary, "carry"), path) as found,
    ):
        talks = [await connected(found.port) for _ in range(3)]
        for _, writer in talks:
            writer.write(b"here\n")
        assert [await ended.get() for _ in talks] == [b"begun"] * 3
        found.process.kill()
        with pytest.raises(SandboxError, match="has ended"):
            await found.over
        assert [await ended.get() for _ in talks] == [b""] * 3
        for reader, writer in talks:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
