"""Settles in a place: `python -m tests.chaos.settler FOLDER`. Ends when it is told to; its child does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from rollout_engine.sandboxes.namespace.helper import limits, syscalls

STUBBORN = 'trap "" TERM INT HUP; while :; do sleep 1000; done'


def main(folder: Path) -> None:
    (folder / "mount").mkdir()
    syscalls.mount("settler", str(folder / "mount"), "tmpfs", 0)
    for controller in limits.find_controllers():
        Path(controller.root, "settled").mkdir(exist_ok=True)
    subprocess.Popen(["sh", "-c", STUBBORN, str(folder)], start_new_session=True)
    print(folder, flush=True)
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main(Path(sys.argv[1]))
