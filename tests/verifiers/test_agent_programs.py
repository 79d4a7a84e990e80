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
BY = {"namespace": ("file", "exit code"), "docker": ("file",)}
"""By what the verifier says its score: two containers a rollout cost too much for both."""
CASES = [
    (forgery, isolation)
    for forgery in FORGERIES
    for isolation in ("fresh", "snapshot", "in_place")
    if isolation != "in_place" or forgery in STANDS_UP_IN_PLACE
]


@pytest.fixture
async def url(serve: Serve) -> str:
    return str(await serve([task("file", "fresh", "42")], m={}))


def task(by: str, isolation: str, answer: str) -> Task:
    verifier: dict[str, Any] = {**VERIFIERS[by], "isolation": isolation}
    return Task(
        task_id="t", prompt="Write 42 into answer.txt.", environment={}, env_variables={"ANSWER": answer},
        verifier=verifier, solution="Done.",
    )  # type: ignore[arg-type]  # fmt: skip


async def forged(rig: Bench, by: str, isolation: str, answer: str) -> RolloutRecord:
    made = rig.rollout(task(by, isolation, answer))
    async with asyncio.timeout(ROLLOUT_S):
        await made.run()
    return made.record


@pytest.mark.parametrize(("forgery", "isolation"), CASES)
async def test_no_forged_reward_counts(provider: SandboxProvider, url: str, forgery: str, isolation: str) -> None:
    work = shell(f"printf $ANSWER > answer.txt; {FORGERIES[forgery]}\nexit 0")
    config = make_config(behind(url), sandbox=provider.name, agent="command", agent_options=work)
    tries = [(by, answer) for by in BY[provider.name] for answer in ("42", "41")]
    async with bench(config, provider=Kept(provider)) as rig:  # type: ignore[arg-type]
        records = await asyncio.gather(*(forged(rig, by, isolation, answer) for by, answer in tries))
    for (_, answer), record in zip(tries, records, strict=True):
        assert (record.status, record.stop_reason, record.num_turns) == ("completed", "finished", 2), record
        assert (record.failure_message, record.verifier_isolation) == (None, isolation)
        assert record.score == float(answer == "42")
    async with asyncio.timeout(60):  # what is killed needs a core to end
        while left():
            await asyncio.sleep(0.05)
