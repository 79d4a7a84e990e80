"""Models that answer by themselves (scripted, replay): their contract, and the client that calls them in-process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol

from rollout_engine.config import ModelSpec
from rollout_engine.errors import (
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelRateLimited,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.formats.pieces import deltas_of
from rollout_engine.models.retry import Failed, TryCounts, call_with_retries
from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec, Usage


class Fault(StrEnum):
    """What goes wrong with a call, in-process or over HTTP."""

    RATE_LIMITED = "429"
    SERVER_ERROR = "500"
    CUT = "cut"
    """The connection ends in the middle of the answer."""
    HANG = "hang"
    """No answer ever comes."""
    GARBAGE = "garbage"
    """A 200 that is no completion."""


class Answer(NamedTuple):
    """What a model says to one call."""

    message: Message
    usage: Usage = Usage()
    finish_reason: str = "stop"
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None

    def completion(self, model_s: float = 0.0) -> Completion:
        return Completion(
            self.message,
            self.finish_reason,
            self.usage,
            self.prompt_token_ids,
            self.completion_token_ids,
            self.logprobs,
            None,
            model_s,
        )


class Play(NamedTuple):
    """How one try of a call goes: after `latency_s` there is an answer, or the fault."""

    answer: Answer
    latency_s: float = 0.0
    fault: Fault | None = None
    retry_after_s: float = 0.0


class LocalModel(Protocol):
    """A model without a server of its own. The same context gets the same answer in any process and order."""

    def play(
        self, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], context: CallContext
    ) -> Play:
        """What happens to this try. Raises ModelMissingAnswer."""
        ...


class LocalClient:
    """Calls a local model in-process, with the latency, faults, errors and retries that it has over HTTP."""

    def __init__(self, spec: ModelSpec, model: LocalModel) -> None:
        self._spec, self._model = spec, model
        self._where = f"model {spec.name!r} (in-process)"
        self.tries = TryCounts()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> Completion:
        """The model's answer; see `ModelClient`."""
        clock = asyncio.get_running_loop().time
        started = clock()
        draw = partial(self._model.play, messages, sampling, tools, context)
        play = draw()
        if play.fault is None and play.latency_s < min(deadline - started, self._spec.call_timeout_s):
            # Nothing will go wrong: no need for the frames of a retry loop, of which there may be 10,000 at once.
            await asyncio.sleep(play.latency_s)
            return play.answer.completion(clock() - started)
        return await call_with_retries(
            partial(self._try, itertools.chain((play,), iter(draw, None)), started),
            retries=self._spec.call_retries,
            deadline=deadline,
            call_timeout_s=self._spec.call_timeout_s,
            counts=self.tries,
            gate=context.gate,
        )

    async def stream(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> AsyncIterator[Delta]:
        """The answer in pieces, all of them after its latency."""
        completion = await self.complete(messages, sampling=sampling, tools=tools, deadline=deadline, context=context)
        for delta in deltas_of(completion):
            yield delta
        yield Delta(completion=completion)

    async def close(self) -> None:
        """Nothing is open."""

    async def _try(self, plays: Iterator[Play], started: float, until: float) -> Completion | Failed:
        clock = asyncio.get_running_loop().time
        play = next(plays)
        if play.fault is Fault.RATE_LIMITED:
            await asyncio.sleep(0)
            return Failed(ModelRateLimited(f"{self._where}: 429", play.retry_after_s), play.retry_after_s)
        left_s = until - clock()
        if play.fault is Fault.HANG or play.latency_s >= left_s:
            await asyncio.sleep(left_s)
            return Failed(ModelTimeout(f"{self._where}: no answer in time"))
        await asyncio.sleep(play.latency_s)
        if play.fault is not None:
            return Failed(self._error(play.fault))
        return play.answer.completion(clock() - started)

    def _error(self, fault: Fault) -> ModelError:
        if fault is Fault.SERVER_ERROR:
            return ModelServerError(f"{self._where}: 500")
        if fault is Fault.CUT:
            return ModelConnectionError(f"{self._where}: the connection was cut")
        return ModelBadResponse(f"{self._where}: the answer is no JSON")
