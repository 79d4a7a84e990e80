"""The warm verifier's process: a launcher whose boxes each run one task's verifier code, and end with it.

It is a program of its own: of the engine, only the namespace sandbox's helper and `judging` are there. What verifier
code commonly imports is loaded before the first fork. It is told no task: each request goes to the box alone, over
the box's own socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import sys as python
from importlib import import_module
from typing import Any

from rollout_engine.sandboxes.namespace.helper import hostlayer, launcher, users, wire
from rollout_engine.sandboxes.namespace.helper.identity import Identity
from rollout_engine.sandboxes.namespace.helper.layers import Layer
from rollout_engine.sandboxes.namespace.helper.plan import Plan
from rollout_engine.sandboxes.namespace.helper.stage import Stage
from rollout_engine.verifiers.code.judging import runner

USER = 65534
LIBRARY = "/python"
"""Where a box sees the standard library, which on the host may be below a home that is closed to it."""
MAX_REPLY = 60_000
"""Fits into one packet."""
MAX_OUTPUT = 2_000
_ENCODE = json.JSONEncoder().encode
"""Taken before any code could replace it."""
PROCESSES = 32
FILE_BYTES = 16 * 2**20
_COMMON = """
abc argparse array ast asyncio base64 binascii bisect calendar cmath codecs collections collections.abc contextlib
copy csv dataclasses datetime decimal difflib email.utils enum fnmatch fractions functools glob gzip hashlib heapq
hmac html html.parser inspect io itertools json keyword linecache locale math numbers operator os.path pathlib pprint
queue random re secrets shlex statistics string struct tempfile textwrap threading time timeit token tokenize
traceback types typing unicodedata urllib.parse uuid warnings weakref xml.etree.ElementTree zlib zoneinfo
"""


class Tail:
    """What the code prints, the end of it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text[-MAX_OUTPUT:])[-MAX_OUTPUT:]
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def base(identity: Identity, stage: Stage) -> Layer:
    """An empty root, and the standard library for what is imported late."""
    layer = hostlayer.build(identity, stage, trees=())
    with contextlib.suppress(PermissionError):  # an ordinary user may have no way there: what is loaded must do
        library = os.open(os.path.dirname(os.__file__), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        layer.stacks[LIBRARY] = [library]
    return layer


def serve(channel: socket.SocketType, lifeline: int, plan: Plan, oom: int | None, score: int, enforced: str) -> None:
    """Takes one request, gives its verdict, and ends."""
    request = wire.receive_order(channel).header
    os.close(lifeline)
    if plan.library >= 0:
        os.close(plan.library)
    os.close(score)
    if oom is not None:
        os.close(oom)
    _become_nobody(plan.ids)
    _limit(request["cpu_s"], request["memory_bytes"])
    os.chdir("/tmp")
    python.path[:] = [LIBRARY, f"{LIBRARY}/lib-dynload"]
    random.seed()
    output = Tail()
    python.stdout = python.stderr = output
    verdict = runner.judge(request["code"], request["final_answer"], request["conversation"], None)
    verdict["output"] = output.text if isinstance(output.text, str) else ""
    _answer(channel, verdict)


def _answer(channel: socket.SocketType, verdict: dict[str, Any]) -> None:
    data = _ENCODE(verdict).encode()
    if len(data) > MAX_REPLY:
        data = b'{"failed": "returned", "text": "the verdict is too large", "output": ""}'
    if os.getpid() == 1:
        channel.send(data)
    os._exit(0)


def _become_nobody(ids: int) -> None:
    if ids > USER:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    users.die_with_parent()


def _limit(cpu_s: int, memory_bytes: int) -> None:
    """What stands beside the box's control groups, or in their place."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_STACK: 64 * 2**20,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def main(descriptor: int) -> None:
    for name in _COMMON.split():
        import_module(name)
    python.setrecursionlimit(1000)
    launcher.main(descriptor, serve, base)
