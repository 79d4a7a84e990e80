"""Turn after turn the prompt's tokens begin with the last prompt's and its answer's, whatever format the agent speaks.

make one T=tests/proxy/test_token_prefixes.py
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.config import ModelSpec
from tests.proxy.rig import Rig, door
from tests.rig import chat_server, served

TURNS = 3
ARGUMENTS = {"city": "Zürich", "n": [1, 2.5, None], "deep": {"b": 1, "a": ""}}
SAID = "Let me\n see. \n"
NAME = "weather"
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}


def tokens(text: str) -> list[int]:
    """A tokenizer: bytes."""
    return list(text.encode())


def rendered(message: dict[str, Any]) -> str:
    """A chat template. As those of models do it reads the arguments of calls, and writes them its own way."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = "".join(f"<call>{call['name']} {json.dumps(json.loads(call['arguments']))}" for call in calls)
    return f"{content}{written}<end>"


async def model(request: web.Request) -> web.Response:
    """A server that gives token ids: calls two tools each time, with arguments spelled as no client would."""
    messages = (await request.json())["messages"]
    spelled = json.dumps(ARGUMENTS, indent=1)
    calls = [
        {"id": f"call{len(messages)}{at}", "type": "function", "function": {"name": NAME, "arguments": spelled}}
        for at in range(2)
    ]
    message = {"role": "assistant", "content": SAID, "tool_calls": calls}
    prompt = "".join(f"<{each['role']}>{rendered(each)}" for each in messages) + "<assistant>"
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "token_ids": tokens(rendered(message))}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
    return web.json_response({"choices": [choice], "usage": usage, "prompt_token_ids": tokens(prompt)})


# How an agent of each format asks, and how it puts an answer and the results of its calls into its next request.


async def chat(rig: Rig) -> None:
    tool = {"type": "function", "function": {"name": NAME, "parameters": TOOL}}
    history: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
    for _ in range(TURNS):
        _, reply = await rig.ask("/v1/chat/completions", {"model": "m", "messages": history, "tools": [tool]})
        message = reply["choices"][0]["message"]
        history.append(message)
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message["tool_calls"]]


async def responses(rig: Rig) -> None:
    tool = {"type": "function", "name": NAME, "parameters": TOOL}
    history: list[Any] = [{"role": "user", "content": "What is it?"}]
    for _ in range(TURNS):
        body = {"model": "m", "input": history, "instructions": "Be brief.", "tools": [tool]}
        _, reply = await rig.ask("/v1/responses", body)
        history += reply["output"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        history += [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]


async def anthropic(rig: Rig) -> None:
    history: list[Any] = [{"role": "user", "content": "What is it?"}]
    fields = {"model": "m", "max_tokens": 100, "system": "Be brief.", "tools": [{"name": NAME, "input_schema": TOOL}]}
    for _ in range(TURNS):
        _, reply = await rig.ask("/v1/messages", {**fields, "messages": history}, {"anthropic-version": "2023-06-01"})
        history.append({"role": "assistant", "content": reply["content"]})
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
        history.append({"role": "user", "content": results})


async def gemini(rig: Rig) -> None:
    history: list[Any] = [{"role": "user", "parts": [{"text": "What is it?"}]}]
    fields = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": NAME, "parametersJsonSchema": TOOL}]}],
    }
    for _ in range(TURNS):
        _, reply = await rig.ask("/v1beta/models/m:generateContent", {**fields, "contents": history})
        content = reply["candidates"][0]["content"]
        history.append(content)
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        parts = [
            {"functionResponse": {"name": NAME, "id": call.get("id"), "response": {"output": "sunny"}}}
            for call in calls
        ]
        history.append({"role": "user", "parts": parts})


AGENTS = [chat, responses, anthropic, gemini]


@pytest.mark.parametrize("agent", AGENTS, ids=["chat", "responses", "anthropic", "gemini"])
async def test_each_prompt_begins_with_the_last_one_and_its_answer(agent: Callable[[Rig], Awaitable[None]]) -> None:
    async with chat_server(model) as url, door(ModelSpec.model_validate(served(url))) as rig:
        await agent(rig)
    assert [turn.kept for turn in rig.turns] == [None] * TURNS
    assert [message["role"] for message in rig.turns[1].messages] == ["tool", "tool", "assistant"]
    for before, after in zip(rig.turns, rig.turns[1:], strict=False):
        so_far = [*(before.completion.prompt_token_ids or ()), *(before.completion.completion_token_ids or ())]
        assert bytes(after.completion.prompt_token_ids or ()).startswith(bytes(so_far))
        assert len(so_far) > 200
