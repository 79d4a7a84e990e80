"""The base layer that is the host's own: its /usr, and a skeleton with the little of /etc that programs need.

An allow-list: nothing of the host is visible but what is named here. Never /root, /home, /etc's secrets, sockets,
/opt or a Python outside /usr.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.identity import Identity
from rollout_engine.sandboxes.namespace.helper.layers import Layer
from rollout_engine.sandboxes.namespace.helper.stage import Stage

_TREES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DIRECTORIES = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555,
    "root": 0o700, "run": 0o755, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "var": 0o755, "var/cache": 0o755,
    "var/lib": 0o755, "var/log": 0o755, "var/tmp": 0o1777, "workspace": 0o777,
}  # fmt: skip
_ETC = (
    "alternatives", "bash.bashrc", "debian_version", "gai.conf", "inputrc", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "openssl.cnf", "os-release", "perl", "profile",
    "protocols", "python3", "python3.11", "python3.12", "python3.13", "redhat-release", "services",
    "ssl/certs/ca-certificates.crt", "ssl/openssl.cnf", "terminfo",
)  # fmt: skip
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
    "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
    "agent:x:1000:1000:agent:/home/agent:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\nbin:x:2:\ntty:x:5:\nwww-data:x:33:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "hostname": "box\n",
}
_MAX_FILE = 2 * 2**20


def build(identity: Identity, stage: Stage, trees: Sequence[str] = _TREES) -> Layer:
    """The host as a layer: the skeleton at /, and each real directory of programs at its own mount point."""
    options = {"mode": "755", "size": "16m", "nr_inodes": "5000"}
    mount = sys.filesystem("tmpfs", options, (), sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV)
    stacks = {"/": [mount]}
    for name, mode in _DIRECTORIES.items():
        _mkdir(mount, name, mode)
    for name in trees:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.lstat(f"/{name}").st_mode):
                os.symlink(os.readlink(f"/{name}").lstrip("/"), name, dir_fd=mount)
            else:
                _mkdir(mount, name, 0o755)
                stacks[f"/{name}"] = [os.open(f"/{name}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    _fill_etc(mount)
    _mkdir(mount, "home/agent", 0o755)
    _give(mount, ".", identity.owner)
    os.chown("home/agent", identity.owner + min(1000, identity.size - 1), -1, dir_fd=mount)
    stage.put(mount)
    return Layer(stacks)


def _fill_etc(mount: int) -> None:
    for name in _ETC:
        _copy(mount, f"/etc/{name}", f"etc/{name}")
    for name, text in _WRITTEN.items():
        _write(mount, f"etc/{name}", text.encode())


def _copy(mount: int, source: str, target: str) -> None:
    """Copies a file, a link that leads into what a box sees, or a directory of such."""
    with contextlib.suppress(OSError):
        os.makedirs(f"/proc/self/fd/{mount}/{os.path.dirname(target)}", exist_ok=True)
        if os.path.islink(source) and os.path.realpath(source).startswith("/usr/"):
            os.symlink(os.readlink(source), target, dir_fd=mount)
        elif os.path.isdir(source):
            for name in os.listdir(source):
                _copy(mount, f"{source}/{name}", f"{target}/{name}")
        else:
            with open(source, "rb") as file:
                _write(mount, target, file.read(_MAX_FILE))


def _write(mount: int, name: str, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644, dir_fd=mount)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _mkdir(mount: int, name: str, mode: int) -> None:
    os.mkdir(name, dir_fd=mount)
    os.chmod(name, mode, dir_fd=mount)


def _give(mount: int, name: str, owner: int) -> None:
    """Makes the skeleton box root's where its ids are not mapped at mounting."""
    if owner:
        for directory, names, files in os.walk(f"/proc/self/fd/{mount}/{name}"):
            for entry in ["", *names, *files]:
                os.chown(f"{directory}/{entry}", owner, owner, follow_symlinks=False)


def device_tree(stage: Stage) -> int:
    """A detached tree of mounts for /dev: a few harmless devices of the host's, and what programs expect there."""
    mount = sys.filesystem("tmpfs", {"mode": "755", "size": "64k", "nr_inodes": "64"}, (), sys.MOUNT_ATTR_NOSUID)
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
    for name, target in links.items():
        os.symlink(target, name, dir_fd=mount)
    for name in ("pts", "shm"):
        os.mkdir(name, dir_fd=mount)
    scratch = next(path for path in ("/tmp", "/run", "/mnt") if os.path.isdir(path))
    sys.attach(mount, scratch)
    try:
        for name in ("null", "zero", "full", "random", "urandom", "tty"):
            open(f"{scratch}/{name}", "w").close()
            sys.mount(f"/dev/{name}", f"{scratch}/{name}", "", sys.MS_BIND)
        tree = sys.open_tree(-100, scratch, recursive=True)
        stage.put(tree)
        return tree
    finally:
        sys.umount(scratch)
        os.close(mount)
