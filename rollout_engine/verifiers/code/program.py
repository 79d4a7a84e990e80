"""The package `judging` as one program, with no file of ours: text for a fresh interpreter, or marshalled code."""

from __future__ import annotations

import base64
import functools
import marshal
import types
import zlib
from importlib.util import MAGIC_NUMBER
from pathlib import Path

MODULES = ("names", "runner", "fresh", "env")

_PACKAGE = "rollout_engine.verifiers.code.judging"
_IMPORTS = "import marshal, sys, types\n"
_UNPACK = """
import binascii, zlib
if MAGIC == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER:
    SOURCES = marshal.loads(zlib.decompress(binascii.a2b_base64(COMPILED)))
"""
_START = """
def module(name):
    made = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or module(parent), last, made)
    return made
for name, text in SOURCES:
    code = text if isinstance(text, types.CodeType) else compile(text, name + ".py", "exec")
    exec(code, module(PACKAGE + "." + name).__dict__)
"""
"""The packages above are stood in for by empty modules."""


@functools.cache
def program(*, uses_env: bool) -> str:
    """Reads a request from standard input and writes its verdict to standard output.

    It is there twice: compiled, for interpreters that read this one's code, and as source.
    """
    sources = _sources(uses_env)
    compiled = base64.b64encode(zlib.compress(marshal.dumps(_codes(sources))))
    head = f"SOURCES, MAGIC, COMPILED = {sources!r}, {MAGIC_NUMBER!r}, {compiled!r}"
    return f"{_IMPORTS}{head}\n{_UNPACK}{_main(uses_env)}"


@functools.cache
def marshalled(*, uses_env: bool) -> bytes:
    """The same, for a process of this interpreter's own version that is there already."""
    text = f"{_IMPORTS}SOURCES = marshal.loads({marshal.dumps(_codes(_sources(uses_env)))!r})\n{_main(uses_env)}"
    return marshal.dumps(compile(text, "judging.py", "exec", dont_inherit=True, optimize=2))


def _sources(uses_env: bool) -> list[tuple[str, str]]:
    folder = Path(__file__).parent / "judging"
    return [(name, (folder / f"{name}.py").read_text()) for name in (MODULES if uses_env else MODULES[:-1])]


def _codes(sources: list[tuple[str, str]]) -> list[tuple[str, types.CodeType]]:
    return [(name, compile(text, name, "exec", dont_inherit=True, optimize=2)) for name, text in sources]


def _main(uses_env: bool) -> str:
    make_env = f'sys.modules["{_PACKAGE}.env"].Env' if uses_env else "None"
    return f'PACKAGE = {_PACKAGE!r}\n{_START}\nsys.modules["{_PACKAGE}.fresh"].main({make_env})\n'
