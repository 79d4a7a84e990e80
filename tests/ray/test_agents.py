"""On Ray: a run of an agent program, its proxy served by a host that is an actor.

One test: .venv/bin/pytest tests/ray/test_agents.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents_cli.conftest import Serve, serve
from tests.agents_cli.test_engine_run import check_run
from tests.ray.rays import SharedRay

pytestmark = pytest.mark.ray
__all__ = ["serve"]


async def test_a_run_of_an_agent_program(serve: Serve, shared_ray: SharedRay, tmp_path: Path) -> None:
    await check_run(serve, tmp_path / "run", "auto")
