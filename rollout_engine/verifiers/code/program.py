"""The text that a fresh interpreter is given to run: the package `judging` as one program, with no file of ours."""

from __future__ import annotations

import functools
from pathlib import Path

MODULES = ("names", "runner", "fresh", "env")

_PACKAGE = "rollout_engine.verifiers.code.judging"
_START = """
import sys, types
def module(name):
    made = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or module(parent), last, made)
    return made
for name, text in SOURCES:
    exec(compile(text, name + ".py", "exec"), module(PACKAGE + "." + name).__dict__)
"""
"""The packages above are stood in for by empty modules."""


@functools.cache
def program(*, uses_env: bool) -> str:
    """Reads a request from standard input and writes its verdict to standard output."""
    folder = Path(__file__).parent / "judging"
    names = MODULES if uses_env else MODULES[:-1]
    sources = [(name, (folder / f"{name}.py").read_text()) for name in names]
    make_env = f'sys.modules["{_PACKAGE}.env"].Env' if uses_env else "None"
    head = f"PACKAGE, SOURCES = {_PACKAGE!r}, {sources!r}\n"
    return f'{head}{_START}\nsys.modules["{_PACKAGE}.fresh"].main({make_env})\n'
