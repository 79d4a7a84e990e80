"""Agent programs that know their verifier's files and forge a reward: none counts, and an honest answer loses nothing.

make one T=tests/verifiers/test_agent_programs.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord
from tests.agents_cli.conftest import Serve, behind, serve
from tests.agents_cli.tiny import left, shell
from tests.helpers import make_config
from tests.rig import Bench, bench
from tests.sandboxes.backends import Kept
from tests.verifiers.test_agents import ATTACKS, IN_PLACE, ROLLOUT_S, SNEAK, VERIFIERS

__all__ = ["serve"]

FORGERIES = {
    **{name: ATTACKS[name] for name in IN_PLACE},
    "the verifier's own script": "mkdir -p /tests; printf '#!/bin/sh\\nexit 0' > /tests/check.py; "
    "chmod 777 /tests/check.py",
    "other programs": ATTACKS["other programs"],
    "a path of its own": "for d in /usr/local/sbin /usr/local/bin /usr/sbin; do mkdir -p $d; "
    "for p in sh python3 cat; do printf '#!/usr/bin/perl\\nexit 0' > $d/$p; chmod 755 $d/$p; done; done; "
    'for f in /etc/environment /etc/profile "$HOME/.profile" "$HOME/.bashrc"; do echo "PATH=/workspace" >> $f; done',
    "start-up files of Python": ATTACKS["start-up files of Python"],
    "a daemon that waits for the verifier": "(setsid sh -c 'until [ -e /tests/check.py ]; do sleep 0.01; done; "
    f"for d in /logs/verifier /workspace; do {SNEAK}; done; sleep 600' > /dev/null 2>&1 &)",
}
"""What a program does between its last model call and its end."""
STANDS_UP_IN_PLACE = (*IN_PLACE, "the verifier's own script", "a daemon that waits for the verifier")
"""The rest is what an in_place verifier is marked as tamperable for."""
BY = ("file", "exit code")
CASES = [
    (forgery, isolation)
    for forgery in FORGERIES
    for isolation in ("fresh", "snapshot", "in_place")
    if isolation != "in_place" or forgery in STANDS_UP_IN_PLACE
]


@pytest.fixture
async def url(serve: Serve) -> str:
    return str(await serve([task("file", "fresh")], m={}))


def task(by: str, isolation: str) -> Task:
    verifier: dict[str, Any] = {**VERIFIERS[by], "isolation": isolation}
    return Task(task_id="t", prompt="Write 42 into answer.txt.", environment={}, verifier=verifier, solution="Done.")  # type: ignore[arg-type]


async def forged(rig: Bench, by: str, isolation: str) -> RolloutRecord:
    made = rig.rollout(task(by, isolation))
    async with asyncio.timeout(ROLLOUT_S):
        await made.run()
    return made.record


@pytest.mark.parametrize(("forgery", "isolation"), CASES)
async def test_no_forged_reward_counts(provider: SandboxProvider, url: str, forgery: str, isolation: str) -> None:
    for answer in ("42", "41"):
        work = shell(f"printf {answer} > answer.txt; {FORGERIES[forgery]}\nexit 0")
        config = make_config(behind(url), sandbox=provider.name, agent="command", agent_options=work)
        async with bench(config, provider=Kept(provider)) as rig:  # type: ignore[arg-type]
            for record in await asyncio.gather(*(forged(rig, by, isolation) for by in BY)):
                assert (record.status, record.stop_reason, record.num_turns) == ("completed", "finished", 2), record
                assert (record.failure_message, record.verifier_isolation) == (None, isolation)
                assert record.score == float(answer == "42")
    assert left() == []
