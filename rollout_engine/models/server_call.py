"""What a request to our own model server asks for, and for which rollout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from rollout_engine.models.seed import SEED_HEADER, parse_seed_header
from rollout_engine.models.wire import encode
from rollout_engine.specs import Task
from rollout_engine.types import CallContext, Message, Sampling, ToolSpec


class BadRequest(ValueError):
    """A request that is answered with a 4xx."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Asked(NamedTuple):
    """One request, understood."""

    model: str
    messages: list[Message]
    sampling: Sampling
    tools: tuple[ToolSpec, ...]
    stream: bool
    context: CallContext


Solution: TypeAlias = str | Mapping[str, str]
"""As a task writes it: the final answer, or {"script": ...}."""


class Tasks(NamedTuple):
    """What the server knows of the tasks."""

    solutions: Mapping[str, Solution]
    """Task id -> final answer, or {"script": ...}."""
    prompts: Mapping[str, str]
    """Text of the last user message -> task id, for calls without the header."""


def tasks_of(tasks: Iterable[Task]) -> Tasks:
    """The solutions and prompts of tasks, for a server of theirs."""
    solutions: dict[str, Solution] = {}
    prompts: dict[str, str] = {}
    for task in tasks:
        if task.solution is not None:
            solutions[task.task_id] = task.solution
        text = _last_user_text(task.messages())
        if text is not None:
            prompts[text] = task.task_id
    return Tasks(solutions, prompts)


def asked_of(body: bytes, headers: Mapping[str, str], tasks: Tasks, seed: int) -> Asked:
    """The request. Raises BadRequest."""
    data = _object(body)
    model, messages = data.get("model"), data.get("messages")
    if not isinstance(model, str):
        raise BadRequest("model is not a text")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise BadRequest("messages is not a list of objects")
    header = headers.get(SEED_HEADER)
    context = _from_header(header) if header is not None else _from_messages(model, messages, data, tasks, seed)
    solution = tasks.solutions.get(context.task_id)
    return Asked(
        model,
        messages,
        Sampling(logprobs=bool(data.get("logprobs") or data.get("return_token_ids"))),
        tuple(_tool(tool) for tool in data.get("tools") or ()),
        bool(data.get("stream")),
        context if solution is None else _solved(context, solution),
    )


def _solved(context: CallContext, solution: Solution) -> CallContext:
    if isinstance(solution, str):
        return replace(context, solution=solution)
    return replace(context, script=solution.get("script"))


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is no JSON object")
    return data


def _from_header(header: str) -> CallContext:
    try:
        return parse_seed_header(header)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _from_messages(model: str, messages: list[Message], data: dict[str, Any], tasks: Tasks, seed: int) -> CallContext:
    """Without a header the same conversation gets the same answer; the request's own seed makes it another."""
    text = _last_user_text(messages)
    task_id = tasks.prompts.get(text) if text is not None else None
    if task_id is None:
        task_id = "prompt-" + blake2b(encode(messages).encode("ascii"), digest_size=12).hexdigest()
    own_seed = data.get("seed")
    turn = sum(message.get("role") == "assistant" for message in messages)
    return CallContext(own_seed if isinstance(own_seed, int) else seed, 0, task_id, model, 0, turn)


def _last_user_text(messages: Sequence[Message]) -> str | None:
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else None


def _tool(tool: Any) -> ToolSpec:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("tools is not a list of functions")
    return ToolSpec(function["name"], str(function.get("description") or ""), function.get("parameters") or {})
