"""Files between host and box, without holding up the event loop, and what can go wrong with them."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import BinaryIO

from rollout_engine.errors import TooLarge
from rollout_engine.sandboxes.base import MAX_FILES
from rollout_engine.sandboxes.files import arriving
from rollout_engine.sandboxes.namespace.helper import archive

_CHUNK = 2**21


async def as_file(data: bytes) -> BinaryIO:
    """A memory file with this content."""
    file = os.fdopen(os.memfd_create("data", os.MFD_CLOEXEC), "w+b", buffering=0)
    try:
        view = memoryview(data)
        while view:
            view = view[file.write(view[:_CHUNK]) :]
            await asyncio.sleep(0)
    except BaseException:
        file.close()
        raise
    return file


async def read_descriptor(fd: int, path: str, max_bytes: int) -> bytes:
    """The content of a file that a box has opened. Raises TooLarge above `max_bytes`."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise PermissionError(f"{path} is no regular file")
    chunks, size = [], 0
    while size <= max_bytes and (chunk := os.pread(fd, min(_CHUNK, max_bytes + 1 - size), size)):
        chunks.append(chunk)
        size += len(chunk)
        await asyncio.sleep(0)
    if size > max_bytes:
        raise TooLarge(f"{path} has more than {max_bytes} bytes")
    return b"".join(chunks)


async def pack(source: Path) -> BinaryIO:
    """A memory file with a host's file or directory as a stream; closed where nobody waits for it any more."""
    packing = asyncio.get_running_loop().run_in_executor(None, _pack, source)
    try:
        return await asyncio.shield(packing)
    except asyncio.CancelledError:
        packing.add_done_callback(lambda done: done.exception() or done.result().close())
        raise


def _pack(source: Path) -> BinaryIO:
    if not source.exists():
        raise FileNotFoundError(2, "no such file or directory", str(source))
    file = os.fdopen(os.memfd_create("upload", os.MFD_CLOEXEC), "w+b")
    try:
        archive.write(file, str(source.resolve()), 2**40, MAX_FILES, links=True)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def unpack_pipe(fd: int, target: Path, max_bytes: int, max_files: int) -> None:
    """Makes what comes through a pipe at `target`, or nothing at all. Blocks: for a thread."""
    try:
        with os.fdopen(fd, "rb") as stream, arriving(target) as place:
            archive.read(stream, str(place), max_bytes, max_files, links=False)
    except archive.TooMuch as error:
        raise TooLarge(str(error)) from error
