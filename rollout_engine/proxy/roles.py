"""Tells an agent's own calls from those of its helpers (titles, sub-agents, compaction). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_engine.formats.base import Asked
from rollout_engine.formats.parts import plain_text

AGENT, SUB = "agent", "sub"
ROLE_HEADER = "x-rlm-role"


@dataclass(frozen=True, slots=True)
class RoleRule:
    """A call for which all that is set here holds gets this role. A rule with nothing set holds for every call."""

    role: str = SUB
    model: str | None = None
    """Pattern (regular expression, whole) of the model's name that the agent asked for."""
    system: str | None = None
    """Pattern that is found in the system text."""
    prompt: str | None = None
    """Pattern that is found in the first message of the user."""
    tools: bool | None = None
    """Whether the call offers tools."""
    header: tuple[str, str] | None = None
    """A header, and the pattern (whole) of its value."""


def role_of(headers: Mapping[str, str], asked: Asked, rules: Sequence[RoleRule]) -> str:
    """The header's role where it names one, else that of the first rule that holds, else the agent's."""
    named = headers.get(ROLE_HEADER)
    if named is not None:
        return SUB if named.strip().lower() == SUB else AGENT
    return next((rule.role for rule in rules if _holds(rule, headers, asked)), AGENT)


def _holds(rule: RoleRule, headers: Mapping[str, str], asked: Asked) -> bool:
    if rule.tools is not None and rule.tools is not bool(asked.tools):
        return False
    if rule.model is not None and not re.fullmatch(rule.model, asked.model):
        return False
    if rule.header is not None and not re.fullmatch(rule.header[1], headers.get(rule.header[0], "")):
        return False
    if rule.system is not None and not re.search(rule.system, _first(asked, ("system", "developer"))):
        return False
    return rule.prompt is None or re.search(rule.prompt, _first(asked, ("user",))) is not None


def _first(asked: Asked, roles: tuple[str, ...]) -> str:
    return next((plain_text(each.get("content")) for each in asked.messages if each.get("role") in roles), "")
