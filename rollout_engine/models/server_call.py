"""What a request to our own model server asks for, and for which rollout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from rollout_engine.formats.base import Asked
from rollout_engine.formats.check import Malformed
from rollout_engine.formats.routes import Route
from rollout_engine.models.seed import SEED_HEADER, parse_seed_header
from rollout_engine.models.wire import encode
from rollout_engine.specs import Task
from rollout_engine.types import CallContext, Message


class BadRequest(ValueError):
    """A request that is answered with a 4xx."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ServerCall(NamedTuple):
    """One request, understood, and the rollout that it is for."""

    asked: Asked
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


def call_of(body: bytes, headers: Mapping[str, str], route: Route, tasks: Tasks, seed: int) -> ServerCall:
    """The request. Raises BadRequest."""
    try:
        asked = route.format.parse(_object(body), route.model, route.stream)
    except Malformed as error:
        raise BadRequest(str(error)) from error
    header = headers.get(SEED_HEADER)
    context = _from_header(header) if header is not None else _from_messages(asked, tasks, seed)
    solution = tasks.solutions.get(context.task_id)
    return ServerCall(asked, context if solution is None else _solved(context, solution))


def _solved(context: CallContext, solution: Solution) -> CallContext:
    if isinstance(solution, str):
        return context._replace(solution=solution)
    return context._replace(script=solution.get("script"))


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


def _from_messages(asked: Asked, tasks: Tasks, seed: int) -> CallContext:
    """Without a header the same conversation gets the same answer; the request's own seed makes it another."""
    text = _last_user_text(asked.messages)
    task_id = tasks.prompts.get(text) if text is not None else None
    if task_id is None:
        task_id = "prompt-" + blake2b(encode(asked.messages).encode("ascii"), digest_size=12).hexdigest()
    own_seed = asked.sampling.seed
    turn = sum(message.get("role") == "assistant" for message in asked.messages)
    return CallContext(seed if own_seed is None else own_seed, 0, task_id, asked.model, 0, turn)


def _last_user_text(messages: Sequence[Message]) -> str | None:
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else None
