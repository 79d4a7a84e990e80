"""The tools that are Python functions on the host. They run with the host's rights: name only what you trust."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollout_engine.agents.tools.base import ToolError
from rollout_engine.errors import InfraError, SetupError, describe
from rollout_engine.plugins import load_attribute
from rollout_engine.specs import ToolTaskSpec
from rollout_engine.types import ToolSpec


class Function:
    """Calls the function with the arguments as keywords; its answer is a text, or becomes JSON.

    What it raises is told to the model, but for an InfraError: by that it says that the fault is not the model's.
    A function that is not async runs in a thread of its own; one that meets its limit is left behind in it.
    """

    def __init__(self, tool: ToolTaskSpec, timeout_s: float) -> None:
        """Raises SetupError where the function cannot be loaded on this host."""
        assert tool.function is not None
        self.spec = ToolSpec(tool.name, tool.description, tool.parameters)
        self._timeout_s = timeout_s
        try:
            self._function: Callable[..., Any] = load_attribute(tool.function, "function")
        except Exception as error:  # a module of the user's own may raise anything while it is imported
            raise SetupError(f"tool {tool.name!r}: {describe(error)}") from error

    async def call(self, arguments: Mapping[str, Any]) -> bytes:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return _text(await self._answer(arguments)).encode("utf-8", "replace")
        except InfraError:
            raise
        # Also SystemExit and its kind, which would end the host; our own cancellation goes on.
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0:
                raise
            if limit.expired():
                raise ToolError(f"no answer within {self._timeout_s:g} s") from None
            raise ToolError(f"{type(error).__name__}: {describe(error)}") from error

    async def _answer(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        answer = await in_thread(lambda: self._function(**arguments))
        return await answer if inspect.isawaitable(answer) else answer


def _text(answer: Any) -> str:
    if isinstance(answer, bytes):
        return answer.decode("utf-8", "replace")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread that nobody waits for at the end: a pool would be used up by functions that hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((answer, error))

    def run() -> None:
        answer, caught = None, None
        try:
            answer = work()
        except BaseException as error:  # it belongs to whoever awaits
            caught = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer, caught)

    threading.Thread(target=run, name="rollout function tool", daemon=True).start()
    answer, error = await future
    if error is not None:
        raise error
    return answer
