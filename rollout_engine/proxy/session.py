"""What the proxy needs of a rollout: who answers a call, within which limits, and what the run fixes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollout_engine.errors import RolloutEngineError
from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.models.base import Passed, Piece
from rollout_engine.proxy.roles import RoleRule
from rollout_engine.types import Completion, Delta, Message, Sampling, ToolSpec


class CallRefused(RolloutEngineError):
    """The rollout takes no more calls: it has ended, failed, or is asked for too many at once."""


class Call(NamedTuple):
    """One model call of an agent program, with the run's overrides in it."""

    role: str
    """agent or sub."""
    asked: Asked
    headers: Mapping[str, str] | None = None
    """Those of the agent that go with a body that passes."""


class Session(Protocol):
    """One rollout as its proxy sees it. Every answer that is given is recorded as a turn before its end is handed out.

    All calls raise ModelError (the model failed and the client's own retries are used up), LimitReached (a limit
    of the rollout, or CONTEXT_OVERFLOW) and CallRefused. Cancelling a call, or closing its stream, ends it upstream.
    """

    @property
    def overrides(self) -> Overrides:
        """What the run fixes."""
        ...

    @property
    def rules(self) -> Sequence[RoleRule]:
        """Which calls are by helpers of the agent."""
        ...

    @property
    def models(self) -> Sequence[str]:
        """The names that the agent may ask for; empty: any name is taken for the rollout's model."""
        ...

    def passes(self, format_name: str) -> bool:
        """Whether the model's server speaks this format, so that bodies can pass unchanged."""
        ...

    async def complete(self, call: Call) -> Completion:
        """The answer, in the engine's own form."""
        ...

    def stream(self, call: Call) -> AsyncGenerator[Delta, None]:
        """The answer in pieces; the last carries the whole completion."""
        ...

    async def pass_on(self, call: Call, body: bytes) -> Passed:
        """The server's own answer to this body; `call` says the same in the engine's form, for the record."""
        ...

    def pass_stream(self, call: Call, body: bytes) -> AsyncGenerator[Piece, None]:
        """The server's own stream; the piece that ends the answer carries the whole completion."""
        ...

    def refused(self, what: str) -> None:
        """Notes a request that could not be a model call (malformed, too large, of no known format, for a model that
        is not in the run), or that none can come any more, for the rollout's row."""
        ...

    def broke(self, error: Exception) -> None:
        """Notes a fault of the proxy itself: the rollout has failed."""
        ...


class Upstream(Protocol):
    """The rollout's model, within its budgets and deadline: what `RolloutSession` calls (`bound.BoundModel`)."""

    @property
    def speaks(self) -> str | None:
        """The wire format in which bodies can be passed on, None: none."""
        ...

    @property
    def overrides(self) -> Overrides:
        """The model's name at its server, and the sampling that the run fixes."""
        ...

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, sampling: Sampling | None = None
    ) -> Completion: ...

    def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, sampling: Sampling | None = None
    ) -> AsyncGenerator[Delta, None]: ...

    async def pass_on(self, body: bytes, *, headers: Mapping[str, str] | None = None) -> Passed: ...

    def pass_stream(
        self, body: bytes, *, headers: Mapping[str, str] | None = None, hide_usage: bool = False
    ) -> AsyncGenerator[Piece, None]: ...
