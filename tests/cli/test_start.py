"""What a start of the command line costs, and what its help says.

One test: .venv/bin/pytest tests/cli/test_start.py -k help
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_engine.version import VERSION
from tests.cli.inside import Inside
from tests.cli.rollout import rollout

HELP_CPU_S = 0.3
COMMANDS = ("run", "resume", "status", "top", "rewards", "show", "tasks check", "serve-model", "doctor")
HEAVY = ("ray", "docker", "httpx", "aiohttp", "pyarrow", "pydantic", "numpy", "rich")


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_costs_less_than_three_tenths_of_a_second(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("rollout")
    costs = []
    for _ in range(10):  # a busy machine makes dear, now and then, what costs little
        before = children_cpu_s()
        subprocess.run([script, "--help"], capture_output=True, check=True, cwd=tmp_path)
        costs.append(children_cpu_s() - before)
        if costs[-1] < HELP_CPU_S:
            break
    assert min(costs) < HELP_CPU_S, costs


@pytest.mark.parametrize("module", ["rollout_engine", "rollout_engine.cli"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    heavy = HEAVY if module.endswith("cli") else ("ray", "docker", "httpx")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command_and_an_example(inside: Inside) -> None:
    done = inside("--help")
    assert done.code == 0
    assert all(name.split()[0] in done.out for name in COMMANDS)
    assert "rollout run tasks.jsonl -m good=scripted:skill=0.8" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_an_example(command: str, inside: Inside) -> None:
    done = inside(*command.split(), "--help")
    assert done.code == 0
    assert f"Example:\n    rollout {command}" in done.out


def test_no_command_shows_the_help_and_version_the_version(tmp_path: Path) -> None:
    assert "Commands:" in rollout(cwd=tmp_path).out
    assert rollout("--version", cwd=tmp_path).out == f"rollout-engine {VERSION}\n"
