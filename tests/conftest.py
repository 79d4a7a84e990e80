"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = (
    "sandboxes/",
    "verifiers/test_agents.py",
    "verifiers/test_hostile.py",
    "ray/test_driver_loss.py",
    "ray/test_host_loss.py",
    "ray/test_nodes.py",
    "ray/test_job.py",
    "ray/test_connect.py",
)
"""Attacks, kills and leftovers, below tests/: `make test-all` and CI run them, `make test` does not."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if str(item.path.relative_to(here)).startswith(SLOW):
            item.add_marker("slow")
