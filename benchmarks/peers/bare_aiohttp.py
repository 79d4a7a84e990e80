"""The raw limit: n posts with one bare aiohttp session, each answer parsed and matched, nothing kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import uvloop

from benchmarks.cases import case_arguments
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import API_KEY, MODEL, WARM_UP, question, scored


async def post_all(session: aiohttp.ClientSession, url: str, n: int, in_flight: int) -> int:
    """How many of n posts were answered right."""
    right = 0
    indexes: Iterator[int] = iter(range(n))

    async def worker() -> None:
        nonlocal right
        for index in indexes:
            body = {"model": MODEL, "messages": [{"role": "user", "content": question(index)}]}
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            right += scored(answer["choices"][0]["message"]["content"])

    await asyncio.gather(*(worker() for _ in range(min(n, in_flight))))
    return right


async def run(url: str, n: int, in_flight: int) -> Meter:
    """Post n times; the connections are made anew within the measured part, as in the other cases."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    for count in (WARM_UP, n):
        connector = aiohttp.TCPConnector(limit=in_flight)
        with Meter() as meter:
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                right = await post_all(session, url + "/chat/completions", count, in_flight)
        if right != count:
            raise SystemExit(f"{count - right} of {count} answers were wrong")
    return meter


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    args = parser.parse_args()
    runner = uvloop.run if args.loop == "uvloop" else asyncio.run
    meter = runner(run(args.url, args.n, args.in_flight))
    emit(result(f"bare aiohttp, {args.loop}", args.n, args.in_flight, meter, versions=versions(["aiohttp", "uvloop"])))


if __name__ == "__main__":
    main()
