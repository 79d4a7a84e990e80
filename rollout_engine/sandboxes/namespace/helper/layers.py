"""Read-only trees that boxes are built on: stacks of directories, by the path they are mounted at."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.identity import Identity
from rollout_engine.sandboxes.namespace.helper.stage import Stage

_BENEATH = sys.RESOLVE_BENEATH | sys.RESOLVE_NO_SYMLINKS | sys.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LOADER = ("ld.so.preload", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "profile", "profile.d")
_PYTHON = "python"


class Layer:
    """Directories by mount point, lowest first.

    Each is a descriptor of a directory of the host's, or of a detached mount, which lives as long as that.
    """

    def __init__(self, stacks: dict[str, list[int]], staged: str = "") -> None:
        self.stacks, self.staged = stacks, staged

    def close(self) -> None:
        for stack in self.stacks.values():
            for fd in stack:
                os.close(fd)
        self.stacks = {}


class Scratch(NamedTuple):
    """A box's private file system: what it writes, until its last holder lets go."""

    mount: int
    uppers: dict[str, str]


def from_directory(path: str, at: str = "/") -> Layer:
    return Layer({at: [os.open(path, _DIRECTORY & ~os.O_NOFOLLOW)]})


def stack_up(base: Layer, above: list[Layer]) -> dict[str, list[int]]:
    """The directories of a box, lowest first, by mount point; the layers keep the descriptors."""
    stacks = {at: list(stack) for at, stack in base.stacks.items()}
    for layer in above:
        for at, stack in layer.stacks.items():
            if at in base.stacks:
                stacks[at] = stacks[at] + stack
            else:
                stacks[at] = list(stack)
    return dict(sorted(stacks.items()))


def make_scratch(stacks: dict[str, list[int]], size: int, inodes: int, identity: Identity) -> Scratch:
    """The tmpfs of a new box, with the directories that its overlays need."""
    count = sum(len(stack) for stack in stacks.values())
    options = {"size": str(size), "nr_inodes": str(inodes + count + 32), "mode": "755"}
    mount = sys.filesystem("tmpfs", options, (), sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV)
    uppers = {at: f"u{index}" for index, at in enumerate(stacks)}
    work = [f"w{index}" for index in range(len(stacks))]
    for name in ["", *uppers.values(), *work, "m", "shm", *(f"l{index}" for index in range(count))]:
        if name:
            os.mkdir(name, 0o755, dir_fd=mount)
        if identity.owner:
            os.chown(name or ".", identity.owner, identity.owner, dir_fd=mount)
    os.chmod("shm", 0o1777, dir_fd=mount)
    for at, stack in stacks.items():
        _look_like(mount, uppers[at], os.fstat(stack[-1]))
    return Scratch(mount, uppers)


def _look_like(mount: int, name: str, model: os.stat_result) -> None:
    """An overlay's root looks as its upper directory does, so that one takes after the layer below."""
    os.chmod(name, stat.S_IMODE(model.st_mode), dir_fd=mount)
    with contextlib.suppress(OSError):
        os.chown(name, model.st_uid, model.st_gid, dir_fd=mount)


def lend(mount: int, identity: Identity, userns: int | None, *, readonly: bool) -> int:
    """Makes a detached mount one box's, its owners mapped where the box has ids of its own. Takes the descriptor."""
    attributes = sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV | (sys.MOUNT_ATTR_RDONLY if readonly else 0)
    try:
        try:
            sys.set_mount(mount, attributes, userns if identity.idmap else None)
        except OSError:
            if not readonly:
                raise
            sys.set_mount(mount, attributes)  # a file system that maps no ids: readable, its owners nobody
    except OSError:
        os.close(mount)
        raise
    return mount


def export(stacks: dict[str, list[int]], scratch: Scratch, paths: list[str], opaque: str, stage: Stage) -> Layer:
    """What a finished box left at some paths, as a layer of its own. The box must write no more.

    A path that is a mount point of the box's base yields what the box changed there; any other directory the
    whole tree that the box saw there. Anything else comes if the box made, changed or removed it.
    """
    staged, plain = stage.put(scratch.mount), Layer({})
    try:
        plain.stacks = _wanted(stacks, scratch, paths, opaque)
        if stage.needed:
            return Layer({at: [os.dup(fd) for fd in stack] for at, stack in plain.stacks.items()}, staged)
        return Layer({at: [sys.open_tree(fd) for fd in stack] for at, stack in plain.stacks.items()})
    except OSError:
        stage.remove(staged)
        raise
    finally:
        plain.close()


