"""Streams that go wrong.

.venv/bin/pytest tests/models/test_streaming.py
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.errors import (
    LimitReached,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelRateLimited,
    ModelRefused,
    ModelServerError,
)
from rollout_engine.types import Delta, Sampling

from .conftest import KEY, MESSAGES, Handler, ask_stream, backend, client, context, openai_spec, stream_to


def events(*payloads: Any, cut: bool = False) -> Handler:
    """A handler that streams these payloads (bytes as they are)."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for payload in payloads:
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            await response.write(b"data: " + data + b"\n\n")
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return handler


def piece(text: str | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}],
        **fields,
    }


async def test_token_ids_and_usage_come_from_the_chunks() -> None:
    first = piece("4", prompt_token_ids=[1, 2], weight_version="w")
    first["choices"][0]["token_ids"] = [10]
    second = piece("2", "stop")
    second["choices"][0]["token_ids"] = [11]
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    async with backend(events(first, second, usage, b"[DONE]")) as server, client(openai_spec(server.url)) as model:
        *texts, last = await ask_stream(model)
    assert server.bodies[0]["stream"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert texts == [Delta("4"), Delta("2")]
    completion = last.completion
    assert completion is not None
    assert (completion.prompt_token_ids, completion.completion_token_ids) == ([1, 2], [10, 11])
    assert completion.usage.completion_tokens == 2
    assert completion.weight_version == "w"


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (events(piece("4"), cut=True), ModelConnectionError),
        (events(piece("4")), ModelConnectionError),
        (events(piece("4"), b"[DONE]"), ModelConnectionError),
        (events(piece("4"), b"{"), ModelBadResponse),
        (events(piece("4"), [1]), ModelBadResponse),
        (events(piece("4"), {"choices": 7}), ModelBadResponse),
        (events(piece("4"), {"error": {"message": "out of memory", "code": 500}}), ModelServerError),
        (events(piece("4"), {"error": {"message": "slow down", "code": 429}}), ModelRateLimited),
        (events(piece("4"), {"error": "?"}), ModelServerError),
        (events(piece("4"), {"error": {"code": "context_length_exceeded"}}), LimitReached),
        (events(piece("4"), piece(None, "content_filter"), b"[DONE]"), ModelRefused),
        (events(piece("4"), piece(None, "abort"), b"[DONE]"), ModelServerError),
    ],
)
async def test_a_stream_that_goes_wrong_is_a_typed_error_after_its_text(
    handler: Handler, error: type[Exception]
) -> None:
    got: list[Delta] = []
    async with backend(handler) as server, client(openai_spec(server.url, call_retries=3)) as model:
        with pytest.raises(error) as caught:
            await ask_stream(model, into=got)
    assert got == [Delta("4")]
    assert type(caught.value) is error
    assert caught.value.__context__ is None
    assert len(server.bodies) == 1  # what was handed out cannot be taken back by another try


async def test_the_key_is_in_no_error_of_a_stream() -> None:
    async with (
        backend(events({"error": {"message": f"key {KEY}"}})) as server,
        client(openai_spec(server.url), KEY) as m,
    ):
        with pytest.raises(ModelError) as caught:
            await ask_stream(m)
    assert KEY not in str(caught.value)


async def test_a_stream_that_is_left_early_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        try:
            while True:
                await response.write(b"data: " + json.dumps(piece("x")).encode() + b"\n\n")
                await asyncio.sleep(0)
        finally:
            gone.set()

    async with backend(endless) as server, client(openai_spec(server.url)) as model:
        deadline = asyncio.get_running_loop().time() + 60
        pieces = model.stream(MESSAGES, sampling=Sampling(), deadline=deadline, context=context())
        assert await anext(pieces) == Delta("x")
        await pieces.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(gone.wait(), 60)
