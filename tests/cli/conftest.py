"""A finished run that many tests look at, and commands without the cost of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.inside import Inside
from tests.cli.rollout import FAST, Done, rollout, write_tasks

MODELS = ("-m", "strong=scripted:skill=0.8", "-m", "weak=scripted:skill=0.3")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """(the folder in which `rollout run ... -o a` was run, what it printed)."""
    folder = tmp_path_factory.mktemp("cli")
    write_tasks(folder / "tasks.jsonl")
    done = rollout("run", "tasks.jsonl", *MODELS, "-k", "4", "-o", "a", *FAST, cwd=folder)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture
def inside(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inside:
    """Runs commands in this process, in a folder of the test's own."""
    for name in list(os.environ):
        if "API_KEY" in name or name.startswith("RAY_"):
            monkeypatch.delenv(name)
    return Inside(tmp_path, capsys, monkeypatch)
