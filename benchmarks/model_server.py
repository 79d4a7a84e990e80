"""A bare OpenAI-compatible chat-completions server with a fixed latency and a fixed answer.

    python -m benchmarks.model_server [--latency-ms 50] [--answer TEXT] [--exit-with-stdin]

Runs as a process of its own; its URL (up to and including /v1) is the first line that it prints. Its CPU time is
never counted. `GET /stats` says how many completions it gave and how many were in flight at most; `POST /stats`
says so and starts counting afresh.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from contextlib import suppress

import uvloop
from aiohttp import web

from benchmarks.work import ANSWER, LATENCY_S, MODEL


def completion(answer: str) -> bytes:
    """The body of every completion."""
    usage = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
    message = {"role": "assistant", "content": answer}
    body = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": usage,
    }
    return json.dumps(body).encode()


class Stub:
    """Answers after `latency_s`, and counts."""

    def __init__(self, answer: str, latency_s: float) -> None:
        self._body = completion(answer)
        self._latency_s = latency_s
        self._served = self._in_flight = self._peak = 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "POST", "/v1/chat/completions":
                return await self._complete(request)
            case "GET", "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            case "GET" | "POST", "/stats":
                return self._stats(reset=request.method == "POST")
        return web.json_response({"error": {"message": f"no {request.method} {request.path} here"}}, status=404)

    async def _complete(self, request: web.BaseRequest) -> web.Response:
        await request.read()
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)
        try:
            await asyncio.sleep(self._latency_s)
        finally:
            self._in_flight -= 1
        self._served += 1
        return web.Response(body=self._body, content_type="application/json")

    def _stats(self, *, reset: bool) -> web.Response:
        stats = {"served": self._served, "peak_in_flight": self._peak}
        if reset:
            self._served, self._peak = 0, self._in_flight
        return web.json_response(stats)


async def serve(answer: str, latency_s: float, *, exit_with_stdin: bool) -> None:
    """Serve on a free port of 127.0.0.1 until cancelled, or until standard input ends."""
    runner = web.ServerRunner(web.Server(Stub(answer, latency_s), keepalive_timeout=600.0))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=16_384)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}/v1", flush=True)
        if exit_with_stdin:
            await asyncio.to_thread(sys.stdin.buffer.read)
        else:
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=LATENCY_S * 1e3)
    parser.add_argument("--answer", default=ANSWER)
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(args.answer, args.latency_ms / 1e3, exit_with_stdin=args.exit_with_stdin))


if __name__ == "__main__":
    main()
