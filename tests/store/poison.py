"""A run directory that somebody has edited: `python -m tests.store.poison COMMAND ...`, in a process of its own.

    read RUN [BYTES]          everything that a reader does, in at most so much address space; prints how it ended
    replace RUN FILE MARKER   a file in the place of every other, in turn; the marker must not appear
    mutate RUN SEED COUNT     changed bytes in every file of copies of the run, each copy read

A crash of the interpreter is a failure that an `except` cannot hide: hence the process.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollout_engine.commands.report import read_report
from rollout_engine.commands.watching import look
from rollout_engine.errors import InputError, RunError
from rollout_engine.store import open_run


def read_everything(path: Path) -> str:
    """What a reader is told: `read`, or the error that names a file of the run."""
    said = []
    for read in readers(path):
        try:
            read()
        except (InputError, RunError) as error:
            said.append(str(error))
    assert all(str(path) in one for one in said), f"does not say where: {said}"
    return said[0] if said else "read"


def readers(path: Path) -> list[Callable[[], object]]:
    return [
        lambda: open_run(path).rollouts(),
        lambda: open_run(path).turns_table(),
        lambda: open_run(path).winners(),
        lambda: open_run(path).turns("0/strong/0/task/0"),
        lambda: list(open_run(path).plan().entries()),
        lambda: open_run(path).driver(),
        lambda: read_report(path),
        lambda: look(path, None, 0.0),
    ]


def mutate(run: Path, seed: int, count: int) -> str:
    """Each file of a copy changed a few bytes, cut, or grown."""
    draw = random.Random(seed)
    read = 0
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "run"
            shutil.copytree(run, copy)
            path = draw.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
            path.write_bytes(changed(path.read_bytes(), draw))
            read += read_everything(copy) == "read"
    return f"{count} tried, {read} read"


def changed(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    way = draw.randrange(4)
    if way == 0:
        return bytes(found[: draw.randrange(len(found) + 1)])
    if way == 1:
        return bytes(found) + draw.randbytes(draw.randrange(1, 200))
    for _ in range(1 if way == 2 else 20):
        at = draw.randrange(len(found)) if found else 0
        found[at : at + 1] = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))])
    return bytes(found)


def replace(run: Path, content: Path, marker: Path) -> str:
    """Each file of the run replaced by this content, in turn, and the run read; the marker must not appear."""
    payload = content.read_bytes()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        kept = path.read_bytes()
        path.write_bytes(payload)
        read_everything(run)
        assert not marker.exists(), path
        path.write_bytes(kept)
    return read_everything(run)


def main(command: str, run: str, *rest: str) -> None:
    if command == "mutate":
        print(mutate(Path(run), int(rest[0]), int(rest[1])))
        return
    if command == "replace":
        print(replace(Path(run), Path(rest[0]), Path(rest[1])))
        return
    if rest:
        resource.setrlimit(resource.RLIMIT_AS, (int(rest[0]), int(rest[0])))
    print(read_everything(Path(run)))


if __name__ == "__main__":
    main(*sys.argv[1:])
