"""A place can be made by root only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.place import END_S
from tests.ray.rays import ROOT


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0 and os.environ.get("ROLLOUT_REQUIRE") != "1":
        pytest.skip("only root can shut something in a place of its own")


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, which is given the time to end well, however its test ends."""
    order = ["setpriv", "--pdeathsig", "TERM", sys.executable, *arguments]
    with subprocess.Popen(order, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * END_S)
            process.kill()
