"""The model server: OpenAI's wire, real faults, and true counts.

.venv/bin/pytest tests/models/test_server.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from rollout_engine.config import ModelSpec
from rollout_engine.errors import (
    InputError,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelMissingAnswer,
    ModelRateLimited,
    ModelRequestError,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.models import make_client
from rollout_engine.models.seed import SEED_HEADER, seed_header
from rollout_engine.models.server import ModelServer
from rollout_engine.models.server_call import tasks_of
from rollout_engine.specs import Task

from .conftest import MESSAGES, ask, ask_stream, client, context, openai_spec

SOLUTIONS = {f"t{i}": str(i) for i in range(100)} | {"t": "42"}


def server_of(options: dict[str, Any] | None = None, *, max_concurrency: int | None = None) -> ModelServer:
    spec = ModelSpec(name="m1", kind="scripted", options=options or {})
    return ModelServer({"m1": spec}, solutions=SOLUTIONS, max_concurrency=max_concurrency)


async def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    target = f"{url}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(target, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        assert reply.status == 200
        return await reply.json()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)


async def test_lists_its_models_and_says_that_it_is_well() -> None:
    async with server_of() as server:
        assert [model["id"] for model in (await get(f"{server.url}/models"))["data"]] == ["m1"]
        assert await get(f"{server.url}/health") == {"status": "ok"}
        assert await get(f"{server.url.removesuffix('/v1')}/health") == {"status": "ok"}
        assert await get(f"{server.url}/stats") == server.stats()


async def test_scripted_answers_are_the_same_over_http_as_in_process() -> None:
    options = {"skill": 0.5}
    here = make_client(ModelSpec(name="m", kind="scripted", options=options))
    async with server_of(options) as server, client(openai_spec(server.url, seed_header=True)) as there:
        for i in range(40):
            where = context(f"t{i}", solution=str(i), attempt=i % 3, seed=9)
            assert (await ask(here, where)).message == (await ask(there, where)).message


async def test_without_a_header_the_prompt_finds_the_task() -> None:
    tasks = [
        Task(task_id=f"t{i}", prompt=f"What is {i}?", verifier={"type": "match"}, solution=str(i)) for i in range(9)
    ]
    solutions, prompts = tasks_of(tasks)
    models = {
        "m1": ModelSpec(name="m1", kind="scripted"),
        "dumb": ModelSpec(name="d", kind="scripted", options={"skill": 0}),
    }
    async with ModelServer(models, solutions=solutions, prompts=prompts) as server:
        for i in range(9):
            asked = [{"role": "system", "content": "x"}, {"role": "user", "content": f"What is {i}?"}]
            status, body = await post(server.url, {"model": "m1", "messages": asked})
            assert (status, body["choices"][0]["message"]["content"]) == (200, str(i))
        unknown = [{"role": "user", "content": "What else?"}]
        assert (await post(server.url, {"model": "m1", "messages": unknown}))[0] == 404
        assert (await post(server.url, {"model": "dumb", "messages": unknown}))[0] == 200


async def test_without_a_header_the_same_conversation_gets_the_same_answer() -> None:
    async def answers(server_seed: int, **fields: Any) -> list[str]:
        spec = ModelSpec(name="m1", kind="scripted", options={"skill": 0.5})
        prompts = {f"p{i}": f"t{i}" for i in range(40)}
        async with ModelServer({"m1": spec}, solutions=SOLUTIONS, prompts=prompts, seed=server_seed) as server:
            bodies = [{"model": "m1", "messages": [{"role": "user", "content": p}], **fields} for p in prompts]
            return [(await post(server.url, body))[1]["choices"][0]["message"]["content"] for body in bodies]

    first = await answers(0)
    assert await answers(0) == first
    assert await answers(1) != first
    assert await answers(0, seed=1) == await answers(1)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ([], None, 400),
        ({"model": "m1"}, None, 400),
        ({"model": "m1", "messages": "hi"}, None, 400),
        ({"model": "m1", "messages": [7]}, None, 400),
        ({"model": 7, "messages": MESSAGES}, None, 400),
        ({"model": "m1", "messages": MESSAGES, "tools": ["shell"]}, None, 400),
        ({"model": "m1", "messages": MESSAGES}, {SEED_HEADER: "1/2"}, 400),
        ({"model": "m2", "messages": MESSAGES}, None, 404),
    ],
)
async def test_a_request_that_cannot_be_understood_is_told_why(body: Any, headers: Any, status: int) -> None:
    async with server_of() as server:
        got, reply = await post(server.url, body, headers)
        assert server.stats()["bad_requests"] == 1
    assert got == status
    assert reply["error"]["message"]


@pytest.mark.parametrize(
    ("option", "error", "count"),
    [
        ("p_429", ModelRateLimited, "429"),
        ("p_500", ModelServerError, "500"),
        ("p_cut", ModelConnectionError, "cut"),
        ("p_hang", ModelTimeout, "hang"),
        ("p_garbage", ModelBadResponse, "garbage"),
    ],
)
async def test_faults_are_real_http_and_typed_by_the_client(option: str, error: type[ModelError], count: str) -> None:
    limit_s = 1.0 if option == "p_hang" else 60.0
    async with server_of({option: 1, "retry_after_s": 0.25}) as server:
        async with client(openai_spec(server.url, seed_header=True, call_timeout_s=limit_s)) as model:
            for call in (ask, ask_stream):
                with pytest.raises(error) as caught:
                    await call(model)
                assert type(caught.value) is error
        await eventually(lambda: server.stats()["in_flight"] == 0)
        assert server.stats()[count] == 2
        assert server.stats()["answered"] == 0
    if isinstance(caught.value, ModelRateLimited):
        assert caught.value.retry_after_s == 0.25


async def test_an_empty_answer_is_an_answer() -> None:
    async with server_of({"p_empty": 1}) as server, client(openai_spec(server.url, seed_header=True)) as model:
        assert (await ask(model)).message["content"] == ""
        *pieces, last = await ask_stream(model)
        assert last.completion is not None
        assert (pieces, last.completion.message["content"]) == ([], "")


async def test_the_clients_retries_get_through_injected_faults() -> None:
    options = {"p_429": 0.2, "p_500": 0.05, "p_cut": 0.05, "retry_after_s": 0.01}
    async with server_of(options) as server:
        async with client(openai_spec(server.url, seed_header=True, call_retries=20)) as model:
            asked = [context(f"t{i}", solution=str(i)) for i in range(40)]
            got = await asyncio.gather(*(ask(model, where) for where in asked))
        stats = server.stats()
    assert [completion.message["content"] for completion in got] == [where.solution for where in asked]
    assert stats["429"] > 0
    assert stats["answered"] == 40
    assert stats["calls"] == 40 + stats["429"] + stats["500"] + stats["cut"]


async def test_calls_above_the_limit_get_a_429() -> None:
    async with server_of({"latency_ms": 1000}, max_concurrency=3) as server:
        async with client(openai_spec(server.url, seed_header=True)) as model:
            got = await asyncio.gather(*(ask(model, context(f"t{i}")) for i in range(12)), return_exceptions=True)
        stats = server.stats()
    refused = [error for error in got if isinstance(error, ModelRateLimited)]
    assert len(refused) == stats["busy"] == 12 - stats["answered"]
    assert stats["max_in_flight"] == stats["models"]["m1"]["max_in_flight"] == 3
    assert all(error.retry_after_s == 1 for error in refused)


async def test_a_client_that_goes_away_is_no_longer_in_flight() -> None:
    async with server_of({"p_hang": 1}) as server, client(openai_spec(server.url, seed_header=True)) as model:
        calls = [asyncio.create_task(ask(model, context(f"t{i}"))) for i in range(5)]
        await eventually(lambda: server.stats()["in_flight"] == 5)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await eventually(lambda: server.stats()["in_flight"] == 0)
        assert server.stats()["disconnected"] == 5
        load = server.stats()["models"]["m1"]
        assert {name: load[name] for name in ("calls", "in_flight", "max_in_flight")} == {
            "calls": 5, "in_flight": 0, "max_in_flight": 5,
        }  # fmt: skip
        assert load["in_flight_s"] > 0


async def test_a_finished_call_is_not_in_flight_when_its_answer_arrives() -> None:
    async with server_of() as server, client(openai_spec(server.url, seed_header=True)) as model:
        for _ in range(20):
            await ask(model)
            assert server.stats()["in_flight"] == 0
            await ask_stream(model)
            assert server.stats()["in_flight"] == 0
    assert server.stats()["max_in_flight"] == 1


async def test_closing_the_server_ends_hanging_calls() -> None:
    async with server_of({"p_hang": 1}) as server:
        model = make_client(openai_spec(server.url, seed_header=True))
        call = asyncio.create_task(ask(model))
        await eventually(lambda: server.stats()["in_flight"] == 1)
    with pytest.raises(ModelError):
        await call
    await model.close()


async def test_a_port_that_is_taken_is_an_input_error() -> None:
    async with server_of() as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(InputError, match="cannot listen"):
            await ModelServer({}, port=port).__aenter__()


def test_only_models_without_a_server_of_their_own_are_served() -> None:
    with pytest.raises(InputError, match=r"models\.m\.kind"):
        ModelServer({"m": openai_spec("http://127.0.0.1:1/v1")})


async def test_a_missing_recording_is_a_missing_answer_over_http_and_counted() -> None:
    async with server_of() as server, client(openai_spec(server.url, seed_header=True)) as model:
        with pytest.raises(ModelMissingAnswer):
            await ask(model, context("unknown"))
        assert server.stats()["missing"] == 1
    async with server_of() as server, client(openai_spec(server.url, model="m2")) as model:
        with pytest.raises(ModelRequestError, match="m2"):
            await ask(model)


async def test_the_answer_on_the_wire_is_openais_form() -> None:
    async with server_of() as server:
        body = {"model": "m1", "messages": MESSAGES, "logprobs": True}
        status, reply = await post(server.url, body, {SEED_HEADER: seed_header(context())})
    assert status == 200
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "42"}
    assert reply["choices"][0]["token_ids"] == list(b"42")
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
