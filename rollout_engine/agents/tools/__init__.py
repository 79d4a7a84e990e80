"""The tools of the `tool_loop` agent: one contract (base.py), one file per kind, opened together for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from rollout_engine.errors import InputError
from rollout_engine.plugins import load_attribute
from rollout_engine.specs import ToolTaskSpec

__all__ = ["check_tools"]


OWN = {"tool_loop": "shell"}
"""Agent -> the tool that it brings along."""


def check_tools(tools: Sequence[ToolTaskSpec], agent: str = "") -> None:
    """Finds what of a task's tools can be wrong before it runs. Raises InputError that names the field."""
    from rollout_engine.agents.tools.schema import check_schema

    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.mcp is None and tool.name == OWN.get(agent):
            raise InputError(f"the agent {agent} has a {tool.name} of its own", f"{where}.name", "give it another name")
        check_schema(tool.parameters, f"{where}.parameters")
        if tool.function is not None:
            _check_function(tool.function, f"{where}.function")
        if tool.mcp is not None:
            _check_mcp(tool.mcp, f"{where}.mcp")


def _check_function(path: str, where: str) -> None:
    fix = "name a Python function as module:attribute, importable on every host"
    if not all(path.partition(":")):
        raise InputError(f"{path!r} is no module:attribute", where, fix)
    if not callable(load_attribute(path, "function", where)):
        raise InputError(f"{path} is not callable", where, fix)


def _check_mcp(argv: Sequence[str], where: str) -> None:
    if not argv:
        raise InputError("the command of the MCP server is empty", where, 'such as ["python3", "server.py"]')
    if find_spec("mcp") is None:
        raise InputError("the package mcp is not installed", where, "pip install 'rollout-engine[mcp]'")
