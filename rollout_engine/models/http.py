"""The way to a model's server: one connection pool, and one POST with its limits. Retries are not made here."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rollout_engine.config import ModelSpec
from rollout_engine.errors import ModelBadResponse, ModelConnectionError, ModelError, ModelRequestError, ModelTimeout
from rollout_engine.models.retry import Failed

KEEPALIVE_S = 4.0
"""Idle connections live this long: less than uvicorn's 5 s, so that vLLM is seldom the one who closes."""
MAX_ERROR_BYTES = 64 * 1024
"""Of the body of an error response this much is read."""
WHOLE_BODY_BYTES = 256 * 1024
"""A request's body above this (images, long contexts) is sent in pieces of this size, as fast as the server reads."""
REDACTED = "[key]"
MIN_SECRET_CHARS = 4
"""A shorter key ("x", for a server that asks for any) is no secret, and part of many words."""

_FAULTS = (httpx.HTTPError, aiohttp.ClientError, OSError)


class Reply(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: httpx.Headers
    body: bytes


class Urls(NamedTuple):
    """Where calls go, and those that are to be streamed."""

    whole: str
    stream: str


class Channel:
    """Connections to one server, with `headers` on every call. Opened at the first call, closed by `close`.

    Requests go to the httpx transport directly: an httpx client around it adds cookies, redirects and
    authentication, none of which apply here, and doubles the CPU time of a call.
    """

    def __init__(self, spec: ModelSpec, urls: Urls, headers: Mapping[str, str], key: str | None, base_url: str) -> None:
        """`key` is what no error may show."""
        self._key, self.base_url = key, base_url
        self._url, self._stream_url = httpx.URL(urls.whole), httpx.URL(urls.stream)
        self._host = self._url.netloc.decode("ascii")
        self.where = f"model {spec.model!r} at {self._host}"
        # A plain http server needs no certificates, and reading them takes 20 ms.
        verify = httpx.create_ssl_context() if self._url.scheme == "https" else httpx.create_ssl_context(verify=False)
        proxy = _environment_proxy(self._url)
        self._transport = AiohttpTransport(verify=verify, client=lambda: _session(verify, proxy))
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "rollout"}
        self._headers |= headers
        # `pool` bounds all of: name lookup, connecting, TLS. Reading is bounded by the whole try's limit.
        self._extensions = {"timeout": {"connect": spec.connect_timeout_s, "pool": spec.connect_timeout_s}}
        self._max_bytes = spec.max_response_bytes

    def redact(self, text: str) -> str:
        """The text without the key, for whatever a server echoes into an error."""
        return text.replace(self._key, REDACTED) if self._key and len(self._key) >= MIN_SECRET_CHARS else text

    async def post(self, body: bytes, headers: Mapping[str, str], until: float) -> Reply | Failed:
        """One request and its whole response, by `until` on the loop's clock. CancelledError passes."""
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(until):
                return await self._reply_to(self._request(self._url, body, headers))
        except TimeoutError:
            pass
        return Failed(self.too_late(until - started))

    async def get(self, url: str, until: float) -> Reply | Failed:
        """The same for a GET of another address of this server."""
        started = asyncio.get_running_loop().time()
        request = httpx.Request("GET", url, headers=self._headers, extensions=self._extensions)
        try:
            async with asyncio.timeout_at(until):
                return await self._reply_to(request)
        except TimeoutError:
            pass
        return Failed(self.too_late(until - started))

    async def _reply_to(self, request: httpx.Request) -> Reply | Failed:
        try:
            response = await self._transport.handle_async_request(request)
            try:
                content = await self._read(response)
            finally:
                await response.aclose()
        except _FAULTS as error:
            fault = self.fault(error)
        else:
            if content is not None:
                return Reply(response.status_code, response.headers, content)
            fault = self.too_big()
        return Failed(fault)

    async def open(self, body: bytes, headers: Mapping[str, str], until: float) -> Stream | Failed:
        """One request and the beginning of its response; the stream is the caller's to close."""
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(until):
                response = await self._transport.handle_async_request(self._request(self._stream_url, body, headers))
        except TimeoutError:
            fault: ModelError = self.too_late(until - started)
        except _FAULTS as error:
            fault = self.fault(error)
        else:
            return Stream(self, response, until, self._max_bytes)
        return Failed(fault)

    async def close(self) -> None:
        await self._transport.aclose()
        # The sockets close in the loop's next round: let it come, or a loop that ends here leaves them behind.
        await asyncio.sleep(0)

    def _request(self, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
        merged = {**self._headers, **headers} if headers else self._headers
        content: bytes | AsyncIterator[bytes] = body
        if len(body) > WHOLE_BODY_BYTES:
            merged, content = {**merged, "content-length": str(len(body))}, _in_pieces(body)
        return httpx.Request("POST", url, headers=merged, content=content, extensions=self._extensions)

    async def _read(self, response: httpx.Response) -> bytes | None:
        """The body; None as soon as an answer is larger than allowed. Of an error's body the beginning is enough."""
        good = response.is_success
        chunks, left = [], self._max_bytes if good else MAX_ERROR_BYTES
        pieces = body_pieces(response)
        async for chunk in pieces:
            chunks.append(chunk)
            left -= len(chunk)
            if left < 0:
                await close_iterator(pieces)
                if good:
                    return None
                break
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def failed(self, error: ModelError) -> Failed:
        """A finding about an answer's body, with its place and without the key."""
        return Failed(type(error)(f"{self.where}: {self.redact(str(error))}"))

    def too_big(self) -> ModelError:
        return ModelBadResponse(f"{self.where}: the answer is larger than max_response_bytes = {self._max_bytes}")

    def too_late(self, seconds: float) -> ModelError:
        return ModelTimeout(f"{self.where}: no whole answer within {seconds:.3g} s")

    def fault(self, error: Exception) -> ModelError:
        """What went wrong on the way. A "timeout" among these is no time limit of ours: so a cut is called, too."""
        text = f"{self.where}: {self.redact(str(error)) or type(error).__name__}"
        if isinstance(error, httpx.UnsupportedProtocol):
            return ModelRequestError(text)
        if isinstance(error, aiohttp.ClientResponseError | httpx.DecodingError):
            return ModelBadResponse(f"{self.where}: broken HTTP: {self.redact(str(error))}")
        return ModelConnectionError(text)


class Stream:
    """A response that is read piece by piece, within the limits of its call."""

    def __init__(self, channel: Channel, response: httpx.Response, until: float, max_bytes: int) -> None:
        self.status, self.headers = response.status_code, response.headers
        self._channel, self._response = channel, response
        self._max_bytes = max_bytes
        self.bytes_read = 0
        self._pieces = body_pieces(response)
        self._reader: asyncio.Task[object] | None = None
        self._late = False
        # One timer for all pieces: an asyncio.timeout around each costs as much as reading it.
        self._timer = asyncio.get_running_loop().call_at(until, self._end)

    async def read(self) -> bytes | Failed:
        """The next piece; empty at the end."""
        fault: ModelError | None = None
        try:
            piece = await self._next()
        except _FAULTS as error:
            fault = self._channel.fault(error)
        if self._late:
            fault = ModelTimeout(f"{self._channel.where}: the answer did not end in time")
        elif fault is None:
            self.bytes_read += len(piece)
            if self.bytes_read <= self._max_bytes:
                return piece
            fault = self._channel.too_big()
        return Failed(fault)

    async def _next(self) -> bytes:
        """As within asyncio.timeout, only a cancellation that is the timer's own is taken back."""
        if self._late:
            return b""
        reader = asyncio.current_task()
        assert reader is not None, "a stream is read in a task"
        before, self._reader = reader.cancelling(), reader
        try:
            return await anext(self._pieces, b"")
        except asyncio.CancelledError:
            if not self._late or reader.cancelling() > before + 1:
                raise
            return b""
        finally:
            self._reader = None
            if self._late:
                reader.uncancel()

    def _end(self) -> None:
        self._late = True
        if self._reader is not None:
            self._reader.cancel()

    async def read_all(self) -> bytes | Failed:
        """The rest of the body."""
        pieces: list[bytes] = []
        while True:
            piece = await self.read()
            if isinstance(piece, Failed) or not piece:
                return piece or b"".join(pieces)
            pieces.append(piece)

    async def close(self) -> None:
        self._timer.cancel()
        await close_iterator(self._pieces)
        await self._response.aclose()


def body_pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body's bytes; decoded where the server compressed them although it was asked not to."""
    if "content-encoding" in response.headers:
        return response.aiter_bytes()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return aiter(response.stream)


async def close_iterator(pieces: AsyncIterator[bytes]) -> None:
    """Ends a body's iterator now and not whenever it is collected."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), WHOLE_BODY_BYTES):
        yield body[start : start + WHOLE_BODY_BYTES]


def _session(verify: ssl.SSLContext, proxy: str | None) -> aiohttp.ClientSession:
    # No limit: how many calls run at once is decided above, by leases, and a second queue here would hide in them.
    connector = aiohttp.TCPConnector(limit=0, ssl=verify, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), proxy=proxy)


def _environment_proxy(url: httpx.URL) -> str | None:
    """The proxy that the environment names for this server, looked up once and not at every call."""
    if urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")
