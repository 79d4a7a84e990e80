"""Python in a fork of a box's first process, and groups that serve again.

Run: pytest tests/sandboxes/namespace/test_namespace_python.py
"""

from __future__ import annotations

import asyncio
import marshal
import os
from pathlib import Path

import pytest

from rollout_engine.errors import ExecTimeout
from rollout_engine.sandboxes.base import RunsPython, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox
from rollout_engine.sandboxes.namespace.helper import groups, limits
from rollout_engine.types import ExecResult
from tests.sandboxes.busy import GROWING_S

MB = 2**20


async def run(box: NamespaceSandbox, code: str, stdin: bytes = b"", timeout_s: float = 60) -> ExecResult:
    program = marshal.dumps(compile(code, "program.py", "exec"))
    return await box.run_python(program, stdin=stdin, timeout_s=timeout_s)


class TestFork:
    async def test_it_is_a_command_of_the_box(self, box: NamespaceSandbox) -> None:
        assert isinstance(box, RunsPython)
        assert box.python_modules is not None
        code = """
import os, sys
print(sys.stdin.read(), os.getcwd(), os.getuid(), os.getsid(0) == os.getpid(), os.environ["HOME"], file=sys.stderr)
sys.exit(7)"""
        result = await run(box, code, b"in")
        assert result.exit_code != 0
        assert result.stderr.split(b"\n")[0] == b"in /workspace 0 True /root"

    async def test_it_has_the_commands_environment_and_no_other(
        self, provider: NamespaceProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROLLOUT_TEST_SECRET", "seen")
        box = await provider.open(SandboxSpec(env={"GIVEN": "1"}))
        result = await run(box, "import os; print(sorted(os.environ)); os.system('echo $GIVEN$ROLLOUT_TEST_SECRET')")
        assert sorted(result.stdout.split(b"\n")) == [b"", b"1", b"['GIVEN', 'HOME', 'LANG', 'PATH']"]
        await box.close()

    async def test_it_holds_nothing_of_the_first_process(self, box: NamespaceSandbox) -> None:
        """But the standard library, which no `..` leaves and nobody writes to; what it starts has not even that."""
        code = """
import os
def held():
    for fd in range(3, 200):
        try: yield fd, os.readlink(f"/proc/self/fd/{fd}")
        except OSError: pass
for fd, name in held():
    assert os.path.samestat(os.stat("..", dir_fd=fd), os.fstat(fd)), name
    assert os.path.exists(f"/proc/self/fd/{fd}/linecache.py"), name
    for attempt in (lambda: os.mkdir("new", dir_fd=fd), lambda: os.unlink("this.py", dir_fd=fd)):
        try: attempt()
        except OSError as error: assert error.errno == 30, error
        else: assert False, "written"
print(len(list(held())), flush=True)
os.system("ls /proc/self/fd | wc -l")"""
        result = await run(box, code)
        assert (result.stdout, result.stderr) == (b"1\n4\n", b"")  # 0, 1, 2, and the one that lists them

    async def test_what_is_imported_late_is_the_engines_own_library(self, box: NamespaceSandbox) -> None:
        await box.exec(
            ["sh", "-c", "mkdir -p /usr/lib/python3 && echo 'raise SystemExit' | tee subprocess.py datetime.py"]
        )
        code = "import datetime, subprocess; print(datetime.date(2020, 1, 2), subprocess.check_output(['echo', 'x']))"
        assert (await run(box, code)).stdout == b"2020-01-02 b'x\\n'\n"

    async def test_nothing_that_it_does_to_itself_reaches_the_next(self, box: NamespaceSandbox) -> None:
        spoil = """
import builtins, gc, json, os, sys
json.dumps = builtins.print = builtins.len = None
sys.modules.clear()
os.environ["X"] = "1"
for thing in gc.get_objects():
    if isinstance(thing, dict): thing.clear()"""
        await run(box, spoil)
        assert (
            await run(box, "import json, os; print(json.dumps(len('ab')), 'X' in os.environ)")
        ).stdout == b"2 False\n"
        assert (await box.exec(["echo", "fine"])).stdout == b"fine\n"

    async def test_it_has_the_users_rights(self, root_provider: NamespaceProvider) -> None:
        box = await root_provider.open(SandboxSpec(user="nobody"))
        code = """
import os
print(os.getresuid(), os.getgroups())
for attempt in (lambda: os.setuid(0), lambda: open("/etc/shadow", "w"), lambda: os.kill(1, 9)):
    try: attempt()
    except OSError as error: print(error.errno)"""
        assert (await run(box, code)).stdout == b"(65534, 65534, 65534) []\n1\n13\n1\n"
        await box.close()

    async def test_it_is_killed_with_what_it_started(self, box: NamespaceSandbox) -> None:
        for timeout_s in GROWING_S:
            with pytest.raises(ExecTimeout) as caught:
                await run(
                    box, "import os, time; print('in', flush=True); os.fork(); time.sleep(100)", timeout_s=timeout_s
                )
            if caught.value.partial.stdout:
                break
        assert caught.value.partial.stdout.startswith(b"in")
        async with asyncio.timeout(60):  # until there are the first process, and the one that lists
            while sum(name.isdigit() for name in (await box.exec(["ls", "/proc"])).stdout.split()) != 2:
                await asyncio.sleep(0.02)

    async def test_a_box_without_any_python_runs_it(self, root_provider: NamespaceProvider, tmp_path: Path) -> None:
        (tmp_path / "root" / "etc").mkdir(parents=True)
        box = await root_provider.open(SandboxSpec(directory=str(tmp_path / "root")))
        assert (await run(box, "import os; print(os.listdir('/'))")).ok
        await box.close()


class TestGroupsServeAgain:
    async def test_with_their_limits_and_a_count_of_their_own(self, root_provider: NamespaceProvider) -> None:
        hog = ["/usr/bin/python3", "-c", "x = bytearray(400 * 2**20)"]
        spec = SandboxSpec(memory_bytes=128 * MB)
        for _ in range(3):
            box = await root_provider.open(spec)
            if "memory:cgroup" not in box.limits_enforced:
                pytest.skip("no memory control group here")
            assert not (await box.exec(["true"])).oom
            await box.close()
            box = await root_provider.open(spec)
            result = await box.exec(hog)
            assert (result.exit_code, result.oom) == (-9, True)
            await box.close()

    def test_only_clean_ones_and_only_for_the_same_limits(self, tmp_path: Path) -> None:
        """Files stand in for the kernel's: this shows the choice, not the holding."""
        asked = limits.Limits(64 * MB, 0.5, 64, 2**20, 100)
        kept = groups.Groups([])

        def group(name: str, kills: int = 0, used: int = 0) -> groups.Group:
            said = {"events": f"oom_kill {kills}\n", "current": f"{used}\n"}
            fds = []
            for file, text in said.items():
                (tmp_path / f"{name}.{file}").write_text(text)
                fds.append(os.open(tmp_path / f"{name}.{file}", os.O_RDONLY))
            return groups.Group(asked, [str(tmp_path / name)], [], *fds)

        first, second = group("a"), group("b")
        kept.give_back(first)
        kept.give_back(second)
        assert kept.take("x", asked._replace(processes=5)).paths == []
        assert kept.take("x", asked) is first
        kept.give_back(first, spoiled=True)
        kept.give_back(group("killed", kills=1))
        kept.give_back(group("full", used=60 * MB))
        assert kept.take("x", asked) is second
        assert kept.take("x", asked).paths == []
        for number in range(groups.MAX_IDLE_GROUPS + 5):
            kept.give_back(group(f"many{number}"))
        assert sum(bool(kept.take("x", asked).paths) for _ in range(100)) == groups.MAX_IDLE_GROUPS
