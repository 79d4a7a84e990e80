"""The text that a fresh interpreter is given to run: the package `judging` as one program, with no file of ours."""

from __future__ import annotations

import base64
import functools
import marshal
import zlib
from importlib.util import MAGIC_NUMBER
from pathlib import Path

MODULES = ("names", "runner", "fresh", "env")

_PACKAGE = "rollout_engine.verifiers.code.judging"
_START = """
import binascii, marshal, sys, types, zlib
if MAGIC == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER:
    SOURCES = marshal.loads(zlib.decompress(binascii.a2b_base64(COMPILED)))
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
    folder = Path(__file__).parent / "judging"
    names = MODULES if uses_env else MODULES[:-1]
    sources = [(name, (folder / f"{name}.py").read_text()) for name in names]
    make_env = f'sys.modules["{_PACKAGE}.env"].Env' if uses_env else "None"
    codes = [(name, compile(text, name, "exec", dont_inherit=True, optimize=2)) for name, text in sources]
    compiled = base64.b64encode(zlib.compress(marshal.dumps(codes)))
    head = f"PACKAGE, SOURCES = {_PACKAGE!r}, {sources!r}\nMAGIC, COMPILED = {MAGIC_NUMBER!r}, {compiled!r}\n"
    return f'{head}{_START}\nsys.modules["{_PACKAGE}.fresh"].main({make_env})\n'
