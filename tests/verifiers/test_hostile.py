"""Hostile verifier code in the warm verifier, and hostile agents against verifiers in sandboxes. None succeeds.

make one T=tests/verifiers/test_hostile.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.errors import VerifierError, VerifierTimeout
from rollout_engine.verifiers.code.warm import WarmVerifier

OK = "def verify(env, final_answer=None):\n    return 1.0 if final_answer == 'yes' else 0.0\n"


async def judge(warm: WarmVerifier, body: str, timeout_s: float = 60.0, answer: str = "yes") -> Any:
    """What a function with this body gives: its score, or its failure's text."""
    lines = "\n".join("    " + line for line in body.splitlines())
    request = {"code": f"import os, sys\ndef verify(env, final_answer=None):\n{lines}\n", "final_answer": answer}
    verdict = await warm.judge({**request, "conversation": []}, timeout_s)
    return verdict["score"] if "score" in verdict else verdict["text"]


async def must_judge(warm: WarmVerifier, body: str) -> None:
    """Raises VerifierError unless there is a score."""
    found = await judge(warm, body)
    if isinstance(found, str):
        raise VerifierError(found)


async def fine(warm: WarmVerifier) -> None:
    """The verifier still works, and is the same."""
    for answer, score in (("yes", 1.0), ("no", 0.0)):
        request = {"code": OK, "final_answer": answer, "conversation": []}
        assert (await warm.judge(request, 60.0))["score"] == score


class TestEndings:
    @pytest.mark.parametrize(
        "body",
        [
            "os._exit(0)",
            "import ctypes; ctypes.string_at(0)",
            "os.abort()",
            "os.close(3); [os.close(n) for n in range(4, 64) if n in map(int, os.listdir('/proc/self/fd'))]; return 1",
        ],
    )
    async def test_ending_the_process_is_no_verdict(self, warm: WarmVerifier, body: str) -> None:
        pid = warm.pid
        with pytest.raises(VerifierError):
            await must_judge(warm, body)
        await fine(warm)
        assert warm.pid == pid

    async def test_an_exit_is_an_error(self, warm: WarmVerifier) -> None:
        assert "SystemExit" in await judge(warm, "sys.exit(1)")

    @pytest.mark.parametrize(
        "body",
        [
            "while True: pass",
            "import time; time.sleep(300)",
            "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 14, 15, 24)]\nwhile True: pass",
            "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
            "'a' * 40 + 'b' and __import__('re').match(r'(a+)+$', 'a' * 40 + 'b')",
        ],
    )
    async def test_no_end_is_ended_from_outside(self, warm: WarmVerifier, body: str) -> None:
        started = time.monotonic()
        with pytest.raises(VerifierTimeout):
            await judge(warm, body, timeout_s=0.5)
        assert time.monotonic() - started < 60
        await fine(warm)

    async def test_what_forks_away_ends_with_the_verdict(self, warm: WarmVerifier) -> None:
        body = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        for fd in range(3):
            os.close(fd)
        time.sleep(100)
    os._exit(0)
return 0.5"""
        before = children(warm)
        assert await judge(warm, body) == 0.5
        await settled(warm, before)

    async def test_a_forked_child_does_not_answer(self, warm: WarmVerifier) -> None:
        assert await judge(warm, "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nreturn 1.0 if pid else 0.25") == 1.0


def children(warm: WarmVerifier) -> int:
    return len(Path(f"/proc/{warm.pid}/task/{warm.pid}/children").read_text().split())


async def settled(warm: WarmVerifier, count: int) -> None:
    end = time.monotonic() + 60
    while children(warm) > count:
        assert time.monotonic() < end, "a verdict's process is still there"
        await asyncio.sleep(0.01)


async def named(name: str, *, there: bool) -> None:
    """Until a process of this name runs, or none does."""
    end = time.monotonic() + 60
    while (name in comms()) != there:
        assert time.monotonic() < end, f"{name}: {'not there' if there else 'still there'}"
        await asyncio.sleep(0.02)


def comms() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found.add(path.read_text().strip())
    return found


class TestHogs:
    async def test_memory(self, warm: WarmVerifier) -> None:
        assert "MemoryError" in await judge(warm, "x = bytearray(2 * 10 ** 9)\nreturn 1")
        assert "MemoryError" in await judge(warm, "x = []\nwhile True: x.append('a' * 10 ** 6 + str(len(x)))")

    async def test_memory_of_many_processes(self, warm: WarmVerifier) -> None:
        """Each below its own limit, together far above: the neighbours go on."""
        body = """
