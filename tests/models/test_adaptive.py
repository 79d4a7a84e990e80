"""Limits that adapt, on a real server that hides its limit: nearly all of it is used, and little is refused.

One test: .venv/bin/pytest tests/models/test_adaptive.py -m slow -k "once and 1"
"""

from __future__ import annotations

import pytest

from benchmarks.adaptive_case import Shape, measure
from rollout_engine.models.server_limits import ServerLimits

AT_ONCE = Shape("16 at once", ServerLimits(concurrency=16), 16.0, {"max_concurrency": 16}, latency_ms=1000)
PER_SECOND = Shape(
    "20 a second, silent",
    ServerLimits(per_second=20, burst=10, retry_after="none"),
    20.0,
    {"requests_per_minute": 1200},
    latency_ms=500,
)
WARM_UP_S, STEADY_S = 30.0, 40.0


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("shape", [AT_ONCE, PER_SECOND], ids=lambda shape: shape.name)
async def test_a_hidden_limit_is_found_and_nine_tenths_of_it_are_used(shape: Shape, hosts: int) -> None:
    """Calls are long and few, so that it is the limit that bounds them and not the machine.

    What the machine takes all the same is told by a run just before that knew the limit. Calls at once are those that
    the server had, over time.
    """
    found = await measure(shape, hosts, WARM_UP_S + STEADY_S + 5.0, WARM_UP_S)
    assert found["rows"] == found["planned"]
    assert found["failed"] == 0
    assert found["steady_s"] >= STEADY_S / 2, found
    assert found["refused_%"] < 2.0, found
    if shape is AT_ONCE:
        assert found["in use"] >= 0.9 * min(1.0, found["told, in use"]), found
    else:
        assert found["throughput"] >= 0.9, found
