"""A host's trace file: large turns go there instead of travelling with their row, where hosts can reach the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollout_engine.errors import describe
from rollout_engine.hostplan import HostPlan
from rollout_engine.outbox import turns_bytes
from rollout_engine.store.traces import TraceWriter, sees_run
from rollout_engine.threads import in_own_thread
from rollout_engine.types import RolloutRecord

log = logging.getLogger(__name__)

TRACE_S = 60.0
"""A trace that is not written by then travels inline."""


class HostTraces:
    """Whoever makes it closes it. `on_trouble` is told what keeps traces from being written."""

    def __init__(self, plan: HostPlan, on_trouble: Callable[[str], None]) -> None:
        self._host_id = plan.host_id
        self._inline_bytes = plan.config.store.inline_trace_bytes
        self._on_trouble = on_trouble
        self._writer = _writer(plan)

    async def spill(self, record: RolloutRecord) -> None:
        """Moves the turns of a record into the file if they are large; where that fails they stay in the record."""
        if self._writer is None or turns_bytes(record.turns) <= self._inline_bytes:
            return
        try:
            async with asyncio.timeout(TRACE_S):
                where = await asyncio.to_thread(self._writer.write, record.turns)
        except Exception as error:  # the disk refuses, or an agent's turns fit no table: the outbox finds that out
            log.warning("host=%s could not write a trace, sending it inline: %s", self._host_id, describe(error))
            self._on_trouble(f"{self._writer.path}: traces travel inline: {error}; make room there, or mend its rights")
            return
        record.trace_file, record.trace_offset, record.trace_sha256 = where
        record.turns = []

    async def close(self) -> None:
        if self._writer is not None:
            await in_own_thread(self._writer.close, "close traces")


def _writer(plan: HostPlan) -> TraceWriter | None:
    """A trace file of this host's own, if it sees the run directory that the driver means."""
    if plan.run_dir is None or not sees_run(plan.run_dir, plan.run_id):
        return None
    return TraceWriter(plan.run_dir, plan.host_id, plan.epoch)
