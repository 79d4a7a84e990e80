"""The contract of a model client: messages in, one completion out, every fault as a typed ModelError."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec


class ModelClient(Protocol):
    """One model at one server. Shared by all rollouts of a host; retries of calls happen in here and nowhere else."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> Completion:
        """The model's answer. `deadline` is on the event loop's clock and bounds all tries together.

        Raises ModelError and its kinds; LimitReached(CONTEXT_OVERFLOW) where the prompt does not fit.
        """
        ...

    def stream(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> AsyncIterator[Delta]:
        """The same answer in pieces; the last piece carries the whole completion."""
        ...

    async def close(self) -> None:
        """Closes connections. No call may be made afterwards."""
        ...
