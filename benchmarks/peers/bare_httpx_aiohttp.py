"""The limit of httpx with the aiohttp transport: n posts, each answer parsed and matched, nothing kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import uvloop
from httpx_aiohttp import AiohttpTransport

from benchmarks.cases import case_arguments
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import API_KEY, MODEL, WARM_UP, question, scored


async def post_all(client: httpx.AsyncClient, n: int, in_flight: int) -> int:
    """How many of n posts were answered right."""
    right = 0
    indexes: Iterator[int] = iter(range(n))

    async def worker() -> None:
        nonlocal right
        for index in indexes:
            body = {"model": MODEL, "messages": [{"role": "user", "content": question(index)}]}
            response = await client.post("/chat/completions", json=body)
            response.raise_for_status()
            right += scored(response.json()["choices"][0]["message"]["content"])

    await asyncio.gather(*(worker() for _ in range(min(n, in_flight))))
    return right


async def run(url: str, n: int, in_flight: int) -> Meter:
    """Post n times; the connections are made anew within the measured part, as in the other cases."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    for count in (WARM_UP, n):
        transport = AiohttpTransport(limits=limits)
        with Meter() as meter:
            async with httpx.AsyncClient(base_url=url, headers=headers, transport=transport, timeout=60.0) as client:
                right = await post_all(client, count, in_flight)
        if right != count:
            raise SystemExit(f"{count - right} of {count} answers were wrong")
    return meter


def main() -> None:
    args = case_arguments(__doc__).parse_args()
    meter = uvloop.run(run(args.url, args.n, args.in_flight))
    packages = versions(["httpx", "httpx-aiohttp", "aiohttp", "uvloop"])
    emit(result("httpx + httpx-aiohttp, uvloop", args.n, args.in_flight, meter, versions=packages))


if __name__ == "__main__":
    main()
