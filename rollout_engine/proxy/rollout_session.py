"""A rollout's session over its bound model: limits, roles, records, and an end that reaches every call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from rollout_engine.errors import HostError, InfraError, LimitReached, ModelError, describe
from rollout_engine.formats.base import Overrides
from rollout_engine.models.base import Passed, Piece
from rollout_engine.proxy.roles import AGENT, SUB, RoleRule
from rollout_engine.proxy.session import Call, CallRefused, Upstream
from rollout_engine.proxy.threads import Threads
from rollout_engine.types import Completion, Delta, StopReason, Turn

MAX_NOTES = 20
"""Refusals that are kept for the row."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What an agent program may ask of its model."""

    max_turns: int = 30
    """Calls of the agent itself."""
    max_tokens: int = 1_000_000
    """Completion tokens, those of sub-calls included."""
    max_sub_calls: int = 1_000
    agent_at_once: int = 4
    """Calls of the agent itself that run at once; more wait."""
    sub_at_once: int = 10
    max_waiting: int = 64
    """Calls that run or wait; more are refused."""


@dataclass(slots=True)
class Counts:
    """What the calls of one role came to."""

    begun: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tool_calls: dict[str, int] = field(default_factory=dict)
    """By the tool's name."""


class RolloutSession:
    """See `Session`. `on_turn` gets each turn as soon as it is whole; `end` and `drain` are the rollout's to call."""

    def __init__(
        self,
        upstream: Upstream,
        limits: SessionLimits,
        on_turn: Callable[[Turn], None],
        *,
        overrides: Overrides | None = None,
        rules: Sequence[RoleRule] = (),
        models: Sequence[str] = (),
        record_sub: bool = False,
    ) -> None:
        """`overrides` are the run's own, besides the model's name and sampling, which are the upstream's."""
        own = upstream.overrides
        self.overrides = own if overrides is None else replace(overrides, model=own.model, sampling=own.sampling)
        self.rules, self.models = rules, models
        self.counts = {AGENT: Counts(), SUB: Counts()}
        self.failure: InfraError | None = None
        """The first fault of the model or of the proxy: the rollout has failed."""
        self.limit: StopReason | None = None
        """The first limit that a call met."""
        self.notes: list[str] = []
        """Requests that were refused, the first of them."""
        self._upstream, self._limits, self._on_turn, self._record_sub = upstream, limits, on_turn, record_sub
        self._slots = {AGENT: asyncio.Semaphore(limits.agent_at_once), SUB: asyncio.Semaphore(limits.sub_at_once)}
        self._threads = {AGENT: Threads(AGENT), SUB: Threads(SUB)}
        self._scopes: set[_Scope] = set()
        self._changed = asyncio.Event()
        self._ended: str | None = None
        self._turns = 0
        self._idle_since = self._quiet_since = asyncio.get_running_loop().time()

    @property
    def idle_s(self) -> float:
        """For how long no call runs or waits."""
        return 0.0 if self._scopes else asyncio.get_running_loop().time() - self._quiet_since

    # -- calls --------------------------------------------------------------------------------------------------

    def passes(self, format_name: str) -> bool:
        return self._upstream.speaks == format_name

    async def complete(self, call: Call) -> Completion:
        asked = call.asked
        async with self._admitted(call.role) as env_s:
            completion = await self._upstream.complete(asked.messages, asked.tools, sampling=asked.sampling)
            self._record(call, completion, env_s)
        return completion

    async def pass_on(self, call: Call, body: bytes) -> Passed:
        async with self._admitted(call.role) as env_s:
            passed = await self._upstream.pass_on(body, headers=call.headers)
            self._record(call, passed.completion, env_s)
        return passed

    async def stream(self, call: Call) -> AsyncGenerator[Delta, None]:
        asked = call.asked
        async with self._admitted(call.role) as env_s:
            pieces = self._upstream.stream(asked.messages, asked.tools, sampling=asked.sampling)
            async with contextlib.aclosing(pieces):
                async for delta in pieces:
                    if delta.completion is not None:
                        self._record(call, delta.completion, env_s)
                    yield delta

    async def pass_stream(self, call: Call, body: bytes) -> AsyncGenerator[Piece, None]:
        async with self._admitted(call.role) as env_s:
            pieces = self._upstream.pass_stream(body, headers=call.headers, hide_usage=not call.asked.include_usage)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if piece.completion is not None:
                        self._record(call, piece.completion, env_s)
                    yield piece

    def refused(self, what: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(what)

    def broke(self, error: Exception) -> None:
        self._fail(HostError(f"the proxy failed: {describe(error)}"))

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Ends every call that runs, and refuses all that come. The reason is told to the agent."""
        if self._ended is None:
            self._ended = reason
        for scope in list(self._scopes):
            scope.end()

    async def drain(self, seconds: float) -> None:
        """Lets sub-calls that still run end, for at most `seconds`; then `end`s what is left. New calls are refused."""
        if self._ended is None:
            self._ended = "the agent has ended"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(scope.role == SUB for scope in self._scopes):
                    self._changed.clear()
                    await self._changed.wait()
        self.end(self._ended)
        while self._scopes:
            self._changed.clear()
            await self._changed.wait()

    # -- within -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _admitted(self, role: str) -> AsyncIterator[float]:
        """The time of a call: within the limits, in its role's slots, and ended by `end`. Yields env_s."""
        self._check(role)
        self.counts[role].begun += 1
        env_s = max(asyncio.get_running_loop().time() - self._idle_since, 0.0) if role == AGENT else 0.0
        scope = _Scope(role, self)
        try:
            with scope:
                async with self._slots[role]:
                    yield env_s
        except LimitReached as error:
            self._met(error.reason)
            raise
        except ModelError as error:
            self._fail(error)
            raise

    def _check(self, role: str) -> None:
        """Raises CallRefused or LimitReached."""
        limits, counts = self._limits, self.counts[role]
        if self.failure is not None:
            raise CallRefused("the rollout has failed")
        if self._ended is not None:
            raise CallRefused(self._ended)
        if len(self._scopes) >= limits.max_waiting:
            raise CallRefused(f"more than {limits.max_waiting} calls at once")
        if counts.begun >= (limits.max_turns if role == AGENT else limits.max_sub_calls):
            self._met(StopReason.MAX_TURNS)
        elif sum(each.completion_tokens for each in self.counts.values()) >= limits.max_tokens:
            self._met(StopReason.MAX_TOKENS)
        else:
            return
        raise LimitReached(self.limit or StopReason.MAX_TURNS)

    def _record(self, call: Call, completion: Completion, env_s: float) -> None:
        counts, usage = self.counts[call.role], completion.usage
        counts.answered += 1
        counts.prompt_tokens += usage.prompt_tokens
        counts.completion_tokens += usage.completion_tokens
        for each in completion.message.get("tool_calls") or ():
            name = str((each.get("function") or {}).get("name") or "")[:100]
            counts.tool_calls[name] = counts.tool_calls.get(name, 0) + 1
        if call.role == AGENT:
            self._idle_since = asyncio.get_running_loop().time()
        if call.role == AGENT or self._record_sub:
            turn = self._threads[call.role].turn(self._turns, call.asked.messages, completion, env_s)
            self._turns += 1
            self._on_turn(turn)

    def _met(self, reason: StopReason) -> None:
        if self.limit is None:
            self.limit = reason

    def _fail(self, error: InfraError) -> None:
        if self.failure is None:
            self.failure = error


class _Scope:
    """One call that `end` can reach. As with asyncio.timeout, only a cancellation of our own becomes an error."""

    __slots__ = ("_cancelling", "_ended", "_session", "_task", "role")

    def __init__(self, role: str, session: RolloutSession) -> None:
        self.role, self._session = role, session
        self._ended = False
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None, "a call runs in a task"
        self._cancelling = self._task.cancelling()
        self._session._scopes.add(self)

    def end(self) -> None:
        if not self._ended and self._task is not None:
            self._ended = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        self._session._scopes.discard(self)
        self._session._quiet_since = asyncio.get_running_loop().time()
        self._session._changed.set()
        if self._ended and self._task is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise CallRefused(self._session._ended or "the rollout has ended") from None
