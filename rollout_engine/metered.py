"""Model calls and sandboxes that are counted: where calls are told, and a provider around the real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

from rollout_engine.errors import LimitReached
from rollout_engine.metrics import Metrics
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxProvider, SandboxSpec

CallEnded: TypeAlias = Callable[[float, BaseException | None], None]
"""Told of a call that is over: the seconds since it began, the client's tries and pauses included, and its error."""


def nobody(seconds: float, error: BaseException | None) -> None:
    """Is told, and counts nothing."""


def call_meter(name: str, metrics: Metrics) -> CallEnded:
    """Counts the calls of one model by how they ended, and how long those took that got an answer."""

    def ended(seconds: float, error: BaseException | None) -> None:
        status = "ok" if error is None else _status(error)
        metrics.count("rollout_model_calls", 1, name, status)
        if status == "ok":
            metrics.observe("rollout_model_call_seconds", seconds, name)

    return ended


def _status(error: BaseException) -> str:
    if isinstance(error, LimitReached):  # a prompt that does not fit is the model's answer, not a fault of the call
        return "ok"
    return "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "failed"


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
