"""The tools that are commands in the task's sandbox: the agent's own shell, and those that a task declares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from rollout_engine.agents.tools.base import ToolError
from rollout_engine.agents.tools.output import cut_output, shell_output, tool_output
from rollout_engine.errors import ExecTimeout, LimitReached
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import ToolTaskSpec
from rollout_engine.types import ExecResult, StopReason, ToolSpec

START_TRIES, START_PAUSE_S = 5, 0.5
"""A command that finds no process left is started again this often, so long (s) after the last time."""
MAX_COMMAND_BYTES = 120_000
"""Linux takes at most 128 KiB for one argument of a program."""

SHELL = ToolSpec(
    "shell",
    "Runs a command with sh in the workspace. Every call is a shell of its own: files stay, variables and the "
    "working directory do not. There is no input and no terminal.",
    {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "What sh -c runs."}},
        "required": ["command"],
        "additionalProperties": False,
    },
)


class Shell:
    """The agent's own `shell` tool."""

    spec = SHELL

    def __init__(self, sandbox: Sandbox, timeout_s: float) -> None:
        self._sandbox, self._timeout_s = sandbox, timeout_s

    async def call(self, arguments: Mapping[str, Any]) -> bytes:
        command = arguments["command"].encode("utf-8", "replace")
        if b"\0" in command:
            raise ToolError("the command holds a NUL character")
        if len(command) > MAX_COMMAND_BYTES:
            raise ToolError(f"the command is longer than {MAX_COMMAND_BYTES:,} bytes; write large files in parts")
        return await run(self._sandbox, command.decode(), None, self._timeout_s, shell_output)


class Command:
    """A tool that a task declares as a command: its arguments are the command's standard input, as JSON."""

    def __init__(self, tool: ToolTaskSpec, sandbox: Sandbox, timeout_s: float) -> None:
        assert tool.command is not None
        self.spec = ToolSpec(tool.name, tool.description, tool.parameters)
        self._command, self._sandbox, self._timeout_s = tool.command, sandbox, timeout_s

    async def call(self, arguments: Mapping[str, Any]) -> bytes:
        given = json.dumps(arguments).encode("ascii")
        return await run(self._sandbox, self._command, given, self._timeout_s, tool_output)


async def run(
    sandbox: Sandbox, command: str, stdin: bytes | None, timeout_s: float, shown: Callable[[ExecResult], bytes]
) -> bytes:
    """A command's result as `shown`; where it met its limit, what it wrote until then.

    Raises LimitReached where what earlier commands left running leaves no process for this one, and does not end.
    """
    for tries_left in reversed(range(START_TRIES)):
        try:
            result = await sandbox.exec(["sh", "-c", command], stdin=stdin, timeout_s=timeout_s)
        except ExecTimeout as late:
            return cut_output(late.partial, timeout_s)
        if not result.crowded:
            return shown(result)
        if tries_left:
            await asyncio.sleep(START_PAUSE_S)
    raise LimitReached(StopReason.PROCESS_LIMIT)
