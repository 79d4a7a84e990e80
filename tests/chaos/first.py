"""The first process of a place: `python -m tests.chaos.first MODULE FOLDER ARGUMENTS...`. All end with it.

Makes what is missing in new namespaces, runs the module, and waits for whatever its dead leave behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rollout_engine.sandboxes.namespace.helper import syscalls
from tests.chaos import groups


def main(module: str, folder: str, *arguments: str) -> int:
    groups.enter(Path(folder).name)
    syscalls.loopback_up()
    syscalls.mount("run", "/run", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755")  # sockets of daemons
    suite = subprocess.Popen([sys.executable, "-m", module, folder, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(suite.pid, signal.SIGTERM))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == suite.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
