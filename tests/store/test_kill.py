"""SIGKILL at every step of a driver's life, and at random moments. Run: pytest tests/store/test_kill.py"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("scenario", "at_least"), [("life", 20), ("compaction", 15), ("commits", 12)])
def test_nothing_acknowledged_is_lost_and_nothing_counts_twice(tmp_path: Path, scenario: str, at_least: int) -> None:
    """The number is that of the steps it was killed at, or of the rows that were acknowledged between kills."""
    seed = random.randrange(2**32)
    command = [sys.executable, "-W", "error", "-m", "tests.store.killed", scenario, str(tmp_path), str(seed), "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    assert int(done.stdout) >= at_least
