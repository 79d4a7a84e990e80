"""The contract of a tool: what a model may call, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rollout_engine.types import ToolSpec


class ToolError(Exception):
    """What went wrong with a call and is the model's to know: the text becomes the answer."""


class Tool(Protocol):
    """One function that a model may call. Arguments have been checked against its schema."""

    @property
    def spec(self) -> ToolSpec:
        """What the model is offered."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> bytes:
        """What the model gets to see; whoever asked clips it. Raises ToolError.

        An InfraError passes through and fails the rollout: a fault of ours is nothing that a model should see.
        """
        ...
