"""All tools of one rollout: opened together, called by name, closed together."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from rollout_engine.agents.tools.base import Tool, ToolError
from rollout_engine.agents.tools.calls import Call
from rollout_engine.agents.tools.clip import clip
from rollout_engine.agents.tools.function import Function
from rollout_engine.agents.tools.schema import Fault, fault_finder
from rollout_engine.agents.tools.shell import Command, Shell
from rollout_engine.errors import SetupError
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task, ToolTaskSpec

if TYPE_CHECKING:
    from rollout_engine.agents.tools.mcp import McpServer


class Toolbox:
    """The tools by their names."""

    def __init__(self, checked: Iterable[Tool], unchecked: Iterable[Tool] = (), *, max_output_bytes: int) -> None:
        """Arguments of `unchecked` tools are for the tools to check. Raises SetupError where two have one name."""
        self._max_output_bytes = max_output_bytes
        self._tools: dict[str, tuple[Tool, Fault]] = {}
        for tool in checked:
            self._add(tool, fault_finder(tool.spec.parameters))
        for tool in unchecked:
            self._add(tool, lambda _: None)
        self.specs = tuple(tool.spec for tool, _ in self._tools.values())
        """What the model is offered."""

    def _add(self, tool: Tool, fault: Fault) -> None:
        if tool.spec.name in self._tools:
            raise SetupError(f"two tools are named {tool.spec.name!r}")
        self._tools[tool.spec.name] = tool, fault

    async def answer(self, call: Call) -> str:
        """What the model is told about a call, whatever is wrong with it. InfraErrors pass through."""
        try:
            output = await self._output(call)
        except ToolError as error:
            output = f"[tool error] {error}".encode("utf-8", "replace")
        return clip(output, self._max_output_bytes)

    async def _output(self, call: Call) -> bytes:
        if call.fault is not None:
            raise ToolError(call.fault)
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r:.100}; there are: {', '.join(self._tools)}")
        tool, fault = self._tools[call.name]
        wrong = fault(call.arguments)
        if wrong is not None:
            raise ToolError(f"the arguments do not fit: {wrong}")
        return await tool.call(call.arguments)


@asynccontextmanager
async def open_toolbox(
    task: Task, sandbox: Sandbox, *, timeout_s: float, max_output_bytes: int
) -> AsyncIterator[Toolbox]:
    """The agent's shell and the tools of the task. Raises SetupError where one of those does not come up."""
    async with AsyncExitStack() as open_tools:
        checked: list[Tool] = [Shell(sandbox, timeout_s)]
        listed: list[Tool] = []
        for tool in task.tools:
            if tool.command is not None:
                checked.append(Command(tool, sandbox, timeout_s))
            elif tool.function is not None:
                checked.append(Function(tool, timeout_s))
            else:
                server = await _mcp_server(tool, sandbox, timeout_s)
                open_tools.push_async_callback(server.close)
                listed += await server.open()
        yield Toolbox(checked, listed, max_output_bytes=max_output_bytes)


async def _mcp_server(tool: ToolTaskSpec, sandbox: Sandbox, timeout_s: float) -> McpServer:
    try:
        # A second of work where it is loaded first: not on the event loop.
        module = await asyncio.to_thread(importlib.import_module, "rollout_engine.agents.tools.mcp")
    except ImportError as error:
        raise SetupError(f"tool {tool.name!r} needs the package mcp: pip install 'rollout-engine[mcp]'") from error
    server: McpServer = module.McpServer(tool, sandbox, timeout_s)
    return server
