"""Whole rollouts whose agents prepare the sandbox for their verifier. Neither a wrong answer gains by it, nor a right
one loses.

make one T=tests/verifiers/test_agents.py
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord, StopReason, Turn
from tests.helpers import make_config
from tests.rig import bench
from tests.sandboxes.backends import Kept

EVIL_PYTHON = "import os; os._exit(0)"
SNEAK = "printf '{\"reward\": 1}' > $d/reward.json; echo 1 > $d/reward.txt"
REWARDS = f"for d in /logs/verifier /workspace/logs /workspace; do mkdir -p $d; {SNEAK}; done"
EVIL_SOURCE = b"#include <unistd.h>\n__attribute__((constructor)) void start(void) { _exit(0); }"
WRITE_PYC = """
import importlib._bootstrap_external as b, sys
code = compile("import os; os._exit(0)", "x", "exec")
for name in ("check_answer", "json"):
    path = f"__pycache__/{name}.{sys.implementation.cache_tag}.pyc"
    open(path, "wb").write(b._code_to_hash_pyc(code, b"12345678", False))
"""

ATTACKS = {
    "nothing": "true",
    "rewards written before": REWARDS,
    "a daemon that writes rewards": f"setsid sh -c 'while :; do {REWARDS}; sleep 0.01; done' >/dev/null 2>&1 &",
    "the verifier's folders are links": "mkdir /tmp/l; chmod 777 /tmp/l; rm -rf /logs /tests; ln -s /tmp/l /logs; "
    "ln -s /tmp/l /tests",
    "the verifier's files are there": f"mkdir -p /tests; printf '{EVIL_PYTHON}' > /tests/check.py; "
    "chmod 444 /tests/check.py",
    "other programs": "for p in python3 sh cat; do for d in /usr/bin /usr/local/bin; do "
    "rm -f $d/$p; printf '#!/usr/bin/perl\\nexit 0' > $d/$p; chmod 755 $d/$p; done; done",
    "no programs": "rm -rf /usr/bin/python3* /usr/lib/python3* /usr/bin/sh",
    "another /bin": "rm /bin 2>/dev/null; mkdir -p /bin; printf '#!/usr/bin/perl\\nexit 0' > /bin/sh; "
    "chmod 755 /bin/sh",
    "a preloaded library": "rm -f /etc/ld.so.cache; echo /workspace/evil.so > /etc/ld.so.preload",
    "a linked /etc": "mkdir e; cp -r /etc/. e/; mv /etc /e2; ln -s /workspace/e /etc; "
    "echo /workspace/evil.so > e/ld.so.preload",
    "start-up files of Python": "for d in . /root/.local/lib/python3.11/site-packages /usr/lib/python3/dist-packages "
    "/usr/local/lib/python3.11/dist-packages /etc/python3.11 /usr/lib/python3.11; do mkdir -p $d; "
    f"for f in sitecustomize usercustomize; do rm -f $d/$f.py; echo '{EVIL_PYTHON}' > $d/$f.py; done; "
    f"echo '{EVIL_PYTHON}' > $d/evil.pth; done",
    "start-up files of shells": "for f in .profile .bashrc .shrc; do echo 'exit 0' > /root/$f; cp /root/$f .; done; "
    "echo 'exit 0' > /etc/profile",
    "modules that hide others": f"for m in json re os ast subprocess; do echo '{EVIL_PYTHON}' > $m.py; done",
    "compiled modules": f"mkdir -p __pycache__; python3 -I -S -c '{WRITE_PYC}'",
}
ROLLOUT_S = 300.0
"""Eight run at once, on docker too."""
IN_PLACE = ("nothing", "rewards written before", "a daemon that writes rewards", "the verifier's folders are links")
"""What an in_place verifier stands up to; it is marked as tamperable for the rest."""


@functools.cache
def evil_library() -> bytes:
    """Ends every program that is started with it, with success; nothing that can be loaded without a compiler."""
    if shutil.which("gcc") is None:
        return b"x"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "evil.so")
        line = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
        subprocess.run(line, input=EVIL_SOURCE, capture_output=True, check=True)
        return library.read_bytes()


class Vandal:
    """Runs a script in its sandbox, and leaves an answer."""

    def __init__(self, script: str, answer: str) -> None:
        self._script, self._answer = script, answer

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        assert sandbox is not None
        completion = await model.complete(task.messages())
        on_turn(Turn(0, [*task.messages(), completion.message], completion))
        await sandbox.write_file("answer.txt", self._answer.encode())
        await sandbox.write_file("evil.so", evil_library(), mode=0o755)
        await sandbox.exec(["sh", "-c", self._script], timeout_s=ROLLOUT_S / 2)
        return StopReason.FINISHED


CODE = """
import json, re, subprocess

