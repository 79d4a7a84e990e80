"""What is the local sandbox's own: where it lives, what it refuses, and that a killed host leaves nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from rollout_engine.errors import ExecTimeout, InputError, SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes import make_provider, sandbox_spec
from rollout_engine.sandboxes.auto import AutoProvider
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider, LocalSandbox
from rollout_engine.specs import EnvironmentSpec, Task


def entries(directory: Path, pattern: str = "*") -> list[Path]:
    return list(directory.glob(pattern))


async def test_it_claims_no_limits_and_leaves_no_directory(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    first, second = await provider.open(SandboxSpec()), await provider.open(SandboxSpec())
    assert first.limits_enforced == "none"
    await first.exec(["sh", "-c", "mktemp; mktemp -d; mkdir -p a/b && chmod 500 a"])
    await first.close()
    assert len(entries(tmp_path, "rollout-local-*/*")) == 1
    await second.write_file("file", b"x")
    await provider.close()
    assert entries(tmp_path) == []


async def test_other_absolute_paths_are_the_hosts(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path)
    sandbox = await provider.open(SandboxSpec())
    (tmp_path / "host.txt").write_text("host")
    assert await sandbox.read_file(str(tmp_path / "host.txt")) == b"host"
    with pytest.raises(FileNotFoundError):
        await sandbox.read_file("/workspace-other/file")
    await provider.close()


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(image="python:3.12"),
        SandboxSpec(directory="/srv/root"),
        SandboxSpec(require_limits=True),
        SandboxSpec(user="somebody-else"),
    ],
)
async def test_it_refuses_what_it_cannot_give(tmp_path: Path, spec: SandboxSpec) -> None:
    with pytest.raises(SandboxUnavailable):
        await LocalProvider(tmp_path).open(spec)
    assert entries(tmp_path) == []


async def test_it_refuses_a_layer_that_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="gone"):
        await LocalProvider(tmp_path).open(SandboxSpec(layers=("a",)))
    assert entries(tmp_path) == []


HOST = """
import asyncio, sys
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider

async def main():
    sandbox = await LocalProvider(sys.argv[1]).open(SandboxSpec())
    await sandbox.exec(["sh", "-c", f"setsid sleep {sys.argv[2]} >/dev/null 2>&1 &"])
    await sandbox.start(["sleep", sys.argv[2]])
    print("up", flush=True)
    await sandbox.exec(["sleep", sys.argv[2]])

asyncio.run(main())
"""


def test_a_killed_host_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    mark = f"271.{os.getpid()}"
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path), mark], stdout=subprocess.PIPE)
    with host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        host.kill()

    def left() -> list[str]:
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in commands.splitlines() if line.startswith(f"sleep {mark}")] + os.listdir(tmp_path)

    end = time.monotonic() + 60
    while left():
        assert time.monotonic() < end, left()
        time.sleep(0.02)


def test_it_works_on_uvloop(tmp_path: Path) -> None:
    async def main() -> None:
        provider = LocalProvider(tmp_path)
        sandbox = await provider.open(SandboxSpec())
        result = await sandbox.exec(["sh", "-c", "cat; echo error >&2; sleep 100 & exit 3"], stdin=b"in" * 100_000)
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"in" * 100_000, b"error\n")
        with pytest.raises(ExecTimeout):
            await sandbox.exec(["sh", "-c", "sleep 100"], timeout_s=0.1)
        await provider.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_providers_are_named() -> None:
    assert make_provider("local").name == "local"
    assert make_provider("rollout_engine.sandboxes.local:LocalProvider").name == "local"
    with pytest.raises(InputError, match=r"unknown sandbox 'locl'(?s:.*)did you mean 'local'"):
        make_provider("locl")
    with pytest.raises(InputError, match="cannot import 'no_such_module'"):
        make_provider("no_such_module:Thing")
    with pytest.raises(InputError, match="has no attribute 'Thing'"):
        make_provider("rollout_engine.sandboxes.local:Thing")


class Nothing:
    """A backend that this host does not have."""

    name = "nothing"

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxUnavailable("no daemon")

    async def close(self) -> None:
        pass


async def test_auto_runs_without_isolation_only_what_is_trusted(tmp_path: Path) -> None:
    provider = AutoProvider({"nothing": Nothing}, lambda: LocalProvider(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"nothing: no daemon.*trusted"):
        await provider.open(SandboxSpec())
    sandbox = await provider.open(SandboxSpec(trusted=True))
    assert provider.name == "local"
    assert (await sandbox.exec(["true"])).ok
    await provider.close()


async def test_auto_keeps_to_the_first_backend_that_works(tmp_path: Path) -> None:
    provider = AutoProvider({"nothing": Nothing, "works": lambda: LocalProvider(tmp_path)}, LocalProvider)
    for _ in range(2):
        await provider.open(SandboxSpec())
    assert provider.name == "works"
    await provider.close()


def test_a_tasks_environment_becomes_a_spec() -> None:
    environment = EnvironmentSpec(image="i", env={"A": "1"}, memory_mb=3, disk_mb=5, cpus=0.5, trusted=True)
    task = Task(task_id="t", prompt="p", verifier={"type": "match"}, environment=environment, env_variables={"B": "2"})
    spec = sandbox_spec(task, task.environment, "run/t")
    assert (spec.image, spec.env, spec.label, spec.trusted) == ("i", {"A": "1", "B": "2"}, "run/t", True)
    assert (spec.memory_bytes, spec.disk_bytes, spec.cpus) == (3 * 2**20, 5 * 2**20, 0.5)
    assert sandbox_spec(Task(prompt="p", verifier={})).processes == SandboxSpec().processes
