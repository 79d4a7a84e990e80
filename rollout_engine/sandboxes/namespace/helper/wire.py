"""Messages over a SEQPACKET socket: a small header, a blob, and descriptors.

What a host tells its helpers is marshalled, which a new box reads at a tenth of the price, and which only those may
read who trust the sender. What comes back is JSON, as nothing that comes out of a box is trusted.
A message that does not fit into a packet travels in a memory file whose descriptor comes first.
"""

from __future__ import annotations

import array
import json
import marshal
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_PACKET = 96 * 1024
"""Below the default size of a socket's buffer, so that a packet always fits into an empty one."""
MAX_FDS = 100
MAX_MESSAGE = 256 * 2**20

_encode = json.JSONEncoder(separators=(",", ":")).encode
_INT = array.array("i").itemsize
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_AT_ONCE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * _INT)
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


def send(sock: socket.SocketType, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Sends one message. Raises BlockingIOError where the socket is full, Closed where nobody reads it."""
    _deliver(sock, _encode(header).encode(), blob, fds)


def send_text(sock: socket.SocketType, text: str) -> None:
    """As `send`, for a short header that is JSON already: the encoder would cost a new box two dozen pages."""
    _deliver(sock, text.encode(), b"", ())


def order(sock: socket.SocketType, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """As `send`, to a helper."""
    try:
        text = marshal.dumps(header)
    except ValueError:  # a subclass of a plain type, such as a member of a StrEnum
        text = marshal.dumps(json.loads(_encode(header)))
    _deliver(sock, text, blob, fds)


def _deliver(sock: socket.SocketType, text: bytes, blob: bytes, fds: tuple[int, ...]) -> None:
    try:
        if len(text) + len(blob) + _HEAD.size <= MAX_PACKET:
            _send(sock, [_HEAD.pack(_INLINE, len(text)), text, blob], fds)
        else:
            _send_file(sock, text, blob, fds)
    except (BrokenPipeError, ConnectionError) as error:
        raise Closed from error


def _send(sock: socket.SocketType, parts: list[bytes], fds: tuple[int, ...]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg(parts, ancillary)


def _send_file(sock: socket.SocketType, text: bytes, blob: bytes, fds: tuple[int, ...]) -> None:
    file = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        for part in (text, blob):
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
        _send(sock, [_HEAD.pack(_IN_FILE, len(text))], (file, *fds))
    finally:
        os.close(file)


def receive(sock: socket.SocketType, *, orders: bool = False) -> Message:
    """Takes one message. Raises BlockingIOError where there is none, Closed at the end. `orders`: the host's own."""
    return _take(sock, _AT_ONCE, marshal.loads if orders else json.loads)


def receive_order(sock: socket.SocketType) -> Message:
    """Takes one of the host's, however long that takes."""
    return _take(sock, _FLAGS, marshal.loads)


def _take(sock: socket.SocketType, how: int, decode: Callable[[bytes], Any]) -> Message:
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, _ANCILLARY, how)
    except ConnectionError as error:
        raise Closed from error
    fds = _descriptors(ancillary) if ancillary else []
    if not data and not fds:
        raise Closed
    try:
        if flags & _CUT or len(data) < _HEAD.size:
            raise BadMessage("cut")
        return _decode(data, fds, decode)
    except (BadMessage, ValueError, OSError, EOFError, TypeError) as error:
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


def _decode(data: bytes, fds: list[int], decode: Callable[[bytes], Any]) -> Message:
    kind, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if kind == _IN_FILE:
        if not fds or os.fstat(fds[0]).st_size > MAX_MESSAGE:
            raise BadMessage("a message in a file without its file, or too large")
        body = _read_all(fds[0])
    header = decode(body[:length])
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
