"""Makes the environments that peers run in, once: `.cache/bench-envs/NAME`, the versions of constraints-NAME.txt.

python -m benchmarks.peers.envs
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.cases import CACHE

HOME = CACHE / "bench-envs"
REQUIREMENTS = {"verifiers": ("verifiers",), "inspect": ("inspect-ai", "openai")}
"""Environment -> what is asked of pip; the constraints name the versions, also of what these need."""


class PeerError(Exception):
    """pip could not install a peer; the message holds the end of what it said."""


def constraints(name: str) -> Path:
    """The file of pinned versions of an environment."""
    return Path(__file__).with_name(f"constraints-{name}.txt")


def ensure(name: str) -> Path:
    """The Python of a peer's environment, made first where it is not there as pinned."""
    folder = HOME / name
    python = folder / "bin" / "python"
    stamp = folder / "made-from"
    wanted = hashlib.sha256(constraints(name).read_bytes() + sys.version.encode()).hexdigest()
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"making {folder} (once; some minutes)", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip(python, "install", "--quiet", "--constraint", str(constraints(name)), *REQUIREMENTS[name])
        stamp.write_text(wanted)
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run an environment's own pip. Raises PeerError with the end of what it said."""
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"pip {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    for name in REQUIREMENTS:
        print(f"{name}: {ensure(name)}")


if __name__ == "__main__":
    main()
