"""docs/limits.md has every phase and every limit of time that a config knows, with the defaults that hold."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollout_engine.agents.cli.options import CliOptions
from rollout_engine.config import HostSpec, ModelSpec, RetrySpec, RunConfig, RunLimits, StoreSpec

PAGE = (Path(__file__).parent.parent / "docs" / "limits.md").read_text()
ROOMS: dict[str, Any] = {
    "limits": RunLimits,
    "host": HostSpec,
    "store": StoreSpec,
    "retry": RetrySpec,
    "models": ModelSpec,
    "cli": CliOptions,
}
PAUSES = {"retry.backoff_s"}
"""Times that bound nothing."""
PHASES = """queue, sandbox created, uploaded, setup, services, permits, agent, verification, retries, handed over,
teardown, rows wait for the disk, compaction, coming up, first exchange, draining"""


class Row(NamedTuple):
    phase: str
    limit: str
    unit: str
    default: str


ROWS = [
    Row(*found) for found in re.findall(r"^\| ([^|]+) \| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE, re.M)
]


def default_of(limit: str) -> Any:
    room, _, name = limit.rpartition(".")
    if name.isupper():
        where = room if room.startswith("actors.") else f"rollout_engine.{room}"
        return getattr(importlib.import_module(where), name)
    fields = ROOMS[room].model_fields if room else RunConfig.model_fields
    return fields[name].get_default(call_default_factory=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_each_limit_is_there_and_has_the_default_that_the_page_says(row: Row) -> None:
    value = default_of(row.limit)
    if row.default in ("none", "the longest deadline and 60"):
        assert not value
    else:
        assert float(row.default) == value
    assert row.unit.strip()


def test_every_time_that_a_config_knows_is_on_the_page() -> None:
    known = {f"{room}.{name}" for room, spec in ROOMS.items() for name in spec.model_fields if name.endswith("_s")}
    known |= {name for name in RunConfig.model_fields if name.endswith("_s")}
    assert known - PAUSES <= {row.limit for row in ROWS}


@pytest.mark.parametrize("phase", [phase.strip() for phase in PHASES.split(",")])
def test_every_phase_has_its_limit(phase: str) -> None:
    assert any(phase in row.phase for row in ROWS)
