"""Command lines that run a helper module in a bare interpreter: no site, no environment, none of the engine's code.

The packages above `helper` are stood in for by empty modules, so that importing it executes nothing of theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGES = ("rollout_engine", "rollout_engine.sandboxes", "rollout_engine.sandboxes.namespace")
_HERE = Path(__file__).parent

_CODE = """
import sys, types
for name, path in {packages!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from rollout_engine.sandboxes.namespace.helper.{module} import main
main(*{arguments!r})
"""


def command(module: str, *arguments: int | str) -> list[str]:
    """Runs `helper.MODULE.main(*arguments)`."""
    folders = (_HERE.parent.parent, _HERE.parent, _HERE)
    packages = [(name, str(folder)) for name, folder in zip(_PACKAGES, folders, strict=True)]
    return [sys.executable, "-I", "-S", "-c", _CODE.format(packages=packages, module=module, arguments=arguments)]
