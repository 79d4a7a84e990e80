"""The providers' own client libraries, through a rollout's door, at a model of every kind.

.venv/bin/pytest tests/proxy/test_official_clients.py
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from rollout_engine.config import KEY_VARIABLES, ModelSpec
from rollout_engine.models.scripted import ScriptedModel, ScriptedOptions
from rollout_engine.models.server import ModelServer
from rollout_engine.proxy.rollout_session import SessionLimits
from rollout_engine.types import CallContext, Message, ToolSpec

from .rig import Rig, door

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(40))).decode()
URL = f"data:image/png;base64,{PNG}"
KINDS = ["scripted", *KEY_VARIABLES]
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
"""Google's client does this."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"city": "Zürich", "n": [1, 2.5, None]}


def answer(context: CallContext, messages: Sequence[Message], tools: Sequence[ToolSpec], u: float) -> Message:
    """Calls two tools where it may, then says what the tools and the images said."""
    thought = {"reasoning_content": "Let me see."}
    results = [message["content"] for message in messages if message.get("role") == "tool"]
    if tools and not results:
        calls = [
            {"id": f"call-{at}", "type": "function", "function": {"name": tools[0].name, "arguments": json.dumps(CALL)}}
            for at in range(2)
        ]
        return {"role": "assistant", "content": None, **thought, "tool_calls": calls}
    parts = messages[-1]["content"] if isinstance(messages[-1]["content"], list) else []
    images = [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
    text = " ".join(map(str, ["done", *results, *images, "x" * 200]))
    return {"role": "assistant", "content": text, **thought}


@contextlib.asynccontextmanager
async def proxied(kind: str, limits: SessionLimits | None = None) -> AsyncIterator[Rig]:
    """A door over a model of this kind, which answers as `answer` does."""
    local = ScriptedModel(ScriptedOptions(), answer)
    spec = ModelSpec(name="m", kind="scripted")
    async with ModelServer({"m": spec}) as server:
        server._models["m"] = local
        if kind != "scripted":
            fields = {"name": "m", "kind": kind, "model": "m", "base_url": server.url, "call_retries": 0}
            spec = ModelSpec.model_validate(fields)
        async with door(spec, limits=limits) as rig:
            if kind == "scripted":
                rig.session._upstream._model.client._model = local  # type: ignore[attr-defined]
            yield rig


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with proxied(request.param) as opened:
        yield opened


def check_record(rig: Rig) -> None:
    """Two turns: the calls, and their results with the answer; the second holds only what is new."""
    first, second = rig.turns
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
    assert [message["role"] for message in second.messages] == ["tool", "tool", "assistant"]
    assert (second.parent, second.kept) == (None, None)
    assert first.completion.finish_reason == "tool_calls"
    calls = first.messages[-1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [CALL, CALL]
    assert [message["tool_call_id"] for message in second.messages[:2]] == [call["id"] for call in calls]
    assert "sunny" in second.messages[-1]["content"]
    assert second.completion.usage.prompt_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(rig: Rig, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=rig.base + "/v1", api_key="k", max_retries=0) as client:
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]

        async def ask() -> Any:
            if not stream:
                return await client.chat.completions.create(model="any", messages=messages, tools=tools)
            async with client.chat.completions.stream(model="any", messages=messages, tools=tools) as events:
                return await events.get_final_completion()

        reply = await ask()
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [CALL, CALL]
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"sunny {call.id}"}
            for call in choice.message.tool_calls
        ]
        reply = await ask()
        assert reply.choices[0].message.content.startswith("done sunny call-")
        check_record(rig)
        image = [{"type": "text", "text": "And this?"}, {"type": "image_url", "image_url": {"url": URL}}]
        reply = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": image}])  # type: ignore[list-item,misc]
        assert URL in str(reply.choices[0].message.content)
        assert [model.id async for model in client.models.list()] == ["default"]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(rig: Rig, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=rig.base + "/v1", api_key="k", max_retries=0) as client:
        tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
        items: list[Any] = [{"role": "user", "content": "What is the weather?"}]

        async def ask() -> Any:
            if not stream:
                return await client.responses.create(model="any", input=items, tools=tools)
            async with client.responses.stream(model="any", input=items, tools=tools) as events:
                async for _ in events:
                    pass
                return await events.get_final_response()

        reply = await ask()
        calls = [item for item in reply.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [CALL, CALL]
        assert reply.output[0].type == "reasoning"
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"sunny {call.call_id}"})
        reply = await ask()
        assert reply.status == "completed"
        assert reply.output_text.startswith("done sunny call-")
        assert reply.usage.input_tokens > 0
        check_record(rig)
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}]
        assert URL in (await client.responses.create(model="any", input=image)).output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic(rig: Rig, stream: bool) -> None:
    async with anthropic.AsyncAnthropic(base_url=rig.base, api_key="k", max_retries=0) as client:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]

        async def ask() -> Any:
            fields: Any = {"model": "any", "max_tokens": 100, "messages": messages, "tools": tools}
            if not stream:
                return await client.messages.create(**fields)
            async with client.messages.stream(**fields) as events:
                return await events.get_final_message()

        reply = await ask()
        assert reply.stop_reason == "tool_use"
        assert (reply.content[0].type, reply.content[0].thinking) == ("thinking", "Let me see.")
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [CALL, CALL]
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"sunny {call.id}"} for call in calls]
        messages.append({"role": "user", "content": results})
        reply = await ask()
        assert reply.stop_reason == "end_turn"
        assert reply.content[-1].text.startswith("done sunny call-")
        assert reply.usage.input_tokens > 0
        check_record(rig)
        source: Any = {"type": "base64", "media_type": "image/png", "data": PNG}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        tools = []
        assert URL in (await ask()).content[-1].text
        counted = await client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "x" * 400}])
        assert 100 < counted.input_tokens < 200
        assert [model.id async for model in client.models.list()] == ["default"]


