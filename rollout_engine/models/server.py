"""A server over scripted and recorded models in every wire format, with their latency and faults as real HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from typing import Any

from aiohttp import web

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, ModelMissingAnswer
from rollout_engine.formats import CHAT
from rollout_engine.formats.base import Asked, Format
from rollout_engine.formats.pieces import deltas_of
from rollout_engine.formats.routes import COUNT, LIST, Route, route_of
from rollout_engine.models import make_local_model
from rollout_engine.models.classify import MISSING_ANSWER
from rollout_engine.models.local import Fault, LocalModel, Play
from rollout_engine.models.server_call import BadRequest, ServerCall, Solution, Tasks, call_of
from rollout_engine.models.server_limits import Admission, ServerLimits
from rollout_engine.models.server_stats import Call, ServerStats
from rollout_engine.models.sse import DONE, chunks_of
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion

MAX_REQUEST_BYTES = 256 * 2**20
SHUTDOWN_S = 1.0
"""Calls that are being answered when the server is closed have this long to end."""
_BACKLOG = 4096
_BYTES_PER_TOKEN = 4
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}


class ModelServer:
    """`async with ModelServer({...}) as server:` serves models at `server.url` until it is closed.

    `models` are of kind scripted and replay, by the name under which they are called; `solutions` are the tasks'
    own by task id: a final answer, or {"script": ...}. A call says which rollout it is for by the `x-rollout-seed`
    header; without it, `prompts` (text of the last user message -> task id) finds the task and `seed` is the seed.
    `port` 0 takes a free one. Calls above `max_concurrency`, or above the hidden `limits`, get a 429.
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
        self._models: dict[str, LocalModel] = {name: make_local_model(spec) for name, spec in models.items()}
        self._tasks = Tasks(solutions or {}, prompts or {})
        self._host, self._port, self._seed = host, port, seed
        self._admission = Admission(limits or ServerLimits(concurrency=max_concurrency))
        self._stats = ServerStats(self._models)
        self._closing = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """What a model's `base_url` is: up to and including /v1, where all formats are served."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def stats(self) -> dict[str, Any]:
        """Counters since the start, the same as GET /stats."""
        return self._stats.as_dict()

    async def __aenter__(self) -> ModelServer:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for prefix in ("", "/v1"):
            app.router.add_get(f"{prefix}/health", self._show_health)
            app.router.add_get(f"{prefix}/stats", self._show_stats)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=_BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            reason = error.strerror or str(error)
            raise InputError(
                f"cannot listen on {self._host}:{self._port}: {reason}", fix="choose another --port or --host"
            ) from error
        self._runner, self._port = runner, runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _show_stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        route = route_of(request.method, request.path, "anthropic-version" in request.headers)
        if route is None:
            raise web.HTTPNotFound(text=f"there is no {request.method} {request.path} here")
        if route.action == LIST:
            return web.json_response(route.format.models(list(self._models)))
        if route.action == COUNT:
            return web.json_response(route.format.count(len(await request.read()) // _BYTES_PER_TOKEN + 1))
        return await self._ask(request, route)

    async def _ask(self, request: web.Request, route: Route) -> web.StreamResponse:
        try:
            wanted = call_of(await request.read(), request.headers, route, self._tasks, self._seed)
            model = self._models.get(wanted.asked.model)
            if model is None:
                raise BadRequest(f"there is no model {wanted.asked.model!r}", 404, "model_not_found")
        except BadRequest as error:
            self._stats.count("bad_requests")
            return _error(route.format, error.status, str(error), error.code)
        wait_s = self._admission.admit(asyncio.get_running_loop().time(), self._stats.in_flight)
        if wait_s is not None:
            self._stats.count("busy")
            return _rate_limited(route.format, wait_s, self._admission.limits.retry_after)
        with self._stats.call(wanted.asked.model) as call:
            return await self._answer(request, route.format, wanted, model, call)

    async def _answer(
        self, request: web.Request, format: Format, wanted: ServerCall, model: LocalModel, call: Call
    ) -> web.StreamResponse:
        asked = wanted.asked
        try:
            play = model.play(asked.messages, asked.sampling, asked.tools, wanted.context)
        except ModelMissingAnswer as error:
            self._stats.count("missing")
            return _error(format, 404, str(error), MISSING_ANSWER)
        if play.fault is not None:
            self._stats.count(play.fault.value)
            return await self._fail(request, format, play)
        await asyncio.sleep(play.latency_s * self._admission.slowness(self._stats.in_flight))
        self._stats.count("answered")
        completion, created = play.answer.completion(), int(time.time())
        if asked.stream:
            return await _send_events(request, streamed(format, asked, completion, call.number, created), call)
        body = encode(format.response(completion, asked, call.number, created))
        return web.Response(body=body.encode("ascii"), headers=_JSON)

    async def _fail(self, request: web.Request, format: Format, play: Play) -> web.StreamResponse:
        """The fault as HTTP."""
        if play.fault is Fault.RATE_LIMITED:
            return _rate_limited(format, play.retry_after_s)
        if play.fault is Fault.HANG:
            await self._closing.wait()  # or the client's going away, which cancels this
            return _error(format, 503, "the server is closing", "closing")
        await asyncio.sleep(play.latency_s)
        if play.fault is Fault.SERVER_ERROR:
            return _error(format, 500, "a scripted failure", "server_error")
        if play.fault is Fault.GARBAGE:
            return web.Response(body=b"<html>this is no completion</html>", headers=_JSON)
        return await _cut(request)


async def _send_events(request: web.Request, events: Iterator[bytes], call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    waiting = b""
    for event in events:
        if waiting:
            await response.write(waiting)
        waiting = event
    call.end()
    await response.write(waiting)
    await response.write_eof()
    return response


def streamed(format: Format, asked: Asked, completion: Completion, number: int, created: int) -> Iterator[bytes]:
    """An answer as the events of its format, the text in pieces."""
    if format is CHAT:  # with the tokens of each piece, which no other format knows
        for chunk in chunks_of(completion, asked.model, number, created):
            yield b"data: " + encode(chunk).encode("ascii") + b"\n\n"
        yield b"data: " + DONE + b"\n\n"
        return
    writer = format.writer(asked, number, created)
    yield writer.begin()
    for delta in deltas_of(completion):
        yield writer.write(delta)
    yield writer.end(completion)


async def _cut(request: web.Request) -> web.StreamResponse:
    """The beginning of an answer, and then the end of its connection."""
    response = web.StreamResponse(headers={**_JSON, "content-length": "4096"})
    await response.prepare(request)
    await response.write(b'{"id":"chatcmpl-0","choices":[{"index":0,"message":{"role":"assistant","content":"The')
    if request.transport is not None:
        request.transport.close()
    return response


def _rate_limited(format: Format, retry_after_s: float, form: str = "seconds") -> web.Response:
    response = _error(format, 429, "too many calls", "rate_limit_exceeded")
    if form == "seconds":
        response.headers["retry-after"] = f"{retry_after_s:.3f}"
    elif form == "date":
        response.headers["retry-after"] = formatdate(math.ceil(time.time() + retry_after_s), usegmt=True)
    return response


def _error(format: Format, status: int, message: str, code: str) -> web.Response:
    body = encode(format.error(status, message, code))
    return web.Response(status=status, body=body.encode("ascii"), headers=_JSON)
