"""A model server as a process: the blocking form for the command line, and a child that ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, RunError
from rollout_engine.models.server import ModelServer
from rollout_engine.models.server_call import Solution
from rollout_engine.models.server_limits import ServerLimits

START_S = 60.0
"""A child that does not listen by then has failed."""
STOP_S = 5.0
"""A child that has not ended by then is killed."""
_STATS_S = 10.0
_BAD_INPUT = 2


def run_server(
    models: Mapping[str, ModelSpec],
    *,
    solutions: Mapping[str, Solution] | None = None,
    prompts: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    seed: int = 0,
    max_concurrency: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves until SIGINT or SIGTERM; says `serving NAMES at URL` once it listens. Raises InputError."""
    server = ModelServer(
        models, solutions=solutions, prompts=prompts, host=host, port=port, seed=seed, max_concurrency=max_concurrency
    )
    _run(server, lambda: say(f"serving {', '.join(models)} at {server.url}"), parent=None)


def _run(server: ModelServer, ready: Callable[[], None], parent: int | None) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(server, ready, parent))


async def _serve(server: ModelServer, ready: Callable[[], None], parent: int | None) -> None:
    """Serves until a signal comes, or the pipe `parent` ends because the parent did."""
    raise_descriptor_limit()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        loop.add_reader(parent, lambda: stop.set() if not os.read(parent, 4096) else None)
    async with server:
        ready()
        await stop.wait()
        if parent is not None:
            loop.remove_reader(parent)


def raise_descriptor_limit() -> None:
    """Every connection is a descriptor; the usual soft limit of 1,024 is less than a benchmark's calls in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class ServerProcess:
    """`with ServerProcess({...}) as server:` runs a `ModelServer` in a child process; the same arguments.

    The child ends with the context, and with this process however that ends: it watches the pipe to it. It is not
    in the terminal's process group, so that a Ctrl-C lets the run that uses it drain.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        *,
        solutions: Mapping[str, Solution] | None = None,
        prompts: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        max_concurrency: int | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._orders: dict[str, Any] = {
            "models": {name: spec.model_dump(mode="json") for name, spec in models.items()},
            "solutions": {task: s if isinstance(s, str) else dict(s) for task, s in (solutions or {}).items()},
            "prompts": dict(prompts or {}),
            "host": host,
            "port": port,
            "seed": seed,
            "max_concurrency": max_concurrency,
            "limits": None if limits is None else limits.model_dump(mode="json"),
        }
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Returns once the server listens. Raises InputError for bad models, RunError where it does not come up."""
        argv = [sys.executable, "-m", "rollout_engine.models.server_process"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
        )
        try:
            self.url = self._hand_over(self._child)
        except BaseException:
            self.close()
            raise

    def _hand_over(self, child: subprocess.Popen[bytes]) -> str:
        """Gives the child its orders; the URL that it answers with."""
        assert child.stdin is not None
        assert child.stdout is not None
        orders = memoryview(json.dumps(self._orders).encode("ascii") + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while orders:
                orders = orders[child.stdin.write(orders) or 0 :]
        line, deadline = b"", time.monotonic() + START_S
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([child.stdout], [], [], left_s)[0]:
                raise RunError(f"the model server did not listen within {START_S:g} s: {self._said()}")
            piece = os.read(child.stdout.fileno(), 4096)
            if not piece:
                code = child.wait(STOP_S)
                raise (
                    InputError(self._said())
                    if code == _BAD_INPUT
                    else RunError(f"the model server ended with exit code {code}: {self._said()}")
                )
            line += piece
        return line.decode("ascii").strip()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace").strip()[-2000:] or "(nothing)"

    def stats(self) -> dict[str, Any]:
        """GET /stats, blocking."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/stats", timeout=_STATS_S) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def close(self) -> None:
        """Ends the child; safe to call again."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        self._errors.close()


def _main() -> int:
    """The child: orders as one line on stdin, then its URL on stdout, then serving until stdin ends."""
    pieces = [b""]
    while not pieces[-1].endswith(b"\n"):
        piece = os.read(0, 2**20)
        if not piece:
            return 0
        pieces.append(piece)
    orders = json.loads(b"".join(pieces))
    models = {name: ModelSpec.model_validate(fields) for name, fields in orders.pop("models").items()}
    found = orders.pop("limits")
    limits = None if found is None else ServerLimits.model_validate(found)
    try:
        server = ModelServer(models, limits=limits, **orders)
        _run(server, lambda: print(server.url, flush=True), parent=0)
    except InputError as error:
        print(error, file=sys.stderr)
        return _BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(_main())