@pytest.mark.parametrize("stream", [False, True])
async def test_google(rig: Rig, stream: bool) -> None:
    options = genai_types.HttpOptions(base_url=rig.base)
    client = genai.Client(api_key="k", http_options=options).aio
    declared = genai_types.FunctionDeclaration(name="weather", parameters_json_schema=SCHEMA)
    config = genai_types.GenerateContentConfig(tools=[genai_types.Tool(function_declarations=[declared])])
    contents: list[Any] = [genai_types.UserContent("What is the weather?")]

    async def ask(config: Any = config) -> list[Any]:
        """The parts of the answer."""
        if not stream:
            reply = await client.models.generate_content(model="any", contents=contents, config=config)
            assert reply.usage_metadata.prompt_token_count > 0
            return reply.candidates[0].content.parts
        pieces = await client.models.generate_content_stream(model="any", contents=contents, config=config)
        return [part async for piece in pieces for part in piece.candidates[0].content.parts or ()]

    try:
        parts = await ask()
        assert "".join(part.text for part in parts if part.thought) == "Let me see."
        calls = [part.function_call for part in parts if part.function_call]
        assert [call.args for call in calls] == [CALL, CALL]
        contents.append(genai_types.ModelContent(parts))
        results = [
            genai_types.Part(
                function_response=genai_types.FunctionResponse(
                    id=call.id, name=call.name, response={"output": f"sunny {call.id}"}
                )
            )
            for call in calls
        ]
        contents.append(genai_types.UserContent(results))
        text = "".join(part.text for part in await ask() if part.text and not part.thought)
        assert text.startswith("done sunny call-")
        check_record(rig)
        image = genai_types.Part.from_bytes(data=base64.b64decode(PNG), mime_type="image/png")
        contents = [genai_types.UserContent([image])]
        assert URL in "".join(part.text for part in await ask(None) if part.text)
        counted = await client.models.count_tokens(model="any", contents="x" * 400)
        assert 100 < (counted.total_tokens or 0) < 200
    finally:
        await client.aclose()


async def test_a_limit_is_a_400_that_no_client_tries_again() -> None:
    none_left = SessionLimits(max_turns=1)
    for stream in (False, True):
        async with proxied("scripted", none_left) as rig:
            async with openai.AsyncOpenAI(base_url=rig.base + "/v1", api_key="k", max_retries=5) as client:
                ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
                reply: Any = await client.chat.completions.create(**ask)
                if stream:
                    [chunk async for chunk in reply]
                with pytest.raises(openai.BadRequestError, match="max_turns"):
                    await client.chat.completions.create(**ask)
                with pytest.raises(openai.BadRequestError, match="max_turns"):
                    await client.responses.create(model="m", input="hi", stream=stream)
            async with anthropic.AsyncAnthropic(base_url=rig.base, api_key="k", max_retries=5) as claude:
                with pytest.raises(anthropic.BadRequestError, match="max_turns"):
                    await claude.messages.create(
                        model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}], stream=stream
                    )
            google = genai.Client(api_key="k", http_options=genai_types.HttpOptions(base_url=rig.base)).aio
            with pytest.raises(genai_errors.ClientError, match="max_turns") as caught:
                await google.models.generate_content(model="m", contents="hi")
            assert caught.value.code == 400
            await google.aclose()
            assert rig.session.counts["agent"].begun == 1