def verify(env, final_answer=None):
    assert subprocess.run(["/bin/sh", "-c", "true"]).returncode == 0
    said = env.exec("cat answer.txt")
    assert said.ok, said
    return {"score": json.loads(env.read_file("answer.txt")) == 42 and said.stdout == "42", "components": {"n": 1}}
"""
CHECK = "import json, re, subprocess, sys\nsys.exit(0 if json.load(open('/workspace/answer.txt')) == 42 else 1)\n"
BY_FILE = 'cd / && python3 /tests/check.py; [ $? = 0 ] && [ "$(cat /workspace/answer.txt)" = 42 ] && r=1 || r=0; '
VERIFIERS: dict[str, dict[str, Any]] = {
    "code": {"type": "code", "code": CODE},
    "exit code": {"type": "script", "command": "cd / && python3 /tests/check.py", "files": {"/tests/check.py": CHECK}},
    "file": {
        "type": "script",
        "command": BY_FILE + "echo $r > $REWARD_DIR/reward.txt",
        "files": {"/tests/check.py": CHECK},
        "reward": "file",
    },
    "beside": {
        "type": "script",
        "command": "cd / && python3 -c \"import sys; sys.path.append('/workspace'); import check_answer\"",
        "files": {"check_answer.py": CHECK},
    },
}


ON_DOCKER = {"fresh": ("code", "file"), "snapshot": ("exit code", "beside")}
"""Two containers a rollout cost too much for all of them."""


async def rollout(provider: SandboxProvider, attack: str, answer: str, verifier: dict[str, Any]) -> RolloutRecord:
    options = {"script": ATTACKS[attack], "answer": answer}
    config = make_config(sandbox=provider.name, agent="tests.verifiers.test_agents:Vandal", agent_options=options)
    task = Task(task_id="t", prompt="Write 42 into answer.txt.", environment={}, verifier=verifier, solution="42")  # type: ignore[arg-type]
    async with bench(config, provider=Kept(provider)) as rig:  # type: ignore[arg-type]
        made = rig.rollout(task)
        async with asyncio.timeout(ROLLOUT_S):
            await made.run()
        return made.record


def check(record: RolloutRecord, score: float, isolation: str) -> None:
    assert record.failure_message is None
    assert (record.status, record.score, record.verifier_isolation) == ("completed", score, isolation)


async def test_the_library_would_end_whatever_loads_it(provider: SandboxProvider) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    sandbox = await provider.open(SandboxSpec())
    await sandbox.write_file("evil.so", evil_library(), mode=0o755)
    loaded = await sandbox.exec(["/usr/bin/python3", "-c", "print('it ran')"], env={"LD_PRELOAD": "/workspace/evil.so"})
    assert (loaded.exit_code, loaded.stdout, loaded.stderr) == (0, b"", b"")
    await sandbox.close()


@pytest.mark.parametrize("isolation", ["fresh", "snapshot"])
@pytest.mark.parametrize("attack", list(ATTACKS))
async def test_no_preparation_changes_a_score(provider: SandboxProvider, attack: str, isolation: str) -> None:
    names = ON_DOCKER[isolation] if provider.name == "docker" else VERIFIERS
    tries = [(answer, {**VERIFIERS[name], "isolation": isolation}) for name in names for answer in ("42", "41")]
    records = await asyncio.gather(*(rollout(provider, attack, answer, spec) for answer, spec in tries))
    for (answer, _), record in zip(tries, records, strict=True):
        check(record, float(answer == "42"), isolation)


SEEK = (
    "grep -rlsI MARK-OF-THE-VERIFIER / --exclude-dir=sys --exclude-dir=usr --exclude-dir=proc --devices=skip > found; "
    "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -ac MARK-OF-THE-VERIFIER >> found; "
    "ls -d /tests >> found"
)


@pytest.mark.parametrize("isolation", ["fresh", "snapshot", "in_place"])
async def test_no_agent_reads_its_verifier(
    provider: SandboxProvider, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the agent's search found is in its workspace, where the verifier looks."""
    monkeypatch.setitem(ATTACKS, "seek", SEEK.replace("MARK-OF-THE-VERIFIER", "MARK-OF-THE-[V]ERIFIER"))
    check_it = "# MARK-OF-THE-VERIFIER\nimport sys\nsys.exit(open('/workspace/found').read().split() != ['0'])\n"
    script = {"type": "script", "command": "cd / && python3 /tests/check.py", "files": {"/tests/check.py": check_it}}
    check(await rollout(provider, "seek", "42", {**script, "isolation": isolation}), 1.0, isolation)


@pytest.mark.parametrize("name", list(VERIFIERS))
@pytest.mark.parametrize("attack", IN_PLACE)
async def test_in_place_counts_only_what_the_verifier_wrote(provider: SandboxProvider, attack: str, name: str) -> None:
    for answer in ("42", "41"):
        record = await rollout(provider, attack, answer, {**VERIFIERS[name], "isolation": "in_place"})
        check(record, float(answer == "42"), "in_place")