def _wanted(stacks: dict[str, list[int]], scratch: Scratch, paths: list[str], opaque: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in paths:
        if path in scratch.uppers:
            found[path] = [_open_upper(scratch, path)]
        elif tree := _collect(stacks, scratch, path, opaque):
            found[path] = tree
    for at in sorted(scratch.uppers):
        single = [path for path in paths if path not in found and _mount_of(path, scratch.uppers) == at]
        if single:
            found.setdefault(at, []).append(_pick(scratch, at, single))
    return found


def _mount_of(path: str, mounts: Iterable[str]) -> str:
    return max((at for at in mounts if at == "/" or path == at or path.startswith(f"{at}/")), key=len)


def _parts(path: str, at: str) -> list[str]:
    return [part for part in path.removeprefix(at).split("/") if part]


def _pick(scratch: Scratch, at: str, paths: list[str]) -> int:
    """A new directory with the entries at some paths that are no directories, moved there from the box's changes."""
    upper = _open_upper(scratch, at)
    try:
        picked = _new_directory(scratch, upper)
        for path in paths:
            _move(upper, picked, _parts(path, at))
        return picked
    finally:
        os.close(upper)


def _new_name(scratch: Scratch) -> str:
    return f"kept{len(os.listdir(f'/proc/self/fd/{scratch.mount}'))}"


def _new_directory(scratch: Scratch, model: int) -> int:
    name = _new_name(scratch)
    os.mkdir(name, dir_fd=scratch.mount)
    _look_like(scratch.mount, name, os.fstat(model))
    return os.open(name, _DIRECTORY, dir_fd=scratch.mount)


def _move(source: int, target: int, parts: list[str]) -> None:
    """Moves the first entry on a path that is no directory: a file, a link, or the mark of a removal."""
    source, target = os.dup(source), os.dup(target)
    try:
        for part in parts:
            try:
                kind = os.stat(part, dir_fd=source, follow_symlinks=False)
            except FileNotFoundError:
                return
            if not stat.S_ISDIR(kind.st_mode):
                os.rename(part, part, src_dir_fd=source, dst_dir_fd=target)
                return
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=target)
                _look_like(target, part, kind)
            source, target = _down(source, part), _down(target, part)
    finally:
        os.close(source)
        os.close(target)


def _down(directory: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    finally:
        os.close(directory)


def hide_programs(scratch: Scratch) -> None:
    """Takes out of a finished box's changes what would make another box run other programs than its base's.

    That is the directories of programs, what the loader and shells read, and what Python reads at its start.
    """
    upper = _open_upper(scratch, "/")
    try:
        _take_out(upper, _PROGRAMS, scratch)
        try:
            etc = os.open("etc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=upper)
        except FileNotFoundError:
            return
        except OSError:
            _take_out(upper, ("etc",), scratch)
            return
        try:
            names = os.listdir(etc)
            _take_out(etc, [name for name in names if name in _LOADER or name.startswith(_PYTHON)], scratch)
        finally:
            os.close(etc)
    finally:
        os.close(upper)


def _take_out(directory: int, names: Sequence[str], scratch: Scratch) -> None:
    """Moves entries out of every layer, whatever they are: nothing of them is followed or walked."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, _new_name(scratch), src_dir_fd=directory, dst_dir_fd=scratch.mount)


def _open_upper(scratch: Scratch, at: str) -> int:
    return os.open(scratch.uppers[at], _DIRECTORY, dir_fd=scratch.mount)


def _collect(stacks: dict[str, list[int]], scratch: Scratch, path: str, opaque: str) -> list[int]:
    """The directories that a path shows merged, lowest first; none where it is no directory."""
    at = _mount_of(path, stacks)
    parts = _parts(path, at)
    upper = _open_upper(scratch, at)
    found: list[int] = []
    try:
        for directory in [upper, *reversed(stacks[at])]:
            fd, hides = _descend(directory, parts, opaque)
            if fd is not None:
                found.insert(0, fd)
            if hides:
                break
    finally:
        os.close(upper)
    return found


def _descend(directory: int, parts: list[str], opaque: str) -> tuple[int | None, bool]:
    """A path in one layer: its descriptor where it is a directory, and whether it hides the layers below."""
    fd, hides = os.dup(directory), False
    for part in parts:
        try:
            below = sys.open_inside(fd, part, _DIRECTORY, _BENEATH)
        except FileNotFoundError:
            os.close(fd)
            return None, hides
        except OSError:
            os.close(fd)
            return None, True
        os.close(fd)
        fd = below
        with contextlib.suppress(OSError):
            hides = hides or os.getxattr(f"/proc/self/fd/{fd}", opaque) == b"y"
    return fd, hides
