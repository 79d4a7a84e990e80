"""What a run has used of its budgets of cost and tokens, the tries that were thrown away among it: pure.

The usage of a try that is tried again is not lost with its row: it counts at once, and is written into the row that
the rollout gets in the end. What a lost host used for rows that never arrived is known to nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.config import RunConfig
from rollout_engine.types import RolloutRecord

THROWN = ("thrown_prompt_tokens", "thrown_completion_tokens", "thrown_cost_usd")
"""The columns that hold what the thrown-away tries of a rollout used."""
USED = ("prompt_tokens", "completion_tokens", "cost_usd")
"""Those that hold what the agent of a row's own try used."""
JUDGED = ("judge_prompt_tokens", "judge_completion_tokens", "judge_cost_usd")
"""Those that hold what its judges used."""


class Used(NamedTuple):
    """Tokens and cost of some rollouts; `cost_usd` None: no price is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: Used) -> Used:
        costs = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return Used(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            sum(costs) if costs else None,
        )


class Spending:
    """What was used, and what of it belongs to rollouts that have no row yet."""

    def __init__(self, config: RunConfig, before: Used) -> None:
        """`before`: what earlier epochs used."""
        self._max_cost, self._max_tokens = config.max_cost_usd, config.max_tokens
        self._used = before
        self._thrown: dict[int, Used] = {}

    @property
    def used(self) -> Used:
        """Of the whole run, as far as it is known."""
        return self._used

    def throw(self, key: int, row: pa.RecordBatch) -> Used:
        """A try of a rollout is thrown away, and another one follows; what it used."""
        used = own_use(row)
        self._used = self._used.plus(used)
        self._thrown[key] = self._thrown.get(key, Used()).plus(used)
        return used

    def commit(self, batch: pa.RecordBatch) -> None:
        """Rows are on the disk: what they used themselves counts now."""
        self._used = self._used.plus(own_use(batch))

    def stamp(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with what their rollouts' earlier tries used; that is forgotten here."""
        if not self._thrown:
            return batch
        thrown = [self._thrown.pop(key, Used()) for key in batch.column("key").to_pylist()]
        for name, values in zip(THROWN, zip(*thrown, strict=True), strict=False):
            at = batch.schema.get_field_index(name)
            batch = batch.set_column(at, batch.schema.field(at), pa.array(values, batch.schema.field(at).type))
        return batch

    def stamp_record(self, record: RolloutRecord) -> None:
        """The same for a row that is being made."""
        thrown = self._thrown.pop(record.key, None)
        if thrown is not None:
            record.thrown_prompt_tokens, record.thrown_completion_tokens, record.thrown_cost_usd = thrown

    def exceeded(self) -> str | None:
        """Which budget is spent, in words that name it; None: there is something left."""
        if self._max_cost is not None and (self._used.cost_usd or 0.0) >= self._max_cost:
            return f"max_cost_usd: the budget of ${self._max_cost:g} is spent"
        if self._max_tokens is not None and self._used.tokens >= self._max_tokens:
            return f"max_tokens: the budget of {self._max_tokens:,} tokens is spent"
        return None


def used_by(batch: pa.RecordBatch | pa.Table, columns: tuple[str, str, str]) -> Used:
    """The sum over rows."""
    prompt, completion, cost = (_sum(batch.column(name)) for name in columns)
    return Used(prompt or 0, completion or 0, cost)


def own_use(batch: pa.RecordBatch | pa.Table) -> Used:
    """The sum over rows of what their own tries used, agents and judges together."""
    return used_by(batch, USED).plus(used_by(batch, JUDGED))


def all_used_by(batch: pa.RecordBatch | pa.Table) -> Used:
    """The sum over rows, what was thrown away included."""
    return own_use(batch).plus(used_by(batch, THROWN))


def _sum(column: Any) -> Any:
    return pc.sum(column).as_py() if column.null_count < len(column) else None
