"""Limits that adapt, on a real server that hides its limit: nearly all of it is used, and little is refused.

One test: .venv/bin/pytest tests/models/test_adaptive.py -m slow -k "once and 1"
"""

from __future__ import annotations

import pytest

from benchmarks.adaptive_case import Shape, measure
from rollout_engine.models.server_limits import ServerLimits

SHAPES = [
    Shape("8 at once", ServerLimits(concurrency=8), 40.0, {"max_concurrency": 8}),
    Shape(
        "40 a second, silent",
        ServerLimits(per_second=40, burst=10, retry_after="none"),
        40.0,
        {"requests_per_minute": 2400},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_a_hidden_limit_is_found_and_used(shape: Shape, hosts: int) -> None:
    """Against a run that was told the limit, just before: the machine may be busy with other things in between."""
    found = await measure(shape, hosts, 45.0)
    assert found["rows"] == found["planned"]
    assert found["failed"] == 0
    assert found["refused_%"] < 2.0, found
    assert found["throughput"] >= 0.6, found
