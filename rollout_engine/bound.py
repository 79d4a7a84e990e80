"""The model as one rollout sees it: within the host's budgets and the agent's time, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout_engine.agentclock import AgentClock
from rollout_engine.agents.base import AgentReport
from rollout_engine.config import JudgeSpec, ModelSpec
from rollout_engine.estimate import TokenEstimate
from rollout_engine.formats.base import Overrides
from rollout_engine.gatedcall import GatedCall
from rollout_engine.metered import CallEnded, nobody
from rollout_engine.models.base import ModelClient, Passed, PassingClient, Piece
from rollout_engine.permits import Permits
from rollout_engine.types import (
    CallContext,
    CallGate,
    Completion,
    Delta,
    Message,
    RolloutRecord,
    Sampling,
    ToolSpec,
    Usage,
)
from rollout_engine.waiting import awaiting

CALL_GRACE_S = 1.0
"""A model call may outlive the agent's time by this much, so that it is the agent's limit that ends the agent."""


@dataclass(slots=True)
class Model:
    """One model of the run on a host: its client, and the host's share of its budgets."""

    spec: ModelSpec
    client: ModelClient
    sampling: Sampling
    permits: Permits = field(default_factory=Permits)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    ended: CallEnded = nobody


class BoundModel:
    """Each call waits at the gate of the budgets, ends with the agent's time, and is added to the record."""

    def __init__(
        self, model: Model, context: Callable[[int, CallGate], CallContext], clock: AgentClock, record: RolloutRecord
    ) -> None:
        """`context`: of the call with this number (from 0) at this gate."""
        self._model = model
        self._context = context
        self._clock = clock
        self._record = record
        self._calls = 0
        self.report = AgentReport()
        """The agent's own, for the rollout's row."""

    @property
    def name(self) -> str:
        """What an agent program knows the model as: its name at its server, else in the run."""
        return self._model.spec.model or self._model.spec.name

    @property
    def speaks(self) -> str | None:
        """The wire format in which `pass_on` takes bodies, None: it takes none."""
        client = self._model.client
        return client.speaks if isinstance(client, PassingClient) else None

    @property
    def overrides(self) -> Overrides:
        """What the run's model fixes in a request that passes: the name at its server, and sampling."""
        return Overrides(model=self._model.spec.model, sampling=self._model.sampling)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, sampling: Sampling | None = None
    ) -> Completion:
        """One call; `sampling` None: the run's own. Raises ModelError and LimitReached(CONTEXT_OVERFLOW)."""
        model = self._model
        asked = model.sampling if sampling is None else sampling
        # As `_gated` does, without its frames: this is what an engine does most.
        call, context = self._next(self._chars(messages), asked.max_tokens)
        if not call.begin():
            await self._wait(call)
        began = asyncio.get_running_loop().time()
        try:
            with awaiting(f"call {self._calls} to model {model.spec.name}"):
                completion = await model.client.complete(
                    messages, sampling=asked, tools=tools, deadline=self._ends, context=context
                )
        except BaseException as error:
            self._leave(call, began, error)
            raise
        self._leave(call, began)
        self._count(completion, call)
        return completion

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, sampling: Sampling | None = None
    ) -> AsyncGenerator[Delta, None]:
        """The same in pieces."""
        asked = self._model.sampling if sampling is None else sampling
        async with self._gated(self._chars(messages), asked.max_tokens) as (call, context):
            pieces = self._model.client.stream(
                messages, sampling=asked, tools=tools, deadline=self._ends, context=context
            )
            async with _closing(pieces):
                async for delta in pieces:
                    if delta.completion is not None:
                        self._count(delta.completion, call)
                    yield delta

    async def pass_on(self, body: bytes, *, headers: Mapping[str, str] | None = None) -> Passed:
        """The server's own answer to a body in its own format. Only where `speaks` says so."""
        client = self._passing()
        async with self._gated(len(body), self._model.sampling.max_tokens) as (call, context):
            passed = await client.pass_on(body, deadline=self._ends, context=context, headers=headers)
            self._count(passed.completion, call)
        return passed

    async def pass_stream(
        self, body: bytes, *, headers: Mapping[str, str] | None = None, hide_usage: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """The server's own stream."""
        client = self._passing()
        async with self._gated(len(body), self._model.sampling.max_tokens) as (call, context):
            pieces = client.pass_stream(
                body, deadline=self._ends, context=context, headers=headers, hide_usage=hide_usage
            )
            async with _closing(pieces):
                async for piece in pieces:
                    if piece.completion is not None:
                        self._count(piece.completion, call)
                    yield piece

    def _passing(self) -> PassingClient:
        client = self._model.client
        assert isinstance(client, PassingClient), "speaks is None"
        return client

    @property
    def _ends(self) -> float:
        """The deadline of a call that begins now, on the event loop's clock."""
        return self._clock.ends + CALL_GRACE_S

    def _chars(self, messages: Sequence[Message]) -> int:
        return self._model.estimate.chars(messages) if self._model.permits.counts_tokens else 0

    def _next(self, chars: int, max_tokens: int | None) -> tuple[GatedCall, CallContext]:
        """The next call: its gate, and what its client is told of it."""
        model = self._model
        call = GatedCall(model.permits, model.estimate, self._clock, chars, max_tokens)
        context = self._context(self._calls, call)
        self._calls += 1
        return call, context

    async def _wait(self, call: GatedCall) -> None:
        with awaiting(f"a permit of model {self._model.spec.name}"):
            await call.enter()

    @asynccontextmanager
    async def _gated(self, chars: int, max_tokens: int | None) -> AsyncGenerator[tuple[GatedCall, CallContext], None]:
        call, context = self._next(chars, max_tokens)
        if not call.begin():
            await self._wait(call)
        began = asyncio.get_running_loop().time()
        try:
            yield call, context
        except BaseException as error:
            self._leave(call, began, error)
            raise
        self._leave(call, began)

    def _leave(self, call: GatedCall, began: float, error: BaseException | None = None) -> None:
        call.leave(error)
        self._model.ended(asyncio.get_running_loop().time() - began, error)

    def _count(self, completion: Completion, call: GatedCall) -> None:
        call.used(completion)
        record, usage = self._record, completion.usage
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        record.cost_usd = _plus_cost(record.cost_usd, self._model.spec, usage)
        if completion.weight_version is not None:
            record.weight_version_end = completion.weight_version
            if record.weight_version_start is None:
                record.weight_version_start = completion.weight_version


class BoundJudge(BoundModel):
    """A judge of the run as one verdict sees it: what it uses is counted apart from what the agent used."""

    def __init__(
        self,
        judge: JudgeSpec,
        model: Model,
        context: Callable[[int, CallGate], CallContext],
        deadline: float,
        record: RolloutRecord,
    ) -> None:
        super().__init__(model, context, AgentClock(deadline, deadline), record)
        self.judge = judge

    def _count(self, completion: Completion, call: GatedCall) -> None:
        call.used(completion)
        record, usage = self._record, completion.usage
        record.judge_prompt_tokens += usage.prompt_tokens
        record.judge_completion_tokens += usage.completion_tokens
        record.judge_cost_usd = _plus_cost(record.judge_cost_usd, self.judge, usage)


def _plus_cost(cost_usd: float | None, spec: ModelSpec, usage: Usage) -> float | None:
    """With the price of a call; as it is where the model has no price."""
    if spec.price_prompt is None and spec.price_completion is None:
        return cost_usd
    cost = usage.prompt_tokens * (spec.price_prompt or 0) + usage.completion_tokens * (spec.price_completion or 0)
    return (cost_usd or 0.0) + cost / 1e6


@asynccontextmanager
async def _closing(pieces: AsyncIterator[object]) -> AsyncGenerator[None, None]:
    """Ends a client's stream with its reader. A client of the user's own may return a plain iterator."""
    try:
        yield
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()