for _ in range(8):
    if os.fork() == 0:
        try:
            x = bytearray(120 * 2 ** 20)
            x[::4096] = b'x' * len(x[::4096])
            import time; time.sleep(100)
        finally:
            os._exit(0)
import time; time.sleep(100)"""
        with pytest.raises(VerifierError):
            await asyncio.gather(judge(warm, body, timeout_s=2.0), fine(warm), fine(warm))
        await fine(warm)

    async def test_output(self, warm: WarmVerifier) -> None:
        body = "for _ in range(300): print('x' * 10 ** 6)\nos.write(1, b'y' * 10 ** 7)\nraise ValueError('after')"
        request = {"code": f"import os\ndef verify(env):\n    {body.replace(chr(10), chr(10) + '    ')}"}
        verdict = await warm.judge({**request, "final_answer": "", "conversation": []}, 60.0)
        assert "after" in verdict["text"]
        assert len(verdict["output"]) <= 2_000

    async def test_disk(self, warm: WarmVerifier) -> None:
        said = await judge(warm, "for n in range(50):\n    open(f'/tmp/{n}', 'wb').write(bytes(2 ** 20))\nreturn 1")
        assert "No space" in said

    async def test_a_large_verdict(self, warm: WarmVerifier) -> None:
        assert "components" in await judge(warm, "return {'score': 1, 'components': {str(n): n for n in range(10**5)}}")
        assert await judge(warm, "raise ValueError('x' * 10 ** 7)") != ""
        await fine(warm)


class TestLeaks:
    @pytest.mark.parametrize(
        "body",
        [
            "import builtins\nbuiltins.float = builtins.len = builtins.open = lambda *a: 0.25\nreturn 1",
            "import re, json\nre.match = re.findall = json.dumps = json.loads = None\nreturn 1.0",
            "sys.modules.clear()\nsys.path.insert(0, '/tmp')\nreturn 1",
            "os.environ['X'] = 'leaked'\nopen('/tmp/leak', 'w').write('1')\nreturn 1",
            "for name, module in list(sys.modules.items()):\n    if name.endswith('runner'):\n"
            "        module.judge = lambda *a: {'score': 1}\nreturn 1",
            "import helper.wire as w\nw.send = None\nreturn 1",
        ],
    )
    async def test_nothing_stays_for_the_next_verdict(self, warm: WarmVerifier, body: str) -> None:
        with contextlib.suppress(VerifierError):
            await judge(warm, body)
        await fine(warm)
        check = "return 1.0 if not os.listdir('/tmp') and not os.environ.get('X') and float('1') == 1.0 else 0.0"
        assert await judge(warm, check) == 1.0

    async def test_random_numbers_differ(self, warm: WarmVerifier) -> None:
        drawn = await asyncio.gather(*(judge(warm, "import random; return random.random()") for _ in range(5)))
        assert len(set(drawn)) == 5

    async def test_hash_seeds_and_ids_aside_two_verdicts_are_strangers(self, warm: WarmVerifier) -> None:
        body = """
