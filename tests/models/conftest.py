"""Real servers whose answers a test writes itself, and the short way to make a call."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rollout_engine.config import ModelSpec
from rollout_engine.models import ModelClient, make_client
from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec

MESSAGES: list[Message] = [{"role": "user", "content": "What is six times seven?"}]
KEY = "sk-secret/0123456789abcdef"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Backend:
    """A running server, and the requests that it has seen."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)


@contextlib.asynccontextmanager
async def backend(handler: Handler) -> AsyncIterator[Backend]:
    """Serves chat completions with one handler."""
    seen = Backend()

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.bodies.append(json.loads(await request.read()))
        seen.headers.append(request.headers.copy())
        return await handler(request)

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        seen.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield seen
    finally:
        await runner.cleanup()


async def stream_to(request: web.Request) -> web.StreamResponse:
    """The begun answer to a streamed call, for events to be written to."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


class Hanging:
    """A handler that never answers: sets `arrived` for a call that is there, and `gone` once its caller is not."""

    def __init__(self) -> None:
        self.arrived, self.gone = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.set()
        raise AssertionError


@contextlib.asynccontextmanager
async def raw_backend(reply: bytes) -> AsyncIterator[str]:
    """A TCP server that reads a request, writes these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


def answering(*replies: web.Response | Callable[[], web.Response]) -> Handler:
    """A handler that gives these replies in turn, and the last one from then on."""
    left = list(replies)

    async def handler(request: web.Request) -> web.StreamResponse:
        reply = left.pop(0) if len(left) > 1 else left[0]
        return (
            reply() if callable(reply) else reply.__class__(status=reply.status, body=reply.body, headers=reply.headers)
        )

    return handler


def good(content: str | None = "42", **fields: Any) -> web.Response:
    """A plain 200."""
    message = {"role": "assistant", "content": content}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], **fields})


def bad(status: int, error: Any = "no", headers: dict[str, str] | None = None) -> web.Response:
    """An error response in the OpenAI form."""
    return web.json_response({"error": error}, status=status, headers=headers)


def openai_spec(url: str, **fields: Any) -> ModelSpec:
    """The spec of a model at a test server, with retries off unless asked for."""
    return ModelSpec(**{"name": "m", "kind": "openai", "model": "m1", "base_url": url, "call_retries": 0, **fields})


@contextlib.asynccontextmanager
async def client(spec: ModelSpec, api_key: str | None = None) -> AsyncIterator[ModelClient]:
    """A client that is closed at the end."""
    made = make_client(spec, api_key=api_key)
    try:
        yield made
    finally:
        await made.close()


def context(
    task_id: str = "t", *, solution: str | None = "42", attempt: int = 0, seed: int = 0, turn: int = 0
) -> CallContext:
    return CallContext(seed, 0, task_id, "m", attempt, turn, solution)


async def ask(
    made: ModelClient,
    where: CallContext | None = None,
    *,
    messages: list[Message] | None = None,
    sampling: Sampling | None = None,
    tools: tuple[ToolSpec, ...] = (),
    within_s: float = 60.0,
) -> Completion:
    """One call."""
    return await made.complete(
        messages or MESSAGES,
        sampling=sampling or Sampling(),
        tools=tools,
        deadline=asyncio.get_running_loop().time() + within_s,
        context=where or context(),
    )


async def ask_stream(
    made: ModelClient,
    where: CallContext | None = None,
    *,
    sampling: Sampling | None = None,
    within_s: float = 60.0,
    into: list[Delta] | None = None,
) -> list[Delta]:
    """One streamed call, to its end; `into` keeps the pieces that came before an error."""
    deadline = asyncio.get_running_loop().time() + within_s
    got = into if into is not None else []
    pieces = made.stream(MESSAGES, sampling=sampling or Sampling(), deadline=deadline, context=where or context())
    async for piece in pieces:
        got.append(piece)
    return got
