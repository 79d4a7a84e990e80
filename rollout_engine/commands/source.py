"""RUN/source.json: which tasks a run was asked for, so that `rollout resume` goes on with all of them."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, describe
from rollout_engine.specs import Spec
from rollout_engine.store.files import open_regular, read_record, write_atomic, writing
from rollout_engine.store.mirrors import named, publish
from rollout_engine.tasks import TaskFile, check_task, check_tasks, read_tasks
from rollout_engine.version import VERSION

NAME = "source.json"
CHECKED_AGAIN = 256
"""Tasks of an unchanged file that are checked again: this machine may lack what the one before had."""


class Source(Spec):
    """A file of tasks, and what of it is meant."""

    path: str
    """Absolute."""
    digest: str
    """Of the selected tasks; see `tasks.check_tasks`."""
    count: int
    """Selected tasks."""
    pattern: str | None = None
    limit: int | None = None
    file: str = ""
    """Digest of the file's bytes and of the version that checked them; empty: its tasks are read each time."""

    def write(self, run_dir: Path) -> None:
        """Raises RunError."""
        with writing(run_dir / NAME):
            write_atomic(run_dir / NAME, self.model_dump_json(indent=2).encode() + b"\n")
            publish(run_dir / NAME)

    def check(self, config: RunConfig, moved_to: Path | None = None) -> Source:
        """The same tasks as they are now, also in a file that was moved. Raises InputError where they are others."""
        path = Path(moved_to or self.path)
        if self.file and self.file == _file_digest(path):
            for task in islice(read_tasks(path), CHECKED_AGAIN):
                check_task(task, config)
            return self.model_copy(update={"path": str(path.absolute())})
        found = source_of(path, config, self.pattern, self.limit)[0]
        if found.digest != self.digest:
            raise InputError(
                f"these are not the tasks that the run was started with ({found.count} tasks, digest {found.digest}; "
                f"then {self.count}, {self.digest})",
                where=str(path),
                fix="restore the file, name a copy with --tasks-file, or start a new run",
            )
        return found


def source_of(path: Path, config: RunConfig, pattern: str | None, limit: int | None) -> tuple[Source, TaskFile]:
    """Checks every task of the file. Raises InputError."""
    file = _file_digest(path)
    found = check_tasks(path, config, pattern=pattern, limit=limit)
    where = str(path.absolute())
    return Source(path=where, digest=found.digest, count=found.count, pattern=pattern, limit=limit, file=file), found


def _file_digest(path: Path) -> str:
    """Empty where the bytes do not say which tasks it holds: no regular file, or one that names others."""
    if path.suffix == ".toml":
        return ""
    try:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(VERSION.encode(), digest_size=16))
    except OSError:
        return ""
    return digest.hexdigest()


def read_source(run_dir: Path) -> Source | None:
    """None where the run was not started by `rollout run`. Raises InputError where the file is damaged."""
    path = run_dir / NAME
    try:
        return Source.model_validate_json(read_record(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise InputError(
            f"cannot be used: {describe(error)}",
            where=named(path),
            fix="restore it; without it (remove it) a resume goes on with the tasks planned so far",
        ) from error
