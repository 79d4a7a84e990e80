"""One rollout's proxy: every request that reaches its listener is answered here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from rollout_engine.errors import ModelBadResponse, RolloutEngineError
from rollout_engine.formats import GEMINI
from rollout_engine.formats.base import Writer, asked_with
from rollout_engine.formats.check import Malformed, object_of
from rollout_engine.formats.routes import COUNT, LIST, Route, route_of
from rollout_engine.models.wire import PARSE_IN_THREAD_BYTES, encode, load_big_json
from rollout_engine.proxy.faults import NO_RETRY, Told, told_of
from rollout_engine.proxy.outgoing import EVENTS, KeepAlive, Outgoing
from rollout_engine.proxy.roles import role_of
from rollout_engine.proxy.session import Call, Session
from rollout_engine.proxy.token import rest_of

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
"""count_tokens has no tokenizer: it estimates."""
PASSED_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")
"""They say how a body is to be read, so they go with it to a server of the same format."""
MAX_CONNECTIONS = 128
"""Of one rollout; each is a descriptor of the host, which all of its rollouts share. Further ones are cut."""
_JSON = "application/json"
_SILENT = logging.Logger("the proxy's HTTP", logging.CRITICAL + 1)
"""What is no HTTP gets 400; aiohttp would log each with its bytes, as often as an agent sends them."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What one request may be."""

    max_body_bytes: int = 32 * 2**20
    body_s: float = 60.0
    """A request's body is there within this time."""
    max_connections: int = MAX_CONNECTIONS
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


class _Server(web.Server):
    """A rollout's connections, bounded."""

    def __init__(self, door: Door, limits: DoorLimits) -> None:
        loop, size = asyncio.get_running_loop(), limits.max_body_bytes

        def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

        super().__init__(
            door.handle,
            request_factory=make,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=600.0,
            logger=_SILENT,
        )
        self._most = limits.max_connections

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        if len(self.connections) >= self._most:
            transport.abort()
        else:
            super().connection_made(handler, transport)


class Door:
    """Answers for one rollout, and only to its token. `close` makes the token worthless.

    `server()` is what a listening socket needs: `loop.create_server(door.server(), sock=listener)`.
    """

    def __init__(self, session: Session, token: str, limits: DoorLimits | None = None) -> None:
        self._session, self._token = session, token
        self._limits = limits if limits is not None else DoorLimits()
        self._numbers = itertools.count(1)
        self._open, self._warned = True, False

    def server(self) -> web.Server:
        """The protocol factory of a listener. A client that goes away cancels its call."""
        return _Server(self, self._limits)

    def close(self) -> None:
        """From now on every request is answered with 404."""
        self._open = False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. Raises nothing but CancelledError and errors of the connection."""
        rest = rest_of(request.path, self._token)
        if rest is None or not self._open:
            return self._unknown()
        if "upgrade" in request.headers.get("connection", "").lower() or "sec-websocket-key" in request.headers:
            return web.Response(status=426, headers={"connection": "close"}, text="there are no WebSockets here")
        route = route_of(request.method, rest, "anthropic-version" in request.headers)
        if route is None:
            text = f"there is no {request.method} {rest[:200]} here"
            self._session.refused(text)
            return web.Response(status=404, text=text)
        try:
            return await self._answer(request, route)
        except Malformed as error:
            return self._refuse(route, told_of(error))
        except RolloutEngineError as error:
            return _refusal(route, told_of(error))
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            # An agent must not hang on, or ask again and again because of, a fault of ours: the rollout ends.
            log.exception("the proxy failed at %s", route.format.name)
            self._session.broke(error)
            return _refusal(route, told_of(RolloutEngineError()))

    def _unknown(self) -> web.Response:
        if not self._warned:
            self._warned = True
            log.warning("a request came with a token that is not, or no longer, this rollout's")
        return web.Response(status=404, text="not found")

    def _refuse(self, route: Route, told: Told) -> web.Response:
        """A request that could not be a model call: its rollout's row says so."""
        self._session.refused(f"refused with {told.status}: {told.message}")
        return _refusal(route, told)

    async def _answer(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        if route.action == LIST:
            return _json(route.format.models(self._session.models or ["default"]))
        try:
            async with asyncio.timeout(self._limits.body_s):
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._limits.max_body_bytes} bytes"
            return self._refuse(route, Told(413, text, "request_too_large"))
        except TimeoutError:
            return self._refuse(route, Told(408, f"no whole body within {self._limits.body_s:g} s", "timeout"))
        body = object_of(await _loaded(raw), "body")
        asked = route.format.parse(body, route.model, route.stream)
        if route.action == COUNT:
            return _json(route.format.count(len(encode(asked.messages)) // BYTES_PER_TOKEN + 1))
        if route.format is GEMINI and route.stream and request.query.get("alt") != "sse":
            raise Malformed("alt", "a stream is sent as events: ask with ?alt=sse")
        session = self._session
        if session.models and asked.model not in session.models:
            text = f"there is no model {asked.model!r:.200} in this run"
            return self._refuse(route, Told(404, text, "model_not_found"))
        passing = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
        call = Call(role_of(request.headers, asked, session.rules), asked_with(asked, session.overrides), passing)
        passed = self._passed(route, body, raw) if session.passes(route.format.name) else None
        return await self._call(request, route, call, passed)

    def _passed(self, route: Route, body: dict[str, Any], raw: bytes) -> bytes:
        """The body as it goes to a server of the same format: byte by byte the agent's, where the run fixes nothing."""
        sent = route.format.overridden(body, self._session.overrides)
        return raw if sent is body else encode(sent).encode("ascii")

    async def _call(self, request: web.BaseRequest, route: Route, call: Call, body: bytes | None) -> web.StreamResponse:
        session, asked = self._session, call.asked
        if not asked.stream:
            if body is not None:
                return web.Response(body=(await session.pass_on(call, body)).body, content_type=_JSON)
            completion = await session.complete(call)
            return _json(route.format.response(completion, asked, next(self._numbers), int(time.time())))
        writer = route.format.writer(asked, next(self._numbers), int(time.time()))
        out = Outgoing(request, writer.ping, self._limits.keep_alive, EVENTS)
        frames = _written(session, call, writer) if body is None else _passed_on(session, call, body)
        return await out.send(frames, lambda error: writer.error(*told_of(error)))


async def _written(session: Session, call: Call, writer: Writer) -> AsyncGenerator[bytes, None]:
    """The answer in the agent's format. Nothing is sent before there is a first piece."""
    begin = writer.begin()
    pieces = session.stream(call)
    async with contextlib.aclosing(pieces):
        async for delta in pieces:
            data = writer.write(delta) if delta.completion is None else writer.end(delta.completion)
            if data:
                yield begin + data
                begin = b""


async def _passed_on(session: Session, call: Call, body: bytes) -> AsyncGenerator[bytes, None]:
    pieces = session.pass_stream(call, body)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            yield piece.data


async def _loaded(raw: bytes) -> Any:
    """The body's JSON. Raises Malformed."""
    try:
        if len(raw) > PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(load_big_json, raw)
        return json.loads(raw)
    except ModelBadResponse:
        fault = "this is no JSON"
    except (ValueError, RecursionError) as error:
        fault = f"this is no JSON: {error}"
    raise Malformed("body", fault)


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=encode(data).encode("ascii"), content_type=_JSON)


def _refusal(route: Route, told: Told) -> web.Response:
    body = encode(route.format.error(told.status, told.message, told.code)).encode("ascii")
    return web.Response(status=told.status, body=body, content_type=_JSON, headers=NO_RETRY)
