"""The OpenAI client against real servers: what it sends, and what every kind of answer becomes.

.venv/bin/pytest tests/models/test_openai.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
import traceback
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.errors import (
    InputError,
    LimitReached,
    ModelAuthError,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelMissingAnswer,
    ModelRateLimited,
    ModelRefused,
    ModelRequestError,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.models import make_client
from rollout_engine.models.http import WHOLE_BODY_BYTES
from rollout_engine.models.seed import SEED_HEADER, parse_seed_header
from rollout_engine.models.wire import completion_of, load_json, sampling_of
from rollout_engine.types import Delta, Message, Sampling, StopReason, ToolSpec, Usage

from .conftest import (
    KEY,
    MESSAGES,
    Hanging,
    answering,
    ask,
    ask_stream,
    backend,
    bad,
    client,
    context,
    good,
    openai_spec,
    raw_backend,
    stream_to,
)

OVERFLOW_VLLM = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."


@pytest.mark.parametrize("characters", [WHOLE_BODY_BYTES, 3_000_000])
async def test_a_large_request_arrives_whole_and_with_its_length(characters: int) -> None:
    """Images and long contexts: also where warnings are errors, as they are here."""
    messages: list[Message] = [{"role": "user", "content": "x" * characters}]
    async with backend(answering(good)) as server, client(openai_spec(server.url), KEY) as model:
        await ask(model, messages=messages)
    assert server.bodies[0]["messages"] == messages
    assert int(server.headers[0]["content-length"]) > characters
    assert "transfer-encoding" not in server.headers[0]


async def test_sends_what_was_asked_and_nothing_else() -> None:
    tool = ToolSpec("shell", "Runs a command", {"type": "object", "properties": {}})
    sampling = Sampling(temperature=0.5, max_tokens=7, stop=("END",), extra={"top_k": 3})
    async with backend(answering(good)) as server, client(openai_spec(server.url), KEY) as model:
        await ask(model, sampling=sampling, tools=(tool,))
        await ask(model)
    function = {"name": "shell", "description": "Runs a command", "parameters": {"type": "object", "properties": {}}}
    assert server.bodies[0] == {
        "model": "m1",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "top_k": 3,
        "tools": [{"type": "function", "function": function}],
    }
    assert server.bodies[1] == {"model": "m1", "messages": MESSAGES}
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert SEED_HEADER not in server.headers[0]


async def test_no_key_sends_no_authorization_and_blanks_around_a_key_are_dropped() -> None:
    async with backend(answering(good)) as server:
        async with client(openai_spec(server.url)) as model:
            await ask(model)
        async with client(openai_spec(server.url), f"  {KEY}\n") as model:
            await ask(model)
    assert "authorization" not in server.headers[0]
    assert server.headers[1]["authorization"] == f"Bearer {KEY}"


async def test_the_seed_header_names_the_rollout_without_its_solution() -> None:
    async with backend(answering(good)) as server, client(openai_spec(server.url, seed_header=True)) as model:
        await ask(model, context("tä/sk", attempt=3, seed=-5, solution="secret"))
    assert parse_seed_header(server.headers[0][SEED_HEADER]) == context("tä/sk", attempt=3, seed=-5, solution=None)
    assert "secret" not in server.headers[0][SEED_HEADER]


async def test_keeps_token_data_exactly_as_the_server_sent_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None}
    choice = {
        "message": message,
        "finish_reason": "tool_calls",
        "logprobs": {"content": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2}]},
        "token_ids": [5, 6],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    body = {"choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3], "weight_version": 7}
    async with backend(answering(lambda: web.json_response(body))) as server:
        spec = openai_spec(server.url, logprobs=True)
        async with client(spec) as model:
            completion = await ask(model, sampling=sampling_of(spec))
    assert server.bodies[0]["logprobs"] is True
    assert server.bodies[0]["return_token_ids"] is True
    assert completion.message == {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    assert completion.finish_reason == "tool_calls"
    assert completion.usage == Usage(3, 2, 1)
    assert (completion.prompt_token_ids, completion.completion_token_ids) == ([1, 2, 3], [5, 6])
    assert completion.logprobs == [-0.1, -2.0]
    assert completion.weight_version == "7"


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, None),
        ({"metadata": {"weight_version": "step-3"}}, {}, "step-3"),
        ({}, {"x-weight-version": "v9"}, "v9"),
        ({"weight_version": None, "metadata": None}, {}, None),
    ],
)
async def test_weight_version_is_taken_where_servers_put_it(
    fields: dict[str, Any], headers: dict[str, str], expected: str | None
) -> None:
    reply = good(**fields)
    reply.headers.update(headers)
    async with backend(answering(reply)) as server, client(openai_spec(server.url)) as model:
        assert (await ask(model)).weight_version == expected


async def test_null_token_data_is_tolerated() -> None:
    choice = {"message": {"content": "x"}, "finish_reason": None, "logprobs": None, "token_ids": None}
    body = {"choices": [choice], "usage": None, "prompt_token_ids": None}
    async with backend(answering(lambda: web.json_response(body))) as server, client(openai_spec(server.url)) as model:
        completion = await ask(model)
    assert completion.message == {"role": "assistant", "content": "x"}
    assert completion.finish_reason == "unknown"
    assert completion.completion_token_ids is completion.logprobs is completion.prompt_token_ids is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (bad(401), ModelAuthError),
        (bad(403), ModelAuthError),
        (bad(404, {"message": "no such model", "code": "model_not_found"}), ModelRequestError),
        (bad(404, {"message": "not recorded", "code": "missing_answer"}), ModelMissingAnswer),
        (bad(400, {"message": "bad tool", "code": 400}), ModelRequestError),
        (bad(422, "just a text"), ModelRequestError),
        (bad(400, {"message": "filtered", "code": "content_filter"}), ModelRefused),
        (bad(408), ModelServerError),
        (bad(429), ModelRateLimited),
        (bad(500), ModelServerError),
        (bad(503), ModelServerError),
        (bad(599), ModelServerError),
        (web.Response(status=301, headers={"location": "https://elsewhere/"}), ModelRequestError),
        (web.Response(status=500, body=b"\xff\x00<html>"), ModelServerError),
    ],
)
async def test_refusals_are_classified_by_status_and_code(reply: web.Response, error: type[ModelError]) -> None:
    async with backend(answering(reply)) as server, client(openai_spec(server.url)) as model:
        with pytest.raises(error) as caught:
            await ask(model)
        with pytest.raises(error) as streamed:
            await ask_stream(model)
    for found in (caught.value, streamed.value):
        assert type(found) is error
        assert str(reply.status) in str(found)
        assert "127.0.0.1" in str(found)


@pytest.mark.parametrize(
    "reply",
    [
        bad(400, {"message": "too long", "code": "context_length_exceeded"}),
        bad(400, {"message": OVERFLOW_VLLM, "type": "BadRequestError", "code": 400}),
        web.json_response({"object": "error", "message": OVERFLOW_VLLM, "code": 400}, status=400),
    ],
)
async def test_a_prompt_that_does_not_fit_is_a_limit_and_not_a_failure(reply: web.Response) -> None:
    async with backend(answering(reply)) as server, client(openai_spec(server.url, call_retries=3)) as model:
        with pytest.raises(LimitReached) as caught:
            await ask(model)
        with pytest.raises(LimitReached):
            await ask_stream(model)
    assert caught.value.reason is StopReason.CONTEXT_OVERFLOW
    assert len(server.bodies) == 2


async def test_words_about_context_decide_nothing_but_a_400() -> None:
    async with backend(answering(bad(500, {"message": OVERFLOW_VLLM}))) as server, client(openai_spec(server.url)) as m:
        with pytest.raises(ModelServerError):
            await ask(m)


def choice(**fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "x"}
    return {"choices": [{"message": message, "finish_reason": "stop", **fields}]}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", ModelBadResponse),
        (b"<html>", ModelBadResponse),
        (b"\xff\xfe", ModelBadResponse),
        (b"[" * 100_000, ModelBadResponse),
        (b"[]", ModelBadResponse),
        (b'{"choices": []}', ModelBadResponse),
        (b'{"choices": [7]}', ModelBadResponse),
        (b'{"error": {"message": "in a 200", "code": 500}}', ModelBadResponse),
        (json.dumps(choice(message=None)).encode(), ModelBadResponse),
        (json.dumps(choice(message={"content": 7})).encode(), ModelBadResponse),
        (json.dumps(choice(message={"content": "", "tool_calls": "x"})).encode(), ModelBadResponse),
        (json.dumps(choice(token_ids=["a"])).encode(), ModelBadResponse),
        (json.dumps(choice(token_ids=[2**31])).encode(), ModelBadResponse),
        (json.dumps(choice(finish_reason="content_filter")).encode(), ModelRefused),
        (json.dumps(choice(finish_reason="abort")).encode(), ModelServerError),
    ],
)
async def test_a_200_that_is_no_completion(body: bytes, error: type[ModelError]) -> None:
    async with backend(answering(web.Response(body=body))) as server, client(openai_spec(server.url)) as model:
        with pytest.raises(error) as caught:
            await ask(model)
    assert type(caught.value) is error
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_values_that_fit_no_column_do_not_reach_one() -> None:
    usage = {"prompt_tokens": 10**30, "completion_tokens": -1}
    body = json.dumps({**choice(message={"content": "\ud800", "role": "\udfff"}), "usage": usage}).encode()
    completion = completion_of(load_json(body))
    assert completion.usage == Usage()
    assert completion.message == {"role": "?", "content": "?"}


async def test_a_cut_connection_is_a_connection_error_whenever_it_happens() -> None:
    for reply in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"):
        async with raw_backend(reply) as url, client(openai_spec(url)) as model:
            with pytest.raises(ModelConnectionError):
                await ask(model)
            with pytest.raises(ModelConnectionError):
                await ask_stream(model)


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with raw_backend(b"") as url:
        pass
    async with client(openai_spec(url)) as model:
        with pytest.raises(ModelConnectionError, match=r"127\.0\.0\.1"):
            await ask(model)


async def test_something_that_does_not_speak_http_is_a_bad_response() -> None:
    async with raw_backend(b"SSH-2.0-OpenSSH_9.6\r\n\r\n") as url, client(openai_spec(url)) as model:
        with pytest.raises(ModelBadResponse):
            await ask(model)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_hanging_server_is_a_timeout_at_the_calls_own_limit() -> None:
    async with backend(hang) as server, client(openai_spec(server.url, call_timeout_s=1.0, call_retries=3)) as model:
        for call in (ask, ask_stream):
            began = time.monotonic()
            with pytest.raises(ModelTimeout):
                await call(model)
            assert time.monotonic() - began < 30
    assert len(server.bodies) == 2  # a timeout is not tried again in here


async def test_a_deadline_before_the_calls_limit_counts() -> None:
    async with backend(hang) as server, client(openai_spec(server.url)) as model:
        with pytest.raises(ModelTimeout):
            await ask(model, within_s=0.1)


async def test_an_answer_that_trickles_in_is_bounded_too() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    async with backend(trickle) as server, client(openai_spec(server.url, call_timeout_s=0.2)) as model:
        with pytest.raises(ModelTimeout):
            await ask(model)
        with pytest.raises(ModelTimeout):
            await ask_stream(model)


@pytest.mark.parametrize("pause_s", [0.005, 60.0], ids=["trickles", "stalls"])
async def test_a_stream_that_does_not_end_in_time_is_a_timeout_and_its_reader_goes_on(pause_s: float) -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        while True:
            await response.write(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
            await asyncio.sleep(pause_s)

    reader = asyncio.current_task()
    assert reader is not None
    async with backend(begin) as server, client(openai_spec(server.url, call_timeout_s=1.5)) as model:
        got: list[Delta] = []
        with pytest.raises(ModelTimeout):
            await ask_stream(model, into=got)
        assert got[0] == Delta("a")
        assert reader.cancelling() == 0
        await asyncio.sleep(0)  # nothing strikes later


async def test_a_cancelled_stream_is_cancelled_and_no_timeout() -> None:
    begun = asyncio.Event()

    async def begin(request: web.Request) -> web.StreamResponse:
        await stream_to(request)
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with backend(begin) as server, client(openai_spec(server.url)) as model:
        call = asyncio.create_task(ask_stream(model))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert call.cancelled()


async def test_a_cancelled_call_is_cancelled_and_its_connection_closed() -> None:
    hanging = Hanging()
    async with backend(hanging) as server, client(openai_spec(server.url)) as model:
        task = asyncio.create_task(ask(model))
        await hanging.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(hanging.gone.wait(), 60)


async def test_an_answer_above_the_limit_is_not_read_to_its_end() -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            sent += 65536

    async with backend(flood) as server, client(openai_spec(server.url, max_response_bytes=100_000)) as model:
        with pytest.raises(ModelBadResponse, match="max_response_bytes"):
            await ask(model)
        with pytest.raises(ModelBadResponse, match="max_response_bytes"):
            await ask_stream(model)
    assert sent < 64 * 2**20


async def test_a_big_error_body_is_still_its_status() -> None:
    reply = web.Response(status=503, body=b"x" * 10_000_000)
    async with backend(answering(reply)) as server, client(openai_spec(server.url, max_response_bytes=1000)) as model:
        with pytest.raises(ModelServerError) as caught:
            await ask(model)
    assert len(str(caught.value)) < 1000


async def test_a_compressed_answer_is_understood_and_bounded() -> None:
    def packed() -> web.Response:
        reply = good("x" * 1000)
        reply.enable_compression(web.ContentCoding.gzip)
        return reply

    async def handler(request: web.Request) -> web.StreamResponse:
        return packed()

    async with backend(handler) as server:
        async with client(openai_spec(server.url)) as model:
            assert (await ask(model)).message["content"] == "x" * 1000
        async with client(openai_spec(server.url, max_response_bytes=500)) as model:
            with pytest.raises(ModelBadResponse):
                await ask(model)


async def test_a_big_answer_does_not_hold_the_event_loop() -> None:
    tokens = [{"token": "x", "logprob": -0.5, "top_logprobs": []}] * 60_000
    body = json.dumps(choice(logprobs={"content": tokens}, token_ids=list(range(60_000)))).encode()
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    async with backend(answering(web.Response(body=body))) as server, client(openai_spec(server.url)) as model:
        beating = asyncio.create_task(beat())
        completion = await ask(model)
        await asyncio.sleep(0)
        beating.cancel()
    assert len(completion.logprobs or ()) == len(completion.completion_token_ids or ()) == 60_000
    assert longest < 0.05


@pytest.mark.parametrize("status", [200, 302, 400, 401, 404, 429, 500])
async def test_the_key_is_in_no_error(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        told = request.headers["authorization"]
        return web.json_response(
            {"error": {"message": f"{'.' * 480}{told}", "headers": told}}, status=status, headers={"location": told}
        )

    caplog.set_level(logging.DEBUG)
    async with backend(echo) as server, client(openai_spec(server.url), KEY) as model:
        for call in (ask, ask_stream):
            with pytest.raises(ModelError) as caught:
                await call(model)
            error = caught.value
            shown = "".join(traceback.format_exception(error)) + repr(error) + str(error.args)
            assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
            for hidden in (KEY, KEY[:12], "sk-secret"):
                assert hidden not in shown
                assert hidden.encode() not in pickle.dumps(error)
                assert hidden not in repr(model)
                assert hidden not in caplog.text
            assert error.__cause__ is error.__context__ is None


async def test_the_key_is_in_no_connection_error() -> None:
    async with (
        raw_backend(f"HTTP/1.1 200 {KEY}\r\n{KEY} {KEY}\r\n\r\n".encode()) as url,
        client(openai_spec(url), KEY) as m,
    ):
        with pytest.raises(ModelError) as caught:
            await ask(m)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown() -> None:
    spec = openai_spec("http://localhost/v1", api_key_env="MY_KEY")
    for key in ("sk-a\nb: c", "sk-ä", "sk-\x00"):
        with pytest.raises(InputError, match="MY_KEY") as caught:
            make_client(spec, api_key=key)
        assert "sk-" not in str(caught.value)
        assert caught.value.where == "models.m.api_key_env"
