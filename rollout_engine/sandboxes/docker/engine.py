"""The Engine API, called from a bounded pool of threads so that the event loop never waits for the daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from docker import APIClient
from docker.errors import APIError, DockerException
from docker.utils import parse_host
from requests.exceptions import RequestException

from rollout_engine.errors import InputError
from rollout_engine.sandboxes.docker.failures import translate
from rollout_engine.sandboxes.docker.hijack import Address, Hijacked

T = TypeVar("T")

CALL_TIMEOUT_S = 120
"""A daemon that does not answer one call for this long counts as failing."""
_PROBE_S = 10.0
DEFAULT_HOST = "unix:///var/run/docker.sock"
_FIX = "use unix:// or tcp://; a daemon behind ssh or TLS: `ssh -L /tmp/docker.sock:/var/run/docker.sock HOST`"


class Engine:
    """One daemon. `host` None takes DOCKER_HOST, then the usual socket. Whoever makes it calls `close`."""

    def __init__(self, host: str | None = None, threads: int = 32) -> None:
        self.host: str = host or named_host()
        self.address = address_of(self.host)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="docker-api")
        self._client: APIClient | None = None
        self._connecting = asyncio.Lock()

    @property
    def is_local(self) -> bool:
        """Whether the daemon shares this machine's files and processes."""
        return self.address.path is not None

    async def call(self, what: str, function: Callable[[APIClient], T]) -> T:
        """Runs a call in the pool. API errors pass as they are, for the caller knows what a 404 means to it."""
        client = self._client or await self._connect()
        return await asyncio.get_running_loop().run_in_executor(self._pool, _guarded, function, client, what)

    async def ask(self, what: str, function: Callable[[APIClient], T]) -> T:
        """As `call`, where no error of the API is expected: all are typed."""
        try:
            return await self.call(what, function)
        except APIError as error:
            raise translate(error, what) from error

    async def hijack(self, path: str, body: object = None) -> Hijacked:
        """A call whose connection becomes a stream both ways (attach, exec start)."""
        client = self._client or await self._connect()
        return await Hijacked.open(self.address, f"/v{client.api_version}{path}", body)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    async def _connect(self) -> APIClient:
        async with self._connecting:
            if self._client is None:
                loop = asyncio.get_running_loop()
                self._client = await loop.run_in_executor(self._pool, self._dial)
            return self._client

    def _dial(self) -> APIClient:
        try:
            probe(self.address)
            return APIClient(base_url=self.host, timeout=CALL_TIMEOUT_S, max_pool_size=self._threads)
        except Exception as error:
            raise translate(error, f"connect to {self.host}", known=False) from error


def probe(address: Address) -> None:
    """Raises OSError where nobody listens; the package `docker` would leave its socket open then."""
    if address.path is None:
        socket.create_connection((address.host, address.port), _PROBE_S).close()
        return
    with socket.socket(socket.AF_UNIX) as attempt:
        attempt.settimeout(_PROBE_S)
        attempt.connect(address.path)


def _guarded(function: Callable[[APIClient], T], client: APIClient, what: str) -> T:
    try:
        return function(client)
    except APIError:
        raise
    except (DockerException, RequestException) as error:
        failure = translate(error, what)
        _let_go(error)
        raise failure from error


def _let_go(error: BaseException | None) -> None:
    """Frees what the frames of a failed call hold: the package `docker` leaves a socket there that did not connect."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def named_host() -> str:
    """The daemon that the environment names, else the usual one."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def address_of(host: str) -> Address:
    """Raises InputError for what is no address, and for a daemon behind ssh or TLS: neither is served."""
    try:
        scheme, _, rest = str(parse_host(host)).partition("://")
        if scheme == "http+unix":
            return Address(path="/" + rest.lstrip("/"))
        name, _, port = rest.rstrip("/").rpartition(":")
        address = Address(host=name.strip("[]"), port=int(port))
    except (DockerException, ValueError) as error:
        raise InputError(f"{host!r} is no address of a daemon: {error}", where="DOCKER_HOST", fix=_FIX) from error
    if scheme not in ("http", "tcp"):
        raise InputError(f"scheme of {host!r} is not supported", where="DOCKER_HOST", fix=_FIX)
    if os.environ.get("DOCKER_TLS_VERIFY"):
        raise InputError(f"TLS to {host!r} is not supported", where="DOCKER_TLS_VERIFY", fix=_FIX)
    return address
