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
from typing import Any

import uvloop
from aiohttp import web

from benchmarks.work import ANSWER, EXPECTED, LATENCY_S, MODEL

USAGE = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
TOOL, COMMAND = "bash", f"echo {EXPECTED} > answer.txt"
"""Whoever offers a tool of this name, and asks for a stream, is told to call it once before the answer."""


def completion(answer: str) -> bytes:
    """The body of every completion."""
    message = {"role": "assistant", "content": answer}
    body = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": USAGE,
    }
    return json.dumps(body).encode()


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


CHUNK = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
"""What all pieces of a streamed completion share."""


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One piece of a streamed completion."""
    return event({**CHUNK, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})


def whole(answer: str) -> bytes:
    """A stream that has all of an answer in one piece."""
    usage = event({**CHUNK, "choices": [], "usage": USAGE})
    return chunk({"role": "assistant", "content": answer}) + chunk({}, "stop") + usage + b"data: [DONE]\n\n"


def tool_call() -> bytes:
    """A stream that calls the tool."""
    function = {"name": TOOL, "arguments": json.dumps({"command": COMMAND})}
    delta = {"role": "assistant", "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]}
    usage = event({**CHUNK, "choices": [], "usage": USAGE})
    return chunk(delta) + chunk({}, "tool_calls") + usage + b"data: [DONE]\n\n"


def wants_tool(body: bytes) -> bool:
    """Whether a request offers the tool and holds no result of a tool yet."""
    plain = body.replace(b" ", b"")
    return f'"name":"{TOOL}"'.encode() in plain and b'"role":"tool"' not in plain


class Stub:
    """Answers after `latency_s`, and counts."""

    def __init__(self, answer: str, latency_s: float, chunks: int = 500, chunk_s: float = 0.002) -> None:
        self._answer, self._body = answer, completion(answer)
        self._latency_s, self._chunks, self._chunk_s = latency_s, chunks, chunk_s
        self._served = self._in_flight = self._peak = 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "POST", "/v1/chat/completions":
                return await self._complete(request)
            case "POST", "/rollout":
                return await self._rollout(await request.json())
            case "GET", "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            case "GET" | "POST", "/stats":
                return self._stats(reset=request.method == "POST")
        return web.json_response({"error": {"message": f"no {request.method} {request.path} here"}}, status=404)

    async def _stream(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """`chunks` pieces, each written by itself, as a server sends its tokens; 0: the fixed answer after the wait."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if not self._chunks:
            await self._wait()
            await response.prepare(request)
            await response.write(tool_call() if wants_tool(body) else whole(self._answer))
            return response
        await response.prepare(request)
        for number in range(self._chunks):
            await response.write(chunk({"content": f"word{number % 10} "}))
            await asyncio.sleep(self._chunk_s)
        usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": self._chunks}}
        await response.write(chunk({}, "stop") + event(usage) + b"data: [DONE]\n\n")
        self._served += 1
        return response

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if b'"stream":true' in body.replace(b" ", b""):
            return await self._stream(request, body)
        await self._wait()
        return web.Response(body=self._body, content_type="application/json")

    async def _rollout(self, request: dict[str, Any]) -> web.Response:
        """What a task app answers: the reward of a rollout that it ran itself."""
        await self._wait()
        metrics = {"outcome_reward": 1.0, "outcome_score": 1.0, "reward_mean": 1.0, "num_steps": 1, "num_episodes": 1}
        return web.json_response({"run_id": request["run_id"], "metrics": metrics})

    async def _wait(self) -> None:
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)
        try:
            await asyncio.sleep(self._latency_s)
        finally:
            self._in_flight -= 1
        self._served += 1

    def _stats(self, *, reset: bool) -> web.Response:
        stats = {"served": self._served, "peak_in_flight": self._peak}
        if reset:
            self._served, self._peak = 0, self._in_flight
        return web.json_response(stats)


async def serve(stub: Stub, *, exit_with_stdin: bool) -> None:
    """Serve on a free port of 127.0.0.1 until cancelled, or until standard input ends."""
    runner = web.ServerRunner(web.Server(stub, keepalive_timeout=600.0))
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
    parser.add_argument("--chunks", type=int, default=500, help="pieces of a streamed answer; 0: the fixed one, whole")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(KeyboardInterrupt):
        stub = Stub(args.answer, args.latency_ms / 1e3, args.chunks)
        uvloop.run(serve(stub, exit_with_stdin=args.exit_with_stdin))


if __name__ == "__main__":
    main()
