"""Where a run stands: counted as rows are committed, told to people and machines."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from rollout_engine.events import MAX_EVENTS, Event
from rollout_engine.spending import Used, own_use
from rollout_engine.types import Status


@dataclass(slots=True)
class Progress:
    """Counts of one epoch; `before` holds what earlier epochs had committed. Times are monotonic seconds."""

    total: int | None = None
    """Planned rollouts of the whole run, where known."""
    before: int = 0
    done: int = 0
    running: int | None = 0
    """None: not known to whoever watches from outside."""
    pending: int = 0
    valid: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """`boundary:type` of failed rows."""
    verifier_errors: int = 0
    cancelled: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    started: float = 0.0
    now: float = 0.0
    hosts: int = 0
    notes: list[str] = field(default_factory=list)
    """What a person should know: a paused model, a lost host, a spent budget."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """What happened to hosts and nodes, the newest last."""
    limits: dict[str, str] = field(default_factory=dict)
    """Limits that adapt, as found so far, by model."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts committed rows."""
        rows = batch.num_rows
        self.done += rows
        self.valid += rows - batch.column("score").null_count
        self._use(own_use(batch))
        if batch.column("failure_type").null_count < rows or batch.column("score").null_count:
            self._add_failures(batch)

    def _add_failures(self, batch: pa.RecordBatch) -> None:
        columns = (batch.column(name).to_pylist() for name in ("status", "score", "failure_boundary", "failure_type"))
        for status, score, boundary, kind in zip(*columns, strict=True):
            if status == Status.CANCELLED:
                self.cancelled += 1
            elif status == Status.FAILED:
                self.failed[f"{boundary}:{kind}"] += 1
            elif score is None:
                self.verifier_errors += 1

    def threw(self, used: Used) -> None:
        """Counts a try that was thrown away; what it used was used all the same."""
        self.retries += 1
        self._use(used)

    def _use(self, used: Used) -> None:
        self.prompt_tokens += used.prompt_tokens
        self.completion_tokens += used.completion_tokens
        self.cost_usd += used.cost_usd or 0.0

    @property
    def rate(self) -> float:
        """Rollouts a second since the start of this epoch."""
        seconds = self.now - self.started
        return self.done / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate."""
        if self.total is None or not self.rate:
            return None
        return max(self.total - self.before - self.done, 0) / self.rate

    @property
    def failed_count(self) -> int:
        return sum(self.failed.values())

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and logs."""
        return {
            **asdict(self),
            "failed": dict(self.failed),
            "events": [asdict(event) for event in self.events],
            "rate": self.rate,
            "eta_s": self.eta_s,
        }
