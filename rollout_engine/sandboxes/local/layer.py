"""A layer of the local backend: a copy of what was at some paths of a sandbox's working directory."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from rollout_engine.errors import TooLarge
from rollout_engine.sandboxes import files


@dataclass(frozen=True, slots=True)
class Layer:
    """`paths` are relative to the working directory; `.` is all of it. Blocks: for threads."""

    directory: Path
    paths: tuple[str, ...]

    def take_from(self, work: Path, max_bytes: int) -> None:
        """Raises TooLarge above `max_bytes`; what was copied by then is removed."""
        try:
            for path in self.paths:
                if os.path.lexists(work / path):
                    max_bytes -= _copy(work / path, self.directory / path, max_bytes)
        except BaseException:
            files.remove(self.directory)
            raise

    def put_into(self, work: Path) -> None:
        """Replaces what is at the paths; one that was not there when the layer was made is not there now."""
        for path in self.paths:
            target = work / path
            if path != ".":
                files.remove(target)
            if (self.directory / path).exists():
                if path == ".":
                    for entry in list(work.iterdir()):
                        files.remove(entry)
                _copy(self.directory / path, target, None)


def _copy(source: Path, target: Path, max_bytes: int | None) -> int:
    """Copies files, directories and links (as links), nothing special. Returns the bytes of the files."""
    copied = 0

    def count(source: str, target: str) -> str:
        nonlocal copied
        if stat.S_ISREG(os.lstat(source).st_mode):
            copied += os.lstat(source).st_size
            if max_bytes is not None and copied > max_bytes:
                raise TooLarge(f"the export is larger than {max_bytes} bytes")
            shutil.copy2(source, target, follow_symlinks=False)
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=count, dirs_exist_ok=True)
    elif source.is_symlink():
        target.symlink_to(os.readlink(source))
    else:
        count(str(source), str(target))
    return copied
