"""What a stream of every sandbox must do: a program whose input and output are open while it runs.

One test: .venv/bin/pytest tests/contracts/test_stream.py -k echo
"""

from __future__ import annotations

import asyncio

import pytest

from rollout_engine.errors import SandboxDied
from rollout_engine.sandboxes.base import MAX_CHUNK_BYTES, Sandbox, SandboxProvider, SandboxSpec, Stream
from tests.contracts.test_sandbox import mark, nothing_runs, until

__all__ = ["mark"]

MANY = 4 * 2**20


async def read_all(stream: Stream) -> bytes:
    found = b""
    while chunk := await stream.read():
        assert len(chunk) <= MAX_CHUNK_BYTES
        found += chunk
    return found


async def ended(stream: Stream) -> int:
    async def over() -> bool:
        return (await stream.poll()).exit_code is not None

    await until(over, "the program has ended")
    code = (await stream.poll()).exit_code
    assert code is not None
    return code


async def test_an_echo_answers_while_it_runs(sandbox: Sandbox) -> None:
    stream = await sandbox.connect(["cat"])
    for line in (b"one\n", b"\0\xff\n"):
        await stream.write(line)
        assert await stream.read() == line
    assert (await stream.poll()).exit_code is None
    await stream.close()


async def test_its_place_environment_and_standard_error(sandbox: Sandbox) -> None:
    await sandbox.write_file("sub/file", b"x")
    stream = await sandbox.connect(["sh", "-c", "cat file; echo $A; echo e >&2; exit 5"], cwd="sub", env={"A": "b"})
    assert await read_all(stream) == b"xb\n"
    assert await ended(stream) == 5
    status = await stream.poll()
    assert (status.stdout, status.stderr) == (b"", b"e\n")
    await stream.close()


async def test_more_than_any_buffer_holds_goes_both_ways(sandbox: Sandbox) -> None:
    stream = await sandbox.connect(["cat"])
    data = bytes(range(256)) * (MANY // 256)
    writing = asyncio.create_task(stream.write(data))
    got = b""
    while len(got) < MANY:
        got += await stream.read()
    await writing
    assert got == data
    await stream.close()


async def test_a_program_that_reads_nothing_holds_the_writer_back(sandbox: Sandbox, mark: str) -> None:
    stream = await sandbox.connect(["sh", "-c", f"read line; echo $line; sleep {mark}"])
    writing = asyncio.create_task(stream.write(b"go\n" + b"x" * MANY))
    assert await stream.read() == b"go\n"
    assert not writing.done()
    await stream.close()
    with pytest.raises(BrokenPipeError):
        await writing


async def test_writing_to_a_program_that_has_ended(sandbox: Sandbox) -> None:
    stream = await sandbox.connect(["true"])
    assert await read_all(stream) == b""
    with pytest.raises(BrokenPipeError):
        await stream.write(b"x" * MANY)
    await stream.close()


async def test_a_missing_program_has_ended_with_127(sandbox: Sandbox) -> None:
    stream = await sandbox.connect(["no-such-program"])
    assert await read_all(stream) == b""
    assert await ended(stream) == 127
    assert b"no-such-program" in (await stream.poll()).stderr
    await stream.close()


async def test_close_kills_the_group_and_may_be_called_twice(sandbox: Sandbox, mark: str) -> None:
    stream = await sandbox.connect(["sh", "-c", f"trap '' TERM; sleep {mark} & echo up; cat"])
    assert await stream.read() == b"up\n"
    await stream.close()
    await stream.close()
    await nothing_runs(mark)


async def test_close_ends_a_reader(sandbox: Sandbox) -> None:
    stream = await sandbox.connect(["cat"])
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    await stream.close()
    assert await reading == b""


async def test_the_end_of_the_sandbox_is_its_end(provider: SandboxProvider, mark: str) -> None:
    sandbox = await provider.open(SandboxSpec())
    stream = await sandbox.connect(["sh", "-c", f"sleep {mark} & echo up; cat"])
    assert await stream.read() == b"up\n"
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    await sandbox.close()
    await nothing_runs(mark)
    for call in (reading, stream.read(), stream.write(b"x"), stream.poll()):
        with pytest.raises(SandboxDied):
            await call
    await stream.close()
    with pytest.raises(SandboxDied):
        await sandbox.connect(["cat"])
