"""Each kind of server: where a call goes, with which key, and what its faults become.

.venv/bin/pytest tests/models/test_dialects.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.config import KEY_VARIABLES, ModelSpec, api_keys
from rollout_engine.errors import (
    InputError,
    LimitReached,
    ModelAuthError,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelRateLimited,
    ModelRefused,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.formats import FORMATS
from rollout_engine.models import check_model
from rollout_engine.models.dialects import DIALECTS
from rollout_engine.models.server import ModelServer
from rollout_engine.types import Completion, Sampling, ToolSpec, Usage

from .conftest import KEY, ask, ask_stream, client

CALLS = {
    "openai": ("/v1/chat/completions", "/v1/chat/completions"),
    "responses": ("/v1/responses", "/v1/responses"),
    "anthropic": ("/v1/messages", "/v1/messages"),
    "gemini": ("/v1/models/a%2Fb:generateContent", "/v1/models/a%2Fb:streamGenerateContent?alt=sse"),
}
KEYS = {
    "openai": ("authorization", f"Bearer {KEY}"),
    "responses": ("authorization", f"Bearer {KEY}"),
    "anthropic": ("x-api-key", KEY),
    "gemini": ("x-goog-api-key", KEY),
}
each_kind = pytest.mark.parametrize("kind", KEY_VARIABLES)


def spec(kind: str, url: str, **fields: Any) -> ModelSpec:
    known = {"name": "m", "kind": kind, "model": "a/b", "base_url": url, "call_retries": 0}
    return ModelSpec.model_validate({**known, **fields})


class Server:
    """Keeps the requests that it gets and answers them all alike."""

    def __init__(self, reply: Any, status: int = 200) -> None:
        self.seen: list[web.BaseRequest] = []
        self.bodies: list[bytes] = []
        self._reply, self._status = reply, status

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.read())
        return web.json_response(self._reply, status=self._status)

    async def __aenter__(self) -> Server:
        self._runner = web.ServerRunner(web.Server(self._handle))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()


@each_kind
async def test_a_call_goes_to_its_address_with_the_key_where_it_belongs(kind: str) -> None:
    said = Completion({"role": "assistant", "content": "42"}, "stop", Usage(3, 1))
    format = DIALECTS[kind].format
    body = format.response(said, format.parse(_asked(kind), "m"), 1, 0)
    tools = (ToolSpec("shell", "runs", {"type": "object"}),)
    async with Server(body) as server, client(spec(kind, server.url), KEY) as model:
        completion = await ask(model, sampling=Sampling(temperature=0.5), tools=tools)
        assert (completion.message, completion.usage) == (said.message, said.usage)
        assert (await ask_stream(model))[-1].completion is not None
        paths = tuple(request.raw_path for request in server.seen)
        assert paths == CALLS[kind]
        header, value = KEYS[kind]
        for request in server.seen:
            assert request.headers[header] == value
            assert KEY not in str({name: each for name, each in request.headers.items() if name.lower() != header})
        assert b"shell" in server.bodies[0]


def _asked(kind: str) -> dict[str, Any]:
    format = DIALECTS[kind].format
    return format.request("m", [{"role": "user", "content": "hi"}], Sampling(), (), False)


@each_kind
@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("p_429", ModelRateLimited),
        ("p_500", ModelServerError),
        ("p_cut", ModelConnectionError),
        ("p_hang", ModelTimeout),
        ("p_garbage", ModelBadResponse),
    ],
)
async def test_faults_are_typed_alike(kind: str, option: str, error: type[ModelError]) -> None:
    served = ModelSpec(name="m", kind="scripted", options={option: 1, "retry_after_s": 0.25})
    limit_s = 0.5 if option == "p_hang" else 60.0
    async with ModelServer({"a/b": served}) as server, client(spec(kind, server.url, call_timeout_s=limit_s)) as model:
        for call in (ask, ask_stream):
            with pytest.raises(error) as caught:
                await call(model)
            assert type(caught.value) is error
    if isinstance(caught.value, ModelRateLimited):
        assert caught.value.retry_after_s == 0.25


@each_kind
async def test_a_refused_key_is_told_and_not_shown(kind: str) -> None:
    error = DIALECTS[kind].format.error(401, f"no such key: {KEY}", "invalid_api_key")
    async with Server(error, 401) as server, client(spec(kind, server.url), KEY) as model:
        with pytest.raises(ModelAuthError, match=r"no such key: \[key\]") as caught:
            await ask(model)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("openai", {"error": {"message": "x", "code": "context_length_exceeded"}}),
        ("responses", {"error": {"message": "x", "code": "context_length_exceeded"}}),
        (
            "anthropic",
            {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9"}},
        ),
        ("gemini", {"error": {"code": 400, "message": "The input token count exceeds the maximum number of tokens"}}),
    ],
)
async def test_a_prompt_that_does_not_fit_is_a_limit_and_no_failure(kind: str, error: Any) -> None:
    async with Server(error, 400) as server, client(spec(kind, server.url)) as model:
        with pytest.raises(LimitReached):
            await ask(model)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("chat", {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}),
        ("responses", {"output": [], "status": "incomplete", "incomplete_details": {"reason": "content_filter"}}),
        ("anthropic", {"content": [], "stop_reason": "refusal"}),
        ("gemini", {"candidates": [{"finishReason": "SAFETY"}]}),
        ("gemini", {"promptFeedback": {"blockReason": "OTHER"}}),
    ],
)
def test_a_refusal_of_the_provider_is_no_answer(name: str, body: Any) -> None:
    with pytest.raises(ModelRefused):
        FORMATS[name].completion(body)


def test_each_kind_has_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in KEY_VARIABLES.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a")
    monkeypatch.setenv("GOOGLE_API_KEY", "g")
    models = tuple(spec(kind, "http://h/v1", name=kind) for kind in KEY_VARIABLES)
    assert api_keys(models) == {"anthropic": "a", "gemini": "g"}
    with pytest.raises(InputError, match="MINE is not set"):
        api_keys((spec("anthropic", "http://h/v1", api_key_env="MINE"),))


@each_kind
def test_a_url_that_names_the_call_is_refused(kind: str) -> None:
    if kind != "gemini":
        with pytest.raises(InputError, match="names the call"):
            check_model(spec(kind, "http://h" + CALLS[kind][0]))
    with pytest.raises(InputError, match="URL is missing"):
        check_model(spec(kind, ""))
    check_model(spec(kind, "http://h/v1"))


async def test_many_clients_of_a_kind_end_without_leftovers() -> None:
    async with ModelServer({"a/b": ModelSpec(name="m", kind="scripted")}, solutions={"t": "42"}) as server:
        for kind in KEY_VARIABLES:
            async with client(spec(kind, server.url, seed_header=True)) as model:
                await asyncio.gather(*(ask(model) for _ in range(8)))
        assert server.stats()["answered"] == 8 * len(KEY_VARIABLES)
