"""The contract of a model client: messages in, one completion out, every fault as a typed ModelError."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

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


class Passed(NamedTuple):
    """A server's answer as it came, and what it says."""

    body: bytes
    completion: Completion


class Piece(NamedTuple):
    """Bytes of a streamed answer as they came. The last event comes with the whole completion."""

    data: bytes
    completion: Completion | None = None


@runtime_checkable
class PassingClient(Protocol):
    """A model client that also sends a request's body as it is, for agents that speak its server's own format."""

    @property
    def speaks(self) -> str:
        """The name of that format."""
        ...

    async def pass_on(
        self, body: bytes, *, deadline: float, context: CallContext, headers: Mapping[str, str] | None = None
    ) -> Passed:
        """The answer to this body. Raises and tries again as `complete` does. `headers` go with it."""
        ...

    def pass_stream(
        self,
        body: bytes,
        *,
        deadline: float,
        context: CallContext,
        headers: Mapping[str, str] | None = None,
        hide_usage: bool = False,
    ) -> AsyncIterator[Piece]:
        """The streamed answer to this body, tried again until the first piece is there.

        `hide_usage` leaves out a chunk that holds nothing but the usage, for agents that did not ask for it.
        """
        ...
