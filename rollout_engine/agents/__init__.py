"""Agents: one contract (base.py), one file per implementation, each imported only when a run asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from rollout_engine.agents.base import Agent
from rollout_engine.errors import InputError
from rollout_engine.plugins import find

AGENTS: dict[str, str] = {
    "single_turn": "rollout_engine.agents.single_turn:SingleTurn",
    "tool_loop": "rollout_engine.agents.tool_loop:ToolLoop",
    "opencode": "rollout_engine.agents.cli.opencode:AGENT",
    "codex": "rollout_engine.agents.cli.codex:AGENT",
    "claude_code": "rollout_engine.agents.cli.claude_code:AGENT",
    "gemini": "rollout_engine.agents.cli.gemini:AGENT",
    "mini_swe_agent": "rollout_engine.agents.cli.mini_swe_agent:AGENT",
    "command": "rollout_engine.agents.cli.command:AGENT",
}
"""Name -> `module:attribute` of a factory that takes the agent's options as keywords."""

ENTRY_POINTS = "rollout_engine.agents"
"""Installed packages add agents under this entry-point group."""


def make_agent(name: str, options: Mapping[str, Any] | None = None) -> Agent:
    """The agent called `name`: a built-in, an entry point, or `module:attribute`. Raises InputError."""
    factory = find(name, AGENTS, "agent", group=ENTRY_POINTS, where="agent")
    try:
        return cast("Agent", factory(**(options or {})))
    except TypeError as error:
        raise InputError(
            f"the agent {name!r} cannot be made with the options {sorted(options or {})}: {error}",
            "agent_options",
            "remove or correct the option that is named here",
        ) from error


@cache
def agent_needs_sandbox(name: str) -> bool:
    """Whether the agent works in a sandbox whatever the task declares: its factory's `needs_sandbox`, if it has one.

    An agent that cannot be found needs none: whoever makes it says so.
    """
    try:
        factory = find(name, AGENTS, "agent", group=ENTRY_POINTS, where="agent")
    except InputError:
        return False
    return bool(getattr(factory, "needs_sandbox", False))
