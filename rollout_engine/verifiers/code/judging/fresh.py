"""A fresh interpreter's life: it takes one request, judges it, and ends."""

from __future__ import annotations

import marshal
import os
import sys

from rollout_engine.verifiers.code.judging import runner

TYPE_CHECKING = False  # to import `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class LatePackages:
    """Finds installed packages, once something that is not in the standard library is imported."""

    def __init__(self) -> None:
        self.added = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or self.added:
            return None
        self.added = True
        import site
        from importlib.machinery import PathFinder

        site.ENABLE_USER_SITE = False
        site.main()
        return PathFinder.find_spec(name)


def hide() -> None:
    """Other programs of the same user may not look into this one for its answer."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def answer(verdict: dict[str, Any], descriptor: int, owner: int) -> None:
    """Writes the verdict and ends the process at once: no other thread, hook or child has a say."""
    if os.getpid() == owner:
        try:  # noqa: SIM105 - contextlib is not imported for this
            sys.stdout.flush()
        except BaseException:
            pass
        data = encode(verdict)
        while data:
            data = data[os.write(descriptor, data) :]
    os._exit(0)


def encode(verdict: dict[str, Any]) -> bytes:
    """As JSON; the usual verdict without the package `json`, which costs as much as an interpreter's start."""
    if "failed" not in verdict and not verdict["components"]:
        passed = {None: "null", True: "true", False: "false"}[verdict["passed"]]
        return f'{{"score": {verdict["score"]!r}, "components": {{}}, "passed": {passed}}}'.encode()
    import json

    return json.JSONEncoder().encode(verdict).encode()  # not `dumps`: the code may have broken it


def main(make_env: Callable[[str], Any] | None) -> None:
    """Takes a request from standard input, and gives its verdict to what was standard output.

    What the code prints goes to standard error, where it cannot be taken for a verdict.
    """
    owner, descriptor = os.getpid(), os.dup(1)
    os.dup2(2, 1)
    request = marshal.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.meta_path.append(LatePackages())
    hide()
    env = make_env(request["workdir"]) if make_env is not None else None
    verdict = runner.judge(request["code"], request["final_answer"], request["conversation"], env)
    answer(verdict, descriptor, owner)
