"""The proxies that `proxy_case` compares, as a process of its own whose CPU time is what is measured.

    python -m benchmarks.proxy_serve ours|httpx|aiohttp --url URL --doors N

Prints its base URLs as one JSON line, serves until standard input ends. `ours`: one door per rollout, recorded.
`httpx`: bare pass-through by httpx with the aiohttp transport. `aiohttp`: bare pass-through by aiohttp alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import httpx
import uvloop
from aiohttp import web
from httpx_aiohttp import AiohttpTransport

from benchmarks.work import MODEL
from rollout_engine.agentclock import AgentClock
from rollout_engine.bound import BoundModel, Model
from rollout_engine.config import ModelSpec
from rollout_engine.models import make_client, sampling_of
from rollout_engine.permits import UNLIMITED
from rollout_engine.proxy.door import Door
from rollout_engine.proxy.rollout_session import RolloutSession, SessionLimits
from rollout_engine.proxy.token import new_token
from rollout_engine.types import CallContext, CallGate, RolloutRecord, Turn

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def bare_httpx(url: str, closing: AsyncExitStack) -> Handler:
    """Hands a body on and its answer back, and looks at neither."""
    client = httpx.AsyncClient(transport=AiohttpTransport(), timeout=600)
    closing.push_async_callback(client.aclose)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        reply = await client.post(url, content=await request.read(), headers={"content-type": "application/json"})
        return web.Response(status=reply.status_code, body=reply.content, content_type="application/json")

    return handle


def bare_aiohttp(url: str, closing: AsyncExitStack) -> Handler:
    """The same, streamed."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    closing.push_async_callback(session.close)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        async with session.post(url, data=await request.read(), headers=headers) as reply:
            response = web.StreamResponse(status=reply.status, headers={"content-type": reply.content_type})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    return handle


async def listen(server: web.Server) -> int:
    made = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=1024)
    return made.sockets[0].getsockname()[1]


async def open_doors(url: str, doors: int, closing: AsyncExitStack) -> list[str]:
    """One rollout's proxy each, over one client: as on a host."""
    spec = ModelSpec(name="m", kind="openai", model=MODEL, base_url=url)
    model = Model(spec, make_client(spec), sampling_of(spec))
    model.permits.renew(UNLIMITED)
    closing.push_async_callback(model.client.close)
    bases = []
    for number in range(doors):
        record = RolloutRecord(number, 0, f"t{number}", "m", 0)

        def of_call(turn: int, gate: CallGate, task_id: str = record.task_id) -> CallContext:
            return CallContext(0, 0, task_id, "m", 0, turn, gate=gate)

        bound = BoundModel(model, of_call, AgentClock(math.inf, math.inf), record)
        turns: list[Turn] = []
        session = RolloutSession(bound, SessionLimits(max_turns=10_000), turns.append)
        token = new_token()
        port = await listen(Door(session, token).server())
        bases.append(f"http://127.0.0.1:{port}/r/{token}/v1")
    return bases


async def serve(kind: str, url: str, doors: int) -> None:
    async with AsyncExitStack() as closing:
        if kind == "ours":
            bases = await open_doors(url, doors, closing)
        else:
            handler = (bare_httpx if kind == "httpx" else bare_aiohttp)(url + "/chat/completions", closing)
            port = await listen(web.Server(handler, access_log=None))
            bases = [f"http://127.0.0.1:{port}/v1"]
        print(json.dumps(bases), flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["ours", "httpx", "aiohttp"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--doors", type=int, default=256)
    args = parser.parse_args()
    uvloop.run(serve(args.kind, args.url, args.doors))


if __name__ == "__main__":
    main()
