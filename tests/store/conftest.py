"""Directories in memory, where there is any: the store syncs at every turn, and these tests do not cut the power."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def fresh() -> Iterator[Callable[[], Path]]:
    """Makes a new empty directory at every call."""
    numbers = count()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as base:

        def make() -> Path:
            path = Path(base) / str(next(numbers))
            path.mkdir()
            return path

        yield make


@pytest.fixture
def tmp_path(fresh: Callable[[], Path]) -> Iterator[Path]:
    path = fresh()
    yield path
    shutil.rmtree(path, ignore_errors=True)
