#!/usr/bin/env python3
"""Installs the agent programs that tests/agents_real runs, once: some 1.5 GB from npm and PyPI below .cache/agents.

    .venv/bin/python .ci/agents.py                 all of them
    .venv/bin/python .ci/agents.py codex opencode  these

AGENTS_CACHE names another directory. What is installed already is left as it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from rollout_engine.agents.cli import claude_code, codex, gemini, mini_swe_agent, opencode
from rollout_engine.agents.cli.install import Installer
from rollout_engine.errors import AgentError

REPO = Path(__file__).resolve().parent.parent
CACHE = os.environ.get("AGENTS_CACHE") or str(REPO / ".cache" / "agents")
PROGRAMS = {
    module.AGENT.program.name: module.AGENT.program for module in (opencode, codex, claude_code, gemini, mini_swe_agent)
}
LIMIT_S = 1800.0


async def main(names: list[str]) -> int:
    failed = 0
    for name in names or PROGRAMS:
        package = PROGRAMS[name].package
        assert package is not None
        try:
            print(f"{name}: {await Installer(package, CACHE, LIMIT_S).directory()}", flush=True)
        except AgentError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
