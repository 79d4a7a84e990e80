"""What an agent is told when there is no answer. Never 429 or 5xx: agents try those again, some of them for ever."""

from __future__ import annotations

from typing import NamedTuple

from rollout_engine.errors import LimitReached, ModelError, RolloutEngineError
from rollout_engine.formats.base import CONTEXT_OVERFLOW
from rollout_engine.formats.check import Malformed
from rollout_engine.proxy.session import CallRefused
from rollout_engine.types import StopReason


class Told(NamedTuple):
    """An error as an agent sees it, before its format gives it a shape."""

    status: int
    message: str
    code: str


NO_RETRY = {"x-should-retry": "false"}
"""The official clients of OpenAI and Anthropic obey it."""


def told_of(error: RolloutEngineError | Malformed) -> Told:
    """A fault of the infrastructure is named but not described: it is none of the model's business."""
    if isinstance(error, Malformed):
        return Told(400, str(error), "invalid_request")
    if isinstance(error, LimitReached):
        if error.reason is StopReason.CONTEXT_OVERFLOW:
            # "prompt is too long" is what Anthropic says, "maximum context length" what others do.
            text = "prompt is too long: it exceeds the model's maximum context length"
            return Told(400, text, CONTEXT_OVERFLOW)
        return Told(400, f"the rollout has reached its limit: {error.reason.value}", "limit_reached")
    if isinstance(error, CallRefused):
        return Told(400, str(error), "rollout_ended")
    if isinstance(error, ModelError):
        return Told(400, f"the model could not answer ({type(error).__name__})", "model_failed")
    return Told(400, "the request could not be answered", "internal")
