"""How a scripted model works with a shell: runs the task's own solution, or something plausible that solves nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollout_engine.models.draws import uniforms
from rollout_engine.models.pieces import pieces_of_script
from rollout_engine.types import CallContext, Message, ToolSpec

SHELL = "shell"
SHELLS = (SHELL, "bash", "Bash", "exec_command", "run_shell_command", "shell_command")
"""Tools by which scripted models act: our own agents' one, and those of well-known agent programs."""
COMMANDS = ("command", "cmd")
"""What they call their argument."""
DONE = "Done."

LOOKS = ("ls -la", "pwd; ls -a | head -n 50", "ls -R | head -n 50", "id; uname -a", "df -h . | tail -n 1")
"""What an agent looks at before it starts."""
FUTILE = (
    "ls -la",
    "echo TODO > notes.txt",
    "python3 -c 'print(solve('",
    "sed -n 1,5p README.md",
    "touch done.txt",
)
"""Attempts that solve nothing."""


def can_act(context: CallContext, tools: Sequence[ToolSpec]) -> bool:
    """Whether the task's solution is a script, and there is a shell to run it with."""
    return context.script is not None and shell_of(tools) is not None


def shell_of(tools: Sequence[ToolSpec]) -> ToolSpec | None:
    """The shell among the tools that are offered."""
    return next((tool for tool in tools if tool.name in SHELLS), None)


def act(
    context: CallContext, messages: Sequence[Message], skill: float, turns: int, shell: ToolSpec | None = None
) -> Message:
    """The next call of `turns` calls to the shell, and after them the final text.

    Which attempt it is, right or wrong, is drawn once for a rollout; how far it has come is in the messages.
    """
    # The draws of turn 0 hold for all of the rollout's calls.
    u_right, u_wrong = uniforms(context._replace(turn=0), "act")
    commands = _right(context.script or "", turns) if u_right < skill else _wrong(u_wrong, turns)
    done = _calls_made(messages)
    if done >= len(commands):
        return {"role": "assistant", "content": DONE}
    arguments = json.dumps(_arguments(shell, commands[done]))
    name = SHELL if shell is None else shell.name
    call = {"id": f"call-{done}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _arguments(shell: ToolSpec | None, command: str) -> dict[str, str]:
    """The command under the name that the tool has for it, and a word for whatever else the tool requires."""
    schema = shell.parameters if shell is not None else {}
    known = schema.get("properties") or {}
    name = next((each for each in COMMANDS if each in known), COMMANDS[0])
    others = {each: "a step" for each in schema.get("required") or () if each != name}
    return {name: command, **others}


def _right(script: str, turns: int) -> list[str]:
    pieces = pieces_of_script(script, turns)
    return [LOOKS[at % len(LOOKS)] for at in range(turns - len(pieces))] + pieces


def _wrong(u: float, turns: int) -> list[str]:
    looks = [LOOKS[at % len(LOOKS)] for at in range(turns - 1)]
    return [*looks, FUTILE[int(u * len(FUTILE))]]


def _calls_made(messages: Sequence[Message]) -> int:
    """Answers of the model since the task was given; a prompt may hold some of its own."""
    made = 0
    for message in reversed(messages):
        if message.get("role") == "user":
            break
        made += message.get("role") == "assistant"
    return made
