"""A million rows: what a row costs to commit, to resume from, to keep. Run: pytest tests/store/test_performance.py"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollout_engine.schema import LOG

from .rows import BODY, SPACE, make_run, many, record

ROWS = 1_000_000
BATCH = 256


def test_a_million_rows_cost_little(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = run.start()
    started = time.process_time()
    for slot in range(ROWS // SPACE.per_slot // 8):
        writer.plan.append(0, f"task/{slot}", "d" * 32, BODY)
    plan_us = (time.process_time() - started) / len(writer.plan) * 1e6

    batch = many(np.arange(BATCH), record(0, turns=[], num_turns=0))
    at = LOG.get_field_index("key")
    started = time.process_time()
    for first in range(0, ROWS, BATCH):
        keys = pa.array(np.arange(first, first + BATCH))
        writer.commit([batch.set_column(at, LOG.field(at), keys)])
    commit_us = (time.process_time() - started) / ROWS * 1e6
    writer.close("finished")

    started = time.process_time()
    ledger = run.winners()
    winners_s = time.process_time() - started
    assert ledger.counts[1] == ledger.rows >= ROWS
    assert plan_us < 30
    assert commit_us < 10
    assert winners_s < 3
    print(f"plan {plan_us:.1f} us a slot, commit {commit_us:.1f} us a row, winners {winners_s:.2f} s")
