"""Directories in memory, where there is any: the store syncs at every turn, and these tests do not cut the power."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small tmpfs")
    target = tmp_path / "small"
    target.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(target)], check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
