"""The one line that the log has for each rollout, when it has ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from rollout_engine.loglines import About, Fields, speaking_of
from rollout_engine.schema import rollout_id
from rollout_engine.types import RolloutRecord, Turn

log = logging.getLogger("rollout_engine.rollouts")

MAX_TOOLS = 16
"""Names of tools on a line; a model may call them whatever it likes, so the others share one."""
MAX_NAME_CHARS = 64
MAX_ERROR_CHARS = 300


class RolloutLines:
    """Gathers them, and says all that have gathered at once: a call of `logging` costs more than a line."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, record: RolloutRecord) -> None:
        """A rollout has ended. Call it while the record still has its turns."""
        if log.isEnabledFor(logging.INFO):
            self._rows.append(rollout_line(record))

    def say(self, about: About) -> None:
        """At level info."""
        if self._rows:
            rows, self._rows = self._rows, []
            with speaking_of(about):
                log.info(Fields("rollout", rows))


def rollout_line(record: RolloutRecord) -> dict[str, Any]:
    """What is known of a rollout, short. An absent score is null, never 0."""
    line: dict[str, Any] = {
        "rollout_id": rollout_id(record.round, record.task_id, record.model, record.attempt),
        "task": record.task_id,
        "model": record.model,
        "attempt": record.attempt,
        "retries": record.retries,
        "status": record.status,
        "stop_reason": record.stop_reason,
        "turns": record.num_turns,
        "tools": tool_calls(record.turns),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "score": record.score,
        "duration_s": round(record.ended_at - record.started_at, 4),
    }
    if record.cost_usd is not None:
        line["cost_usd"] = round(record.cost_usd, 6)
    if record.agent_exit_code is not None:
        line["exit_code"] = record.agent_exit_code
    if record.failure_type is not None:
        line["error"] = f"{record.failure_boundary}:{record.failure_type}"
        line["error_message"] = (record.failure_message or "")[:MAX_ERROR_CHARS]
    return line


def tool_calls(turns: Iterable[Turn]) -> dict[str, int]:
    """How often each tool was called. Turns of a user's own agent may hold anything: what is no call is not counted."""
    counts: dict[str, int] = {}
    for turn in turns:
        message = getattr(getattr(turn, "completion", None), "message", None)
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(calls, list):
            continue
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            name = str(function.get("name"))[:MAX_NAME_CHARS] if isinstance(function, dict) else "?"
            name = name if name in counts or len(counts) < MAX_TOOLS else "(others)"
            counts[name] = counts.get(name, 0) + 1
    return counts
