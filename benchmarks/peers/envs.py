"""Makes the environments that peers run in, once: `.cache/bench-envs/NAME`, the versions of constraints-NAME.txt.

python -m benchmarks.peers.envs
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import CACHE

HOME = CACHE / "bench-envs"
LIMIT_S = 1800.0
"""How long pip may take for one environment."""


class Environment(NamedTuple):
    """What is asked of pip; the constraints name the versions, also of what these need."""

    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    """The oldest Python that it runs on."""
    dependencies: bool = True
    """False: the constraints list all there is, and are installed as they stand (pip's resolver takes too long)."""


ENVIRONMENTS = {
    "verifiers": Environment(("verifiers",)),
    "inspect": Environment(("inspect-ai", "openai")),
    "verifiers04": Environment(("verifiers", "uv")),
    "synth": Environment(("synth-ai",), dependencies=False),
    "harbor": Environment(("harbor",), (3, 12)),
    "chart": Environment(("matplotlib",)),
}


class PeerError(Exception):
    """A peer cannot be installed: there is no Python that it runs on, or pip failed (with the end of what it said)."""


def constraints(name: str) -> Path:
    """The file of pinned versions of an environment."""
    return Path(__file__).with_name(f"constraints-{name}.txt")


def pythons(oldest: tuple[int, int]) -> Iterator[Path]:
    """Interpreters by name that may do: this one, those on PATH, those of pyenv; the oldest that does comes first."""
    if sys.version_info >= oldest:
        yield Path(sys.executable)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(oldest[1], 20):
        name = f"python3.{minor}"
        found = shutil.which(name)
        yield from [Path(found)] if found else []
        yield from sorted(root.glob(f"versions/3.{minor}.*/bin/{name}"))


def version(python: Path) -> str | None:
    """What an interpreter says of itself; None where it does not run (as pyenv's stand-ins for absent ones)."""
    try:
        done = subprocess.run([python, "-VV"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().removeprefix("Python ") if done.returncode == 0 else None


def find_python(oldest: tuple[int, int]) -> Path:
    """An interpreter at least as new. Raises PeerError."""
    for python in pythons(oldest):
        if version(python):
            return python
    raise PeerError(f"needs Python {oldest[0]}.{oldest[1]} or newer: none on PATH, none of pyenv's")


def ensure(name: str) -> Path:
    """The Python of a peer's environment, made first where it is not there as pinned. Raises PeerError."""
    environment = ENVIRONMENTS[name]
    folder = HOME / name
    python, stamp = folder / "bin" / "python", folder / "made-from"
    base = find_python(environment.python)
    wanted = hashlib.sha256(constraints(name).read_bytes() + str(version(base)).encode()).hexdigest()
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == wanted):
            print(f"making {folder} (once; some minutes)", file=sys.stderr, flush=True)
            make(folder, base, environment, constraints(name))
            stamp.write_text(wanted)
    return python


def make(folder: Path, base: Path, environment: Environment, pinned: Path) -> None:
    """The environment from nothing. Raises PeerError."""
    run([base, "-m", "venv", "--clear", folder])
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if environment.dependencies:
        run([*pip, "--constraint", pinned, *environment.requirements])
    else:
        run([*pip, "--no-deps", "--requirement", pinned])


def run(argv: list[str | Path]) -> None:
    """One command. Raises PeerError with the end of what it said."""
    said = " ".join(str(word) for word in argv[1:])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{said} took more than {LIMIT_S:.0f} s") from error
    if done.returncode:
        raise PeerError(f"{said} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    for name in ENVIRONMENTS:
        try:
            print(f"{name}: {ensure(name)}")
        except PeerError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
