"""Runs a Python program in a fork of a box's first process: what it needs is loaded, no interpreter has to start.

The fork is one more command of the box: of the same user, with the same restrictions, and no descriptor but its three
and the standard library's. Of the first process it has a copy of the memory, in which nothing is but the launcher's
code and what this box was told. Nothing that it does to itself outlives it.
"""

from __future__ import annotations

import builtins
import gc
import marshal
import os
import sys as python
from importlib import import_module
from typing import NoReturn

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

LOADED = ("_ast", "json", "math", "re", "string", "types")
"""What is loaded before the first box is made: few, as every birth pays for it, and none that acts at a fork."""
MODULES = frozenset({
    "__future__", "abc", "ast", "base64", "bisect", "collections", "collections.abc", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "difflib", "enum", "errno", "fnmatch", "functools", "glob", "heapq", "html", "inspect",
    "io", "itertools", "json", "linecache", "math", "numbers", "operator", "os", "os.path", "pathlib", "pprint", "re",
    "shlex", "signal", "stat", "string", "struct", "subprocess", "textwrap", "time", "traceback", "types",
    "typing", "unicodedata",
})  # fmt: skip
"""What programs may import: modules that load no shared library, of which a box may have another one."""
NO_LIBRARY = -1


def load() -> None:
    """Loads what programs shall find loaded."""
    for name in LOADED:
        import_module(name)


def open_library() -> int:
    """The standard library, for what is imported late; -1 where there is no way to it.

    It is a mount of its own, read-only, and no `..` leads out of it: a box may hold it.
    """
    try:
        library = sys.open_tree(-100, os.path.dirname(os.__file__))
    except PermissionError:  # an ordinary user, and an interpreter below a home that is closed to it
        return NO_LIBRARY
    sys.set_mount(library, sys.MOUNT_ATTR_RDONLY | sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV)
    return library


def find_late_imports(library: int) -> None:
    """What is imported from now on comes from the library, or not at all."""
    path = f"/proc/self/fd/{library}"
    python.path[:] = [path, f"{path}/lib-dynload"] if library >= 0 else []
    python.path_importer_cache.clear()


def run(program: bytes, env: dict[str, str], library: int) -> NoReturn:
    """In a fork that has taken its place (see spawn): nothing is left open but 0, 1, 2 and the library."""
    keep = max(3, library)
    os.closerange(3, keep)
    os.closerange(keep + (library >= 0), 2**30)
    os.environ.clear()
    os.environ.update(env)
    python.argv[:] = ["-c"]
    find_late_imports(library)
    gc.enable()
    exec(marshal.loads(program), {"__name__": "__main__", "__builtins__": builtins})
    python.stdout.flush()
    os._exit(0)
