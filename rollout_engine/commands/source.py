"""RUN/source.json: which tasks a run was asked for, so that `rollout resume` goes on with all of them."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, describe
from rollout_engine.specs import Spec
from rollout_engine.store.files import read_record, write_atomic, writing
from rollout_engine.store.mirrors import named, publish
from rollout_engine.tasks import TaskFile, check_tasks

NAME = "source.json"


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

    def write(self, run_dir: Path) -> None:
        """Raises RunError."""
        with writing(run_dir / NAME):
            write_atomic(run_dir / NAME, self.model_dump_json(indent=2).encode() + b"\n")
            publish(run_dir / NAME)

    def check(self, config: RunConfig, moved_to: Path | None = None) -> Source:
        """The same tasks as they are now, also in a file that was moved. Raises InputError where they are others."""
        path = Path(moved_to or self.path)
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
    found = check_tasks(path, config, pattern=pattern, limit=limit)
    source = Source(path=str(path.absolute()), digest=found.digest, count=found.count, pattern=pattern, limit=limit)
    return source, found


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