import time
mine = f'/tmp/{os.getpid()}'
open(mine, 'w').close()
time.sleep(0.3)
return len(os.listdir('/tmp')) + 100 * sum(name.isdigit() for name in os.listdir('/proc')) + os.getppid()"""
        assert await asyncio.gather(*(judge(warm, body) for _ in range(4))) == [101.0] * 4


class TestEscapes:
    @pytest.mark.parametrize(
        "body",
        [
            "os.kill(os.getppid(), 9)",
            "os.kill(-1, 9)",
            "[os.kill(n, 9) for n in range(2, 4000) if n != os.getpid()]",
            "open('/etc/shadow')",
            "os.open('/proc/1/mem', os.O_RDWR) and os.open('/etc/shadow', 0)",
            "os.listdir('/root/' + os.listdir('/root')[0])",
            "os.mount if hasattr(os, 'mount') else os.chroot('/')",
            "open('/proc/sys/kernel/core_pattern', 'w')",
            "open('/python/json/__init__.py', 'a')",
            "open('/usr/bin/python3')",
            "import socket; socket.create_connection(('1.1.1.1', 53), 0.3)",
            "import ctypes; libc = ctypes.CDLL(None); assert libc.unshare(0x10000000) == 0",
            "import ctypes; libc = ctypes.CDLL(None); assert libc.ptrace(16, 1, 0, 0) == 0",
        ],
    )
    async def test_it_reaches_nothing_outside(self, warm: WarmVerifier, body: str) -> None:
        pid = warm.pid
        said = await judge(warm, f"{body}\nraise RuntimeError('it worked')")
        assert "it worked" not in said or "kill" in body
        await fine(warm)
        assert warm.pid == pid

    async def test_it_holds_its_own_socket_and_nothing_else(self, warm: WarmVerifier) -> None:
        body = """
kinds = []
for name in os.listdir('/proc/self/fd'):
    try:
        kinds.append(os.readlink('/proc/self/fd/' + name))
    except OSError:
        pass
raise ValueError(sorted(kind.split(':')[0] for kind in kinds))"""
        kinds = (await judge(warm, body)).rsplit("ValueError: ")[-1]
        assert kinds == "['/dev/null', '/dev/null', '/dev/null', 'socket']"

    @pytest.mark.parametrize("data", ["{'score': 1.0}", "b'\\xff' * 60000", "b'[' * 60000", "b'null'"])
    async def test_what_it_writes_to_its_socket_is_its_own_verdict_or_none(self, warm: WarmVerifier, data: str) -> None:
        body = f"""
import socket, json
data = {data}
for name in os.listdir('/proc/self/fd'):
    try:
        os.write(int(name), data if isinstance(data, bytes) else json.dumps(data).encode())
    except OSError:
        pass
return 0.5"""
        try:
            assert await judge(warm, body) == 1.0
        except VerifierError as error:
            assert "no verdict" in str(error)  # noqa: PT017
        await fine(warm)

    async def test_descriptors_that_it_sends_are_not_taken(self, warm: WarmVerifier) -> None:
        body = """
import socket
for name in os.listdir('/proc/self/fd'):
    try:
        channel = socket.socket(fileno=os.dup(int(name)))
        socket.send_fds(channel, [b'{"score": 0.5}'], [os.open('/dev/zero', 0)] * 20)
    except OSError:
        pass
return 1"""
        before = len(os.listdir("/proc/self/fd"))
        assert await judge(warm, body) == 0.5
        async with asyncio.timeout(60):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)

    async def test_a_zygote_that_is_killed_is_started_again(self, warm: WarmVerifier) -> None:
        mark = f"kill.{os.getpid()}{time.monotonic_ns() % 10**6}"[-15:]
        body = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0); time.sleep(100)"
        waiting = asyncio.create_task(judge(warm, body))
        await named(mark, there=True)
        assert warm.pid is not None
        os.kill(warm.pid, 9)
        with pytest.raises(VerifierError):
            await waiting
        await fine(warm)

    async def test_no_verdict_outlives_a_zygote_that_is_killed(self, warm: WarmVerifier) -> None:
        """Also one that does not want to end with its parent."""
        mark = f"300.{os.getpid()}{time.monotonic_ns() % 10**6}"
        body = f"""
import ctypes, time
assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == -1
ctypes.CDLL(None).prctl(15, b'{mark[-15:]}', 0, 0, 0)
time.sleep(300)"""
        waiting = asyncio.create_task(judge(warm, body, timeout_s=120))
        await named(mark[-15:], there=True)
        assert warm.pid is not None
        os.kill(warm.pid, 9)
        with pytest.raises(VerifierError):
            await waiting
        await named(mark[-15:], there=False)

    async def test_a_cancelled_verdict_leaves_nothing(self, warm: WarmVerifier) -> None:
        before = children(warm)
        waiting = [asyncio.create_task(judge(warm, "import time; time.sleep(100)")) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await settled(warm, before)
        await fine(warm)
