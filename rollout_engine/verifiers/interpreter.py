"""Finds the Python that verifier code runs with in a sandbox: never one that its agent could have replaced."""

from __future__ import annotations

import sys

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import Sandbox

PLACES = ("/usr/bin/python3", "/usr/local/bin/python3")
"""Absolute, and among the directories of programs, which no snapshot takes along."""
FLAGS = ("-I", "-S")
"""No environment variables, no user's packages, no start-up files, nothing from the working directory."""

_CHOOSE = """
for python do
  if [ -x "$python" ] && "$python" -I -S -c "import ast, asyncio, json, subprocess" 2>/dev/null; then
    echo "$python"; exit 0
  fi
done
exit 1
"""


async def find_python(sandbox: Sandbox) -> list[str]:
    """argv of an interpreter with a whole standard library. Raises SandboxUnavailable where there is none."""
    if not sandbox.isolated:
        return [sys.executable, *FLAGS]
    found = await sandbox.exec(["/bin/sh", "-c", _CHOOSE, "sh", *PLACES], timeout_s=60)
    if not found.ok:
        raise SandboxUnavailable(
            f"verifier code needs a Python 3 in its sandbox at {' or '.join(PLACES)}: install python3 (with its whole "
            "standard library) on the host or in the task's image, or use a script verifier"
        )
    return [found.stdout.decode().strip(), *FLAGS]
