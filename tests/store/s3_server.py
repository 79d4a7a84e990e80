"""A real S3 server (moto's) in a process of its own, and a proxy before it that fails as stores and networks fail."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

import pytest

from rollout_engine.store.mirrors import detach_all
from tests.ray.rays import free_port

BUCKET = "runs"
SECRET = "not-to-be-seen-anywhere"
START_S = 120.0


class Ask(NamedTuple):
    """A request as it reaches the proxy. `key` is its path within the bucket."""

    method: str
    key: str
    number: int
    """How many of this method and key came before."""
    headers: dict[str, str]


Fault: TypeAlias = Callable[[Ask], str | None]
"""What goes wrong with a request; None: nothing.

refuse: 403. busy: 503. no_condition: If-None-Match is not honoured. lost_answer: stored, and then a 500. cut: the
connection ends before the whole body was passed on. mute: stored, and never answered. slow: passed on after a second.
"""


def environment(endpoint: str) -> dict[str, str]:
    """The standard variables."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def moto_server() -> Iterator[str]:
    """The URL of a server with one empty bucket."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    try:
        ends = time.monotonic() + START_S
        while True:
            assert process.poll() is None, "the S3 server has ended"
            with suppress(OSError):
                call(port, "PUT", f"/{BUCKET}")
                break
            assert time.monotonic() < ends, "the S3 server does not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def call(port: int, method: str, path: str) -> int:
    """The status of a request without a signature, which this server does not ask for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


class Proxy:
    """Stands before a server; `fault` says of each request what goes wrong with it."""

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda ask: None
        self.asked: list[Ask] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            pass

        Handler.proxy = proxy
        Handler.port = int(upstream.rpartition(":")[2])
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def came(self, method: str, path: str, headers: dict[str, str]) -> Ask:
        key = path.partition("?")[0].removeprefix(f"/{BUCKET}/")
        with self._lock:
            number = sum(1 for one in self.asked if (one.method, one.key) == (method, key))
            self.asked.append(Ask(method, key, number, headers))
            return self.asked[-1]

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    port: int
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return None

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def _any(self) -> None:
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        ask = self.proxy.came(self.command, self.path, dict(self.headers))
        fault = self.proxy.fault(ask)
        if fault == "refuse":
            self._say(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif fault == "busy":
            self._say(503, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "cut":
            self._send_half(body)
            self.close_connection = True
        elif fault == "mute":
            self._forward(body)
            self.proxy.closing.wait(30)
            self.close_connection = True
        elif fault == "lost_answer":
            self._forward(body)
            self._say(500, b"<Error><Code>InternalError</Code></Error>")
        else:
            if fault == "slow":
                self.proxy.closing.wait(1.0)
            status, headers, data = self._forward(body, drop=("if-none-match",) if fault == "no_condition" else ())
            self._say(status, data, headers)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return data

    def _sent_headers(self, drop: tuple[str, ...] = ()) -> dict[str, str]:
        left_out = {"transfer-encoding", "content-length", "expect", "connection", *drop}
        return {name: value for name, value in self.headers.items() if name.lower() not in left_out}

    def _forward(self, body: bytes, drop: tuple[str, ...] = ()) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            upstream.request(self.command, self.path, body, self._sent_headers(drop))
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            upstream.close()

    def _send_half(self, body: bytes) -> None:
        """What a server sees of a client whose connection is cut: the length of all, and half of it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as upstream:
            lines = [f"{self.command} {self.path} HTTP/1.1", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in self._sent_headers().items()]
            upstream.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body[: len(body) // 2])

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        length = (headers or {}).get("Content-Length") if self.command == "HEAD" else None
        for name, value in (headers or {}).items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def behind_proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The store behind a line that may fail; commands and this process find it by the standard variables alone."""
    proxy = Proxy(server)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    try:
        yield proxy
    finally:
        detach_all()
        proxy.close()
