"""The text that a fresh interpreter is given to run: the package `judging` as one program, with no file of ours."""

from __future__ import annotations

import functools
from pathlib import Path

MODULES = ("names", "runner", "fresh", "env")

_START = """
import sys, types
package = types.ModuleType("judging")
package.__path__ = []
sys.modules["judging"] = package
for name, text in SOURCES:
    module = types.ModuleType("judging." + name)
    module.__package__ = "judging"
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(text, "judging/" + name + ".py", "exec"), module.__dict__)
"""


@functools.cache
def program(*, uses_env: bool) -> str:
    """Reads a request from standard input and writes its verdict to standard output."""
    folder = Path(__file__).parent / "judging"
    names = MODULES if uses_env else MODULES[:-1]
    sources = [(name, (folder / f"{name}.py").read_text()) for name in names]
    make_env = 'sys.modules["judging.env"].Env' if uses_env else "None"
    return f'SOURCES = {sources!r}\n{_START}\nsys.modules["judging.fresh"].main({make_env})\n'
