"""CPU of a model call through the interception proxy, recorded, against a bare pass-through in the same run.

    python -m benchmarks.proxy_case [-n 2048] [--streams 96]

Non-streamed chat calls, 256 in flight, each rollout's conversation growing from call to call; and streams of 500
chunks, 32 in flight. Only the proxy's own process is counted, in rounds that alternate. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp

from benchmarks.cases import ROOT, model_server
from benchmarks.measure import cpu_seconds, emit

IN_FLIGHT, STREAMS_IN_FLIGHT, ROUNDS = 256, 32, 3


@contextmanager
def proxy(kind: str, url: str) -> Iterator[tuple[int, list[str]]]:
    """One kind of proxy as a process: its pid and its base URLs."""
    argv = [sys.executable, "-m", "benchmarks.proxy_serve", kind, "--url", url, "--doors", str(IN_FLIGHT)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(timeout=30)


class Agent:
    """One rollout's agent: every call sends all that was said before."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http, self._url = http, base + "/chat/completions"
        self._said: list[dict[str, Any]] = [{"role": "user", "content": "What is six times seven? " * 20}]

    async def call(self) -> None:
        async with self._http.post(self._url, json={"model": "m", "messages": self._said}) as reply:
            assert reply.status == 200, await reply.text()
            message = (await reply.json())["choices"][0]["message"]
        self._said += [message, {"role": "user", "content": "And now?"}]

    async def stream(self) -> None:
        body = {"model": "m", "messages": self._said[:1], "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.post(self._url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            raw = await reply.read()
        assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]


async def drive(bases: list[str], n: int, in_flight: int, do: Callable[[Agent], Awaitable[None]]) -> None:
    """`n` calls by `in_flight` agents."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def work(number: int) -> None:
            agent = Agent(http, bases[number % len(bases)])
            for _ in range(n // in_flight):
                await do(agent)

        await asyncio.gather(*(work(number) for number in range(in_flight)))


def cost_ms(pid: int, bases: list[str], n: int, in_flight: int, do: Callable[[Agent], Awaitable[None]]) -> float:
    """CPU milliseconds of the proxy for one call."""
    before = cpu_seconds(pid)
    asyncio.run(drive(bases, n, in_flight, do))
    return (cpu_seconds(pid) - before) / n * 1e3


def measure(n: int, streams: int) -> dict[str, Any]:
    whole: dict[str, list[float]] = {"ours": [], "httpx": []}
    streamed: dict[str, list[float]] = {"ours": [], "aiohttp": []}
    with ExitStack() as stack:
        url = stack.enter_context(model_server("--latency-ms", "20"))
        proxies = {kind: stack.enter_context(proxy(kind, url)) for kind in ("ours", "httpx", "aiohttp")}
        for kind in proxies:  # imports, connections
            cost_ms(*proxies[kind], IN_FLIGHT, IN_FLIGHT, Agent.call)
        for _ in range(ROUNDS):
            for kind in whole:
                whole[kind].append(cost_ms(*proxies[kind], n, IN_FLIGHT, Agent.call))
            for kind in streamed:
                streamed[kind].append(cost_ms(*proxies[kind], streams, STREAMS_IN_FLIGHT, Agent.stream))
    found = {f"call_{kind}_ms": statistics.median(costs) for kind, costs in whole.items()}
    found |= {f"stream_{kind}_ms": statistics.median(costs) for kind, costs in streamed.items()}
    return {
        "case": "proxy",
        "n": n,
        "in_flight": IN_FLIGHT,
        "streams": streams,
        **{name: round(value, 3) for name, value in found.items()},
        "call_ratio": round(found["call_ours_ms"] / found["call_httpx_ms"], 2),
        "stream_ratio": round(found["stream_ours_ms"] / found["stream_aiohttp_ms"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2048, help="calls that are not streamed, in each round")
    parser.add_argument("--streams", type=int, default=96, help="streams, in each round")
    args = parser.parse_args()
    emit(measure(args.n, args.streams))


if __name__ == "__main__":
    main()
