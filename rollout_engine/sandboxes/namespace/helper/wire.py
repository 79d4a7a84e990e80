"""Messages over a SEQPACKET socket: a small JSON header, a blob, and descriptors.

A message that does not fit into a packet travels in a memory file whose descriptor comes first.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
from typing import Any, NamedTuple

MAX_PACKET = 96 * 1024
"""Below the default size of a socket's buffer, so that a packet always fits into an empty one."""
MAX_FDS = 100
MAX_MESSAGE = 256 * 2**20

_encode = json.JSONEncoder(separators=(",", ":")).encode
_INT = array.array("i").itemsize
_FLAGS = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_HEAD = struct.Struct("<BI")
_INLINE, _IN_FILE = 0, 1


class Message(NamedTuple):
    """What was received. Whoever takes it closes its descriptors."""

    header: dict[str, Any]
    blob: bytes
    fds: list[int]

    def drop(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Closed(Exception):
    """The other side is gone."""


class BadMessage(Exception):
    """The other side sent something that is no message."""


def send(sock: socket.socket, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Sends one message. Raises BlockingIOError where the socket is full, Closed where nobody reads it."""
    text = _encode(header).encode()
    try:
        if len(text) + len(blob) + _HEAD.size <= MAX_PACKET:
            _send(sock, [_HEAD.pack(_INLINE, len(text)), text, blob], fds)
        else:
            _send_file(sock, text, blob, fds)
    except (BrokenPipeError, ConnectionError) as error:
        raise Closed from error


def _send(sock: socket.socket, parts: list[bytes], fds: tuple[int, ...]) -> None:
    if fds:
        socket.send_fds(sock, parts, fds)
    else:
        sock.sendmsg(parts)


def _send_file(sock: socket.socket, text: bytes, blob: bytes, fds: tuple[int, ...]) -> None:
    file = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        for part in (text, blob):
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
        _send(sock, [_HEAD.pack(_IN_FILE, len(text))], (file, *fds))
    finally:
        os.close(file)


def receive(sock: socket.socket) -> Message:
    """Takes one message. Raises BlockingIOError where there is none, Closed at the end."""
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(MAX_FDS * _INT), _FLAGS)
    except ConnectionError as error:
        raise Closed from error
    fds = _descriptors(ancillary)
    if not data and not fds:
        raise Closed
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) < _HEAD.size:
            raise BadMessage("cut")
        return _decode(data, fds)
    except (BadMessage, ValueError, OSError) as error:
        for fd in fds:
            os.close(fd)
        raise BadMessage(str(error)) from error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """socket.recv_fds would ignore the flag that keeps descriptors from the commands of a box."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % _INT])
    return list(found)


def _decode(data: bytes, fds: list[int]) -> Message:
    kind, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if kind == _IN_FILE:
        if not fds or os.fstat(fds[0]).st_size > MAX_MESSAGE:
            raise BadMessage("a message in a file without its file, or too large")
        body = _read_all(fds[0])
    header = json.loads(body[:length])
    if not isinstance(header, dict):
        raise BadMessage("no header")
    if kind == _IN_FILE:
        os.close(fds.pop(0))
    return Message(header, body[length:], fds)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    pieces, position = [], 0
    while position < size and (piece := os.pread(fd, size - position, position)):
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)


def receive_wait(sock: socket.socket) -> Message:
    """Takes one message, however long that takes."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()
    return receive(sock)
