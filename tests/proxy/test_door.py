"""A rollout's door: who is let in, what an agent is told, and what is on record.

.venv/bin/pytest tests/proxy/test_door.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollout_engine.config import ModelSpec
from rollout_engine.errors import ModelServerError
from rollout_engine.formats.base import Overrides
from rollout_engine.proxy.door import DoorLimits
from rollout_engine.proxy.outgoing import KeepAlive
from rollout_engine.proxy.roles import RoleRule
from rollout_engine.proxy.rollout_session import SessionLimits
from rollout_engine.types import StopReason

from ..models.conftest import Hanging, answering, backend, bad, good, openai_spec, stream_to
from .rig import door

ASK = {"model": "any", "messages": [{"role": "user", "content": "What is six times seven?"}]}
CHAT = "/v1/chat/completions"


def scripted(**options: Any) -> ModelSpec:
    return ModelSpec(name="m", kind="scripted", options=options, call_retries=0)


async def test_a_call_is_answered_counted_and_recorded() -> None:
    async with door(scripted(), models=()) as rig:
        for path in (CHAT, "/chat/completions", "/openai/v1/chat/completions"):
            status, reply = await rig.ask(path, ASK)
            assert (status, reply["choices"][0]["message"]["content"]) == (200, "42")
    assert [turn.index for turn in rig.turns] == [0, 1, 2]
    assert rig.turns[0].messages == [ASK["messages"][0], {"role": "assistant", "content": "42"}]
    assert rig.record.prompt_tokens == 3 * reply["usage"]["prompt_tokens"] > 0


async def test_connections_of_a_rollout_are_bounded() -> None:
    async with door(scripted(), door_limits=DoorLimits(max_connections=3)) as rig:
        host = rig.base.removeprefix("http://").partition("/")[0]
        address, port = host.split(":")
        opened = [await asyncio.open_connection(address, int(port)) for _ in range(5)]
        with contextlib.suppress(ConnectionError):  # the door accepts in order: the last two are cut
            assert await asyncio.wait_for(opened[3][0].read(), 30) == b""
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(opened[4][0].read(), 30) == b""
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        async with asyncio.timeout(30):
            while True:  # the server sees the ends a moment later
                with contextlib.suppress(aiohttp.ClientError):
                    if (await rig.ask(CHAT, ASK))[0] == 200:
                        break
                await asyncio.sleep(0.01)


async def test_what_is_no_http_is_refused_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with door(scripted()) as rig:
        address, port = rig.base.removeprefix("http://").partition("/")[0].split(":")
        for junk in (b"GARBAGE\r\n\r\n", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(address, int(port))
            writer.write(junk)
            assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"400"
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert not caplog.records


async def test_a_wrong_token_gets_404_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with door(scripted()) as rig:
        with caplog.at_level(logging.WARNING):
            for wrong in ("/r/" + "0" * 32 + CHAT, CHAT, "/r/é" + CHAT, rig.base.rpartition("/r/")[2]):
                url = rig.base.partition("/r/")[0] + "/" + wrong.lstrip("/")
                async with aiohttp.ClientSession() as http, http.post(url, json=ASK) as got:
                    assert (got.status, await got.text()) == (404, "not found")
        rig.door.close()
        assert (await rig.ask(CHAT, ASK))[0] == 404
    assert len(caplog.records) == 1
    assert rig.base.rpartition("/")[2] not in caplog.text
    assert rig.turns == []


async def test_a_websocket_upgrade_is_answered_with_426() -> None:
    async with door(scripted()) as rig, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(rig.base + "/v1/responses")
        assert refused.value.status == 426
        async with http.get(rig.base + "/v1/models") as got:
            assert (await got.json())["object"] == "list"
        async with http.get(rig.base + "/v1/nothing") as got:
            assert got.status == 404


async def test_a_body_over_the_limit_is_413() -> None:
    async with door(scripted(), door_limits=DoorLimits(max_body_bytes=10_000)) as rig:
        status, reply = await rig.ask(CHAT, {**ASK, "padding": "x" * 20_000})
    assert (status, reply["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{", "body"),
        (b"[1]", "body"),
        ({**ASK, "messages": "hi"}, "messages"),
        ({**ASK, "messages": [{"content": "x"}]}, "messages[0].role"),
        ({**ASK, "messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({**ASK, "temperature": "hot"}, "temperature"),
        ({**ASK, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ],
)
async def test_a_malformed_request_is_told_where(body: Any, where: str) -> None:
    async with door(scripted()) as rig:
        status, reply = await rig.ask(CHAT, body)
    assert status == 400
    assert reply["error"]["message"].startswith(f"{where}: ")
    assert reply["error"]["type"] == "invalid_request_error"


async def test_a_streamed_answer_is_recorded_before_its_end_is_sent() -> None:
    async with door(scripted()) as rig:
        status, raw = await rig.events(CHAT, {**ASK, "stream": True})
        assert len(rig.turns) == 1
    assert status == 200
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_what_the_run_fixes_replaces_what_the_agent_asks_for() -> None:
    fixed = Overrides(system="Be brief.", tools=())
    async with backend(answering(good())) as server:
        spec = openai_spec(server.url, temperature=0.5, logprobs=True)
        async with door(spec, overrides=fixed) as rig:
            asked = {**ASK, "temperature": 1, "top_p": 0.9, "strange": {"a": 1}}
            asked["messages"] = [{"role": "system", "content": "Ramble."}, *ASK["messages"]]
            assert (await rig.ask(CHAT, asked))[0] == 200
    sent = server.bodies[0]
    assert sent["model"] == "m1"
    assert (sent["temperature"], sent["top_p"], sent["logprobs"], sent["strange"]) == (0.5, 0.9, True, {"a": 1})
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert rig.turns[0].messages[0] == {"role": "system", "content": "Be brief."}


async def test_a_body_that_the_run_changes_nothing_of_passes_byte_by_byte() -> None:
    seen: list[bytes] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        seen.append(await request.read())
        return good()

    raw = b'{"model" : "m1",  "messages":[{"content":"\\u00e4","role":"user"}], "x":1.50}'
    async with backend(keep) as server, door(openai_spec(server.url)) as rig:
        assert (await rig.ask(CHAT, raw))[0] == 200
    assert seen == [raw]


async def test_the_headers_that_say_how_to_read_a_body_pass_with_it_and_no_other() -> None:
    async with backend(answering(good())) as server, door(openai_spec(server.url), key="the-run's") as rig:
        headers = {"OpenAI-Beta": "new=1", "Authorization": "Bearer agent", "Cookie": "a=b", "X-Session-Id": "s"}
        assert (await rig.ask(CHAT, ASK, headers))[0] == 200
    sent = server.headers[0]
    assert (sent["openai-beta"], sent["authorization"]) == ("new=1", "Bearer the-run's")
    assert "cookie" not in sent
    assert "x-session-id" not in sent


FORMATS = {
    "chat": (CHAT, ASK),
    "responses": ("/v1/responses", {"model": "any", "input": "hi"}),
    "anthropic": ("/v1/messages", {**ASK, "max_tokens": 9}),
    "gemini": ("/v1beta/models/any:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_every_format_is_answered_kept_alive_and_told_of_faults_in_its_own_way(name: str) -> None:
    path, body = FORMATS[name]
    stream_path, streamed = path, {**body, "stream": True}
    if name == "gemini":
        stream_path, streamed = path.replace("generate", "streamGenerate") + "?alt=sse", body
    limits = DoorLimits(keep_alive=KeepAlive(begin_s=0.02, every_s=0.02))
    async with door(scripted(latency_ms=150), door_limits=limits) as rig:
        assert (await rig.ask(path, body))[0] == 200
        status, raw = await rig.events(stream_path, streamed)
        assert (status, b"42" in raw) == (200, True)
        wrong = {field: 7 for field in body}
        status, reply = await rig.ask(path, wrong)
        assert status == 400
        assert "found 7" in reply["error"]["message"]
    assert len(rig.turns) == 2
    for fault in ({"p_429": 1}, {"p_500": 1}, {"p_cut": 1}, {"p_garbage": 1}):
        async with door(scripted(**fault)) as rig:
            status, reply = await rig.ask(path, body)
            assert (status, "model could not answer" in reply["error"]["message"]) == (400, True)
            assert rig.session.failure is not None
    async with door(scripted(latency_ms=1000, p_500=1), door_limits=limits) as rig:  # the stream has begun by then
        status, raw = await rig.events(stream_path, streamed)
        assert (status, b"model could not answer" in raw) == (200, True)


async def test_upstream_faults_are_retried_within_and_then_told_as_400() -> None:
    replies = [bad(500), bad(429, headers={"retry-after": "0"}), good()]
    async with backend(answering(*replies)) as server, door(openai_spec(server.url, call_retries=2)) as rig:
        assert (await rig.ask(CHAT, ASK))[0] == 200
    async with backend(answering(bad(500))) as server, door(openai_spec(server.url)) as rig:
        for stream in (False, True):
            status, reply = await rig.ask(CHAT, {**ASK, "stream": stream})
            assert status == 400
            assert server.url not in reply["error"]["message"]
    assert isinstance(rig.session.failure, ModelServerError)
    assert len(server.bodies) == 1, "a rollout that has failed asks no more"


async def test_limits_end_in_400_and_the_reason_is_kept() -> None:
    async with door(scripted(), limits=SessionLimits(max_turns=1)) as rig:
        assert (await rig.ask(CHAT, ASK))[0] == 200
        status, reply = await rig.ask(CHAT, ASK)
    assert (status, reply["error"]["code"]) == (400, "limit_reached")
    assert rig.session.limit is StopReason.MAX_TURNS
    async with door(scripted(tokens=50), limits=SessionLimits(max_tokens=50)) as rig:
        assert [(await rig.ask(CHAT, ASK))[0] for _ in range(2)] == [200, 400]
    assert rig.session.limit is StopReason.MAX_TOKENS


async def test_a_prompt_that_does_not_fit_is_told_so_that_the_agent_can_shorten_it() -> None:
    error = {"message": "too long", "code": "context_length_exceeded"}
    async with backend(answering(bad(400, error), good())) as server, door(openai_spec(server.url)) as rig:
        status, reply = await rig.ask(CHAT, ASK)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert (await rig.ask(CHAT, ASK))[0] == 200
    assert rig.session.failure is None


async def test_a_model_that_is_not_in_the_run_is_refused_and_noted() -> None:
    async with door(scripted(), models=["allowed"]) as rig:
        status, reply = await rig.ask(CHAT, ASK)
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert (await rig.ask(CHAT, {**ASK, "model": "allowed"}))[0] == 200
    assert "'any'" in rig.session.notes[0]


async def test_sub_calls_are_counted_apart_and_recorded_only_on_request() -> None:
    rules = [RoleRule(tools=False, system="title")]
    title = {**ASK, "messages": [{"role": "system", "content": "Make a title."}, *ASK["messages"]]}
    for record_sub in (False, True):
        async with door(scripted(), rules=rules, record_sub=record_sub) as rig:
            await rig.ask(CHAT, title)
            await rig.ask(CHAT, ASK, {"X-RLM-Role": "sub"})
            await rig.ask(CHAT, ASK)
        counts = rig.session.counts
        assert (counts["sub"].answered, counts["agent"].answered) == (2, 1)
        assert [turn.role for turn in rig.turns] == (["sub", "sub", "agent"] if record_sub else ["agent"])
        assert rig.record.prompt_tokens == counts["sub"].prompt_tokens + counts["agent"].prompt_tokens


async def test_a_client_that_goes_away_cancels_the_call_upstream() -> None:
    for stream in (False, True):
        hanging = Hanging()
        async with backend(hanging) as server, door(openai_spec(server.url)) as rig:
            call = asyncio.create_task(rig.ask(CHAT, {**ASK, "stream": stream}))
            await asyncio.wait_for(hanging.arrived.wait(), 60)
            call.cancel()
            await asyncio.wait_for(hanging.gone.wait(), 60)
            with contextlib.suppress(asyncio.CancelledError):
                await call
            assert rig.session.failure is None


async def test_the_end_of_a_rollout_reaches_its_running_calls() -> None:
    async with door(scripted(p_hang=1)) as rig:
        calls = [asyncio.create_task(rig.ask(CHAT, {**ASK, "stream": stream})) for stream in (False, True)]
        while rig.session.counts["agent"].begun < 2:
            await asyncio.sleep(0.005)
        rig.session.end("cancelled")
        for status, reply in await asyncio.gather(*calls):
            assert (status, reply["error"]["message"]) == (400, "cancelled")
        assert (await rig.ask(CHAT, ASK))[0] == 400


async def test_draining_waits_for_sub_calls_and_ends_what_takes_too_long() -> None:
    async with door(scripted(latency_ms=100)) as rig:
        call = asyncio.create_task(rig.ask(CHAT, ASK, {"x-rlm-role": "sub"}))
        while not rig.session.counts["sub"].begun:
            await asyncio.sleep(0.005)
        await rig.session.drain(60)
        assert rig.session.counts["sub"].answered == 1
        assert (await call)[0] == 200
    async with door(scripted(p_hang=1)) as rig:
        call = asyncio.create_task(rig.ask(CHAT, ASK, {"x-rlm-role": "sub"}))
        while not rig.session.counts["sub"].begun:
            await asyncio.sleep(0.005)
        await rig.session.drain(0.05)
        assert (await call)[0] == 400


async def test_a_stream_is_kept_alive_while_the_model_thinks() -> None:
    limits = DoorLimits(keep_alive=KeepAlive(begin_s=0.02, every_s=0.02))
    async with door(scripted(latency_ms=1500), door_limits=limits) as rig:
        status, raw = await rig.events(CHAT, {**ASK, "stream": True})
    assert status == 200
    assert raw.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_a_fault_after_the_stream_has_begun_is_an_event() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"4"}}]}\n\ndata: {"cho')
        assert request.transport is not None
        request.transport.close()
        return response

    async with backend(cut) as server, door(openai_spec(server.url)) as rig:
        status, raw = await rig.events(CHAT, {**ASK, "stream": True})
    assert status == 200
    *_, error, end, _ = raw.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "model_failed"
    assert end == b"data: [DONE]"
    assert rig.turns == []


async def test_the_usage_is_counted_and_shown_only_to_those_who_ask() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        for chunk in (
            {"choices": [{"index": 0, "delta": {"content": "42"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
        ):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with backend(stream) as server, door(openai_spec(server.url)) as rig:
        _, plain = await rig.events(CHAT, {**ASK, "stream": True})
        _, with_usage = await rig.events(CHAT, {**ASK, "stream": True, "stream_options": {"include_usage": True}})
    assert all(body["stream_options"]["include_usage"] for body in server.bodies)
    assert (b"usage" in plain, b"usage" in with_usage) == (False, True)
    assert rig.record.prompt_tokens == 6
