"""Verifiers that compute: never more at once than cores, and no one's time is spent on waiting for one.

make one T=tests/verifiers/test_cores.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollout_engine
from rollout_engine.machine import cores
from tests.helpers import scripted
from tests.rig import task_of

SCRIPT = {"type": "script", "command": "date +%s%N; sleep {seconds}; date +%s%N"}
CODE = {
    "type": "code",
    "code": "import time\n"
    "def verify(final_answer):\n"
    "    ends = time.monotonic() + {seconds}\n"
    "    print(time.time_ns())\n"
    "    while time.monotonic() < ends: pass\n"
    "    print(time.time_ns())\n"
    "    return 1\n",
}


def rows_of(verifier: dict[str, str], seconds: float, k: int, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """The rows of a run whose verdicts take so long, and say when they began and ended."""
    spec = {name: text.replace("{seconds}", str(seconds)) for name, text in verifier.items()}
    task = task_of(verifier=spec, environment={"trusted": True})
    run = rollout_engine.run([task], [scripted()], k=k, ray="off", sandbox="local", run_dir=folder / "run", **fields)
    found: list[dict[str, Any]] = run.rollouts.to_pylist()
    return found


def most_at_once(rows: list[dict[str, Any]]) -> int:
    spans = [tuple(map(int, row["verifier_output"].split())) for row in rows]
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


@pytest.mark.parametrize("verifier", [SCRIPT, CODE], ids=["script", "code"])
def test_never_more_verdicts_compute_at_once_than_there_are_cores(verifier: dict[str, str], tmp_path: Path) -> None:
    rows = rows_of(verifier, 0.2, 4 * cores(), tmp_path)
    assert {row["score"] for row in rows} == {1.0}
    assert most_at_once(rows) <= cores()


def test_the_config_says_how_many_compute(tmp_path: Path) -> None:
    rows = rows_of(SCRIPT, 2.0, 6, tmp_path, host={"scoring": 3})
    assert 1 < most_at_once(rows) <= 3


def test_the_wait_for_a_core_is_not_taken_from_the_verdicts_time(tmp_path: Path) -> None:
    rows = rows_of(SCRIPT, 1.0, 14, tmp_path, host={"scoring": 1}, limits={"verify_s": 7.0})
    assert [row["failure_message"] for row in rows] == [None] * 14
    assert max(row["verify_s"] for row in rows) > 7.0
