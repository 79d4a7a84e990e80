"""Command lines that run a helper module in a bare interpreter: no site, no environment, none of the engine's code.

The packages above such modules are stood in for by empty modules, so that importing it executes nothing of theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

STAND_INS = (
    "rollout_engine", "rollout_engine.sandboxes", "rollout_engine.sandboxes.namespace", "rollout_engine.verifiers",
    "rollout_engine.verifiers.code",
)  # fmt: skip
"""Packages that are empty there."""
_ROOT = Path(__file__).parent.parent.parent

_CODE = """
import sys, types
for name, path in {packages!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from {module} import main
main(*{arguments!r})
"""


def command(module: str, *arguments: int | str) -> list[str]:
    """Runs `main(*arguments)` of a module below one of the packages."""
    packages = [(name, str(_ROOT.joinpath(*name.split(".")[1:]))) for name in STAND_INS]
    return [sys.executable, "-I", "-S", "-c", _CODE.format(packages=packages, module=module, arguments=arguments)]
