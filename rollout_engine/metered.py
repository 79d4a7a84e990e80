"""Model clients and sandbox providers that are counted: the same contracts around the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rollout_engine.errors import LimitReached
from rollout_engine.metrics import Metrics
from rollout_engine.models.base import ModelClient, Passed, PassingClient, Piece
from rollout_engine.models.retry import TryCounts
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec


class MeteredClient:
    """Times every call of one model, and tells how it ended."""

    def __init__(self, name: str, inner: ModelClient, metrics: Metrics) -> None:
        self._name, self._inner, self._metrics = name, inner, metrics

    @property
    def tries(self) -> TryCounts | None:
        """What the client did inside of its calls; None: it does not say."""
        found = getattr(self._inner, "tries", None)
        return found if isinstance(found, TryCounts) else None

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> Completion:
        with self._call():
            return await self._inner.complete(
                messages, sampling=sampling, tools=tools, deadline=deadline, context=context
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
        with self._call():
            async for delta in self._inner.stream(
                messages, sampling=sampling, tools=tools, deadline=deadline, context=context
            ):
                yield delta

    async def close(self) -> None:
        await self._inner.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        began, status = time.monotonic(), "failed"
        try:
            yield
            status = "ok"
        except LimitReached:  # a prompt that does not fit is the model's answer, not a fault of the call
            status = "ok"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            status = "cancelled"
            raise
        finally:
            self._metrics.count("rollout_model_calls", 1, self._name, status)
            if status == "ok":
                self._metrics.observe("rollout_model_call_seconds", time.monotonic() - began, self._name)


class MeteredPassingClient(MeteredClient):
    """The same for a client that also sends bodies as they are."""

    def __init__(self, name: str, inner: ModelClient, metrics: Metrics) -> None:
        super().__init__(name, inner, metrics)
        assert isinstance(inner, PassingClient)
        self._passing: PassingClient = inner

    @property
    def speaks(self) -> str:
        return self._passing.speaks

    async def pass_on(
        self, body: bytes, *, deadline: float, context: CallContext, headers: Mapping[str, str] | None = None
    ) -> Passed:
        with self._call():
            return await self._passing.pass_on(body, deadline=deadline, context=context, headers=headers)

    async def pass_stream(
        self,
        body: bytes,
        *,
        deadline: float,
        context: CallContext,
        headers: Mapping[str, str] | None = None,
        hide_usage: bool = False,
    ) -> AsyncIterator[Piece]:
        with self._call():
            async for piece in self._passing.pass_stream(
                body, deadline=deadline, context=context, headers=headers, hide_usage=hide_usage
            ):
                yield piece


def metered(name: str, client: ModelClient, metrics: Metrics) -> MeteredClient:
    """The client, counted; it still passes bodies on where it did."""
    kind = MeteredPassingClient if isinstance(client, PassingClient) else MeteredClient
    return kind(name, client, metrics)


class MeteredProvider:
    """Times how long each sandbox takes to be made."""

    def __init__(self, inner: SandboxProvider, metrics: Metrics) -> None:
        self._inner, self._metrics = inner, metrics

    @property
    def name(self) -> str:
        return self._inner.name

    async def open(self, spec: SandboxSpec) -> Sandbox:
        began = time.monotonic()
        try:
            sandbox = await self._inner.open(spec)
        except Exception:
            self._metrics.count("rollout_sandbox_failures")
            raise
        self._metrics.observe("rollout_sandbox_create_seconds", time.monotonic() - began)
        return sandbox

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        return await self._inner.prepare(spec, recipe)

    async def release(self, layer: str) -> None:
        await self._inner.release(layer)

    async def close(self) -> None:
        await self._inner.close()
