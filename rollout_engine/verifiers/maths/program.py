"""What compares expressions, in a process of its own, on a host or in a sandbox.

It needs math-verify and the standard library alone. It is run as text (`python -I -c`), so it imports nothing of
ours. A line of JSON in (expected, answer, limit_s), a line of JSON out: {"right": ...}, {"failed": what, "whose":
"expected" or "comparison"}; before the first one {"ready": ...}, or {"missing": ...} and the end. Answers come from
models, and the packages that read them were not written for hostile text: hence `confine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MEMORY_BYTES = 2 * 2**30
NOBODY = 65_534
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 4, 38, 9


def main(parent: int = 0) -> None:
    """Serves until its input ends. `parent`: the process whose end ends this one; 0: none."""
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # what the packages print is no reply
    os.dup2(null, 2)
    try:
        import logging

        logging.disable()
        import math_verify
    except ImportError as error:
        return _say(out, {"missing": f"{type(error).__name__}: {error}"})
    compare(math_verify, {"expected": "\\frac{1}{2}", "answer": "\\boxed{0.5}"})  # what is imported late is now here
    confine(math_verify.__file__ or "", parent)
    _say(out, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_cpu(request["limit_s"])
        _say(out, compare(math_verify, request))
    return None


def compare(math_verify: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one answer; its time is bounded from outside."""

    def parse(text: str) -> Any:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)

    whose = "expected"
    try:
        expected = request["expected"]
        gold = (parse(f"${expected}$") if "$" not in expected and "\\boxed" not in expected else []) or parse(expected)
        if not gold:
            return {"failed": "it holds no mathematical expression", "whose": whose}
        whose = "comparison"
        answer = parse(request["answer"])
        right = bool(answer) and math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)
        return {"right": bool(right)}
    except BaseException as error:
        cause = error.__cause__ or error
        return {"failed": f"{type(cause).__name__}: {cause}"[:500], "whose": whose}


def confine(needed: str, parent: int) -> None:
    """Leaves as few rights as the kernel lets it give up: no files to write, no privileges, bounded memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    os.chdir("/")
    if os.geteuid() == 0:
        _drop_root(needed)
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if parent:
            libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(0)


def _drop_root(needed: str) -> None:
    """Becomes nobody for good, unless nobody may read the packages (a venv under /root), or there is no such id."""
    groups = os.getgroups()
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    except OSError:
        return
    readable = os.access(needed, os.R_OK, effective_ids=True)
    os.seteuid(0)
    os.setegid(0)
    if not readable:
        os.setgroups(groups)
        return
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process soon after its limit, should nobody else be there to do it."""
    import resource

    until = int(time.process_time() + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _say(out: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]
