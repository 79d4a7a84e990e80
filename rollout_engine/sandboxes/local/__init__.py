"""The `local` sandbox: commands as ordinary processes in a temporary directory. This is no isolation.

A command runs as the engine's own user, reads and writes whatever that user may, reaches the network, and no
limit of memory, processes or disk is held. It is for tasks whose code you trust, and for tests. What it does
give: a directory of its own, an environment without the host's secrets, and that nothing is left behind.
The environment is PATH, HOME, LANG, TMPDIR, the spec's own, and a mark by which processes are found again;
one that drops its environment *and* leaves its session outlives the sandbox.
"""

from __future__ import annotations

from rollout_engine.sandboxes.local.provider import LocalProvider
from rollout_engine.sandboxes.local.sandbox import LocalSandbox

__all__ = ["LocalProvider", "LocalSandbox"]
