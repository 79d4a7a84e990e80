"""CPU time of a model call: our client, the bare httpx transport, the server, and a scripted model in-process.

.venv/bin/python -m tests.models.measure
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable

import httpx
import httpx_aiohttp

from rollout_engine.config import ModelSpec
from rollout_engine.models import ModelClient, make_client
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.types import CallContext, Message, Sampling

MESSAGES: list[Message] = [{"role": "user", "content": "What is six times seven? " * 8}]
OPTIONS = {"latency_ms": 50, "skill": 0, "wrong": "The answer is 42. " * 10}

Call = Callable[[int], Awaitable[object]]


def server_cpu_s(server: ServerProcess) -> float:
    with open(f"/proc/{server.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(name: str, call: Call, server: ServerProcess, calls: int = 8192, in_flight: int = 256) -> None:
    async def worker(first: int, count: int) -> None:
        for number in range(count):
            await call(first + number)

    async with asyncio.TaskGroup() as warm:  # connections, caches
        for at in range(in_flight):
            warm.create_task(worker(at, 1))
    each = calls // in_flight
    began, cpu, served = time.perf_counter(), time.process_time(), server_cpu_s(server)
    async with asyncio.TaskGroup() as group:
        for at in range(in_flight):
            group.create_task(worker(at * each, each))
    calls = each * in_flight
    own, other = (1e3 * (spent / calls) for spent in (time.process_time() - cpu, server_cpu_s(server) - served))
    rate = calls / (time.perf_counter() - began)
    print(f"{name:40s} {own:7.3f} ms CPU a call   server {other:6.3f} ms   {rate:7.0f}/s", flush=True)


def through(model: ModelClient) -> Call:
    sampling, clock = Sampling(temperature=1.0), asyncio.get_running_loop().time

    async def call(number: int) -> object:
        where = CallContext(0, 0, f"t{number}", "m", 0, 0, "42")
        return await model.complete(MESSAGES, sampling=sampling, deadline=clock() + 600, context=where)

    return call


async def main(server: ServerProcess) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer key"}
    limits = httpx.Limits(max_connections=None)

    async def nap(number: int) -> None:
        await asyncio.sleep(0.05)

    async with httpx.AsyncClient(transport=httpx_aiohttp.AiohttpTransport(limits=limits), timeout=60) as bare:

        async def post(number: int) -> object:
            reply = await bare.post(f"{server.url}/chat/completions", content=body, headers=headers)
            return json.loads(reply.raise_for_status().content)

        for _ in range(3):
            await measure("httpx client, aiohttp transport", post, server)
            model = make_client(
                ModelSpec(name="m", kind="openai", model="m", base_url=server.url, seed_header=True), api_key="key"
            )
            await measure("our client", through(model), server)
            await model.close()
            scripted = make_client(ModelSpec(name="m", kind="scripted", options=OPTIONS))
            await measure("scripted in-process, 10,000 in flight", through(scripted), server, 60_000, 10_000)
            await measure("asyncio.sleep, 10,000 in flight", nap, server, 60_000, 10_000)


if __name__ == "__main__":
    with ServerProcess({"m": ModelSpec(name="m", kind="scripted", options=OPTIONS)}) as running:
        asyncio.run(main(running))
