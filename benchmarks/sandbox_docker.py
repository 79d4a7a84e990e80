"""Create, one exec of `true`, destroy: the docker sandbox beside the raw Engine API, in turns in the same run.

    python -m benchmarks.sandbox_docker [--lives 60] [--concurrency 4] [--image busybox]

The raw side is the least that a client can do: the same container by hand over one connection a thread, `docker exec`
by its three calls, forced removal. Prints lives a second for both and their ratio (to reach: 0.85), for the supervised
and the plain path, and the latency of one more exec.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider

ROUNDS = 3
"""The sides take turns this often, so that a noisy moment hits both."""


class Raw:
    """The Engine API by hand over a unix socket."""

    def __init__(self, path: str, image: str) -> None:
        self._path, self._image, self._local = path, image, threading.local()

    def life(self) -> None:
        name = f"raw-{uuid.uuid4().hex[:12]}"
        limits = {"Memory": 2**31, "MemorySwap": 2**31, "NanoCpus": 10**9, "PidsLimit": 512}
        host = {"NetworkMode": "none", "Init": True, **limits}
        body = {"Image": self._image, "Cmd": ["sleep", "1000000"], "HostConfig": host}
        container = self._call("POST", f"/containers/create?name={name}", body)["Id"]
        self._call("POST", f"/containers/{container}/start")
        self.exec(container)
        self._call("DELETE", f"/containers/{container}?force=1&v=1")

    def exec(self, container: str) -> None:
        order = {"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}
        made = self._call("POST", f"/containers/{container}/exec", order)["Id"]
        self._call("POST", f"/exec/{made}/start", {"Detach": False})
        assert self._call("GET", f"/exec/{made}/json")["ExitCode"] == 0

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._local, "connection"):
            self._local.connection = UnixConnection(self._path)
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def _call(self, method: str, path: str, body: object = None) -> Any:
        connection = self._connection()
        data = json.dumps(body) if body is not None else None
        connection.request(method, f"/v1.41{path}", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {text.decode()}")
        return json.loads(text) if text.startswith(b"{") else None


class UnixConnection(http.client.HTTPConnection):
    """The daemon closes a connection after the stream of an exec; the next request then connects again."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def raw_rate(raw: Raw, lives: int, concurrency: int) -> float:
    with ThreadPoolExecutor(concurrency) as pool:
        started = time.monotonic()
        for done in [pool.submit(raw.life) for _ in range(lives)]:
            done.result()
        return lives / (time.monotonic() - started)


async def sandbox_rate(provider: DockerProvider, lives: int, concurrency: int) -> float:
    room = asyncio.Semaphore(concurrency)

    async def life() -> None:
        async with room:
            sandbox = await provider.open(SandboxSpec())
            try:
                assert (await sandbox.exec(["true"])).ok
            finally:
                await sandbox.close()

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(lives):
            group.create_task(life())
    return lives / (time.monotonic() - started)


async def exec_ms(provider: DockerProvider, count: int = 50) -> float:
    sandbox = await provider.open(SandboxSpec())
    started = time.monotonic()
    for _ in range(count):
        await sandbox.exec(["true"])
    spent = time.monotonic() - started
    await sandbox.close()
    return 1000 * spent / count


async def compare(lives: int, concurrency: int, image: str) -> dict[str, float]:
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    raw = Raw(host.removeprefix("unix://"), image)
    providers = {way: DockerProvider(image=image, supervise=way == "supervised") for way in ("supervised", "plain")}
    rates: dict[str, list[float]] = {"raw": [], **{way: [] for way in providers}}
    try:
        for provider in providers.values():
            await sandbox_rate(provider, 1, 1)
        for _ in range(ROUNDS):
            each = max(1, lives // ROUNDS)
            rates["raw"].append(await asyncio.to_thread(raw_rate, raw, each, concurrency))
            for way, provider in providers.items():
                rates[way].append(await sandbox_rate(provider, each, concurrency))
        found = {f"{way}_per_s": sum(each) / len(each) for way, each in rates.items()}
        found |= {f"{way}_ratio": found[f"{way}_per_s"] / found["raw_per_s"] for way in providers}
        return found | {f"{way}_exec_ms": await exec_ms(provider) for way, provider in providers.items()}
    finally:
        for provider in providers.values():
            await provider.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--image", default="busybox")
    arguments = parser.parse_args()
    for name, value in asyncio.run(compare(arguments.lives, arguments.concurrency, arguments.image)).items():
        print(f"{name:20} {value:8.2f}")


if __name__ == "__main__":
    main()
