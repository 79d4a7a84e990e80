"""The launcher: a host's small helper process that makes boxes, and that they end with.

One thread, standard library only, an empty environment, everything imported before it forks. It serves one
socket; the end of that socket, which is the end of its host, is its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys as python
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from rollout_engine.sandboxes.namespace.helper import hostlayer, layers, limits, wire
from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.box import Serve
from rollout_engine.sandboxes.namespace.helper.identity import Identities, Identity, become_user_root, write_maps
from rollout_engine.sandboxes.namespace.helper.nursery import Nursery
from rollout_engine.sandboxes.namespace.helper.stage import Stage
from rollout_engine.sandboxes.namespace.helper.supervisor import supervise

_SWEEP_S = 0.5
_NEEDLESS = (
    "devpts", "mqueue", "debugfs", "tracefs", "securityfs", "pstore", "bpf", "configfs", "fusectl", "hugetlbfs",
    "binfmt_misc", "efivarfs", "autofs",
)  # fmt: skip
_NAMESPACES = sys.CLONE_NEWNS | sys.CLONE_NEWPID | sys.CLONE_NEWIPC | sys.CLONE_NEWUTS | sys.CLONE_NEWCGROUP


class Box(NamedTuple):
    """What the launcher keeps of a live box."""

    name: str
    pid: int
    identity: Identity
    scratch: layers.Scratch
    stacks: dict[str, list[int]]
    changes: frozenset[str]
    groups: list[str]
    oom: int | None


class Launcher:
    """Makes boxes on request, and clears up after those that have ended."""

    def __init__(self, control: socket.socket, serve: Serve, base: Callable[[Identity, Stage], layers.Layer]) -> None:
        """`serve` is what a box does once it is closed in; `base` makes what boxes without a root of their own see."""
        self._control, self._serve_box, self._make_base = control, serve, base
        self._boxes: dict[int, Box] = {}
        self._pids: dict[str, int] = {}
        self._layers: dict[str, layers.Layer] = {}
        self._lifeline, self._held_open = os.pipe2(os.O_CLOEXEC)

    # Start.
    def start(self) -> None:
        """Takes the first message: what to be. Answers what works."""
        hello = wire.receive_wait(self._control)
        try:
            self._reply(hello, self._become(hello))
        except OSError as error:
            self._reply(hello, {"error": str(error)})
            raise

    def _become(self, hello: wire.Message) -> dict[str, Any]:
        mode = hello.header["mode"]
        if (user := hello.header["run_as"]) is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        if os.geteuid() != 0:
            become_user_root()
            mode = "user"
        sys.unshare(sys.CLONE_NEWNS)
        sys.mount("none", "/", "", sys.MS_REC | sys.MS_PRIVATE)
        self._identities = Identities(mode)
        controllers = limits.find_controllers() if hello.header["groups"] else []
        _leave_mounts([controller.root for controller in controllers])
        limits.remove_dead(controllers)
        self._groups = limits.Groups(controllers)
        self._stage = Stage(pretend_old=hello.header["pretend_old"])
        self._devices = hostlayer.device_tree(self._stage)
        self._layers["host"] = self._make_base(self._identities.sample(), self._stage)
        self._nursery = Nursery(self._lifeline, hello.blob, self._serve_box)
        held = [controller.name for controller in self._groups.controllers]
        owner = -1 if mode == "user" else self._identities.sample().owner
        return {"mode": mode, "held": held, "ids": self._identities.count, "owner": owner}

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        sweep_at = None
        while True:
            wait = None if sweep_at is None else max(0, int((sweep_at - time.monotonic()) * 1000))
            for fd, _ in poll.poll(wait):
                if fd == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 512)
                else:
                    self._serve(wire.receive(self._control))
            if self._reap() and sweep_at is None:
                sweep_at = time.monotonic() + _SWEEP_S
            if sweep_at is not None and time.monotonic() >= sweep_at:
                sweep_at = time.monotonic() + _SWEEP_S if self._groups.sweep() else None

    def stop(self) -> None:
        """Ends every box and removes what was theirs."""
        for pid in self._boxes:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._boxes):
            os.waitpid(pid, 0)
            self._groups.remove_later(self._boxes[pid].groups)
        poll = select.poll()
        for _ in range(100):
            if not self._groups.sweep():
                break
            poll.poll(20)
        self._groups.close()

    def _serve(self, message: wire.Message) -> None:
        try:
            getattr(self, f"_do_{message.header['op']}")(message)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            self._reply(message, {"error": f"{type(error).__name__}: {error}", "missing": isinstance(error, KeyError)})
        finally:
            message.drop()

    def _reply(self, message: wire.Message, header: dict[str, Any]) -> None:
        wire.send(self._control, {"id": message.header["id"], **header})

    # Boxes.

    def _do_create(self, message: wire.Message) -> None:
        """The box itself says on its own socket when it is ready, or why it is not."""
        plan, name = message.header["plan"], message.header["box"]
        limit = limits.Limits(*plan["limits"])
        stacks = layers.stack_up(self._base(plan["base"]), [self._layers[layer] for layer in plan["layers"]])
        identity = self._identities.take()
        groups: list[str] = []
        scratch = None
        try:
            groups = self._groups.make(name, limit)
            scratch = layers.make_scratch(stacks, limit.disk_bytes, limit.inodes, identity)
            oom = limits.oom_counter(groups)
            self._fill_plan(plan, stacks, identity)
            stacks = {at: [os.dup(fd) for fd in stack] for at, stack in stacks.items()}
            pid = self._birth(plan, message.fds[0], groups, oom, stacks, scratch, identity)
        except OSError:
            if scratch is not None:
                os.close(scratch.mount)
            self._groups.remove_later(groups)
            self._identities.give_back(identity)
            raise
        changes = frozenset(self._base(plan["base"]).stacks)
        self._boxes[pid] = Box(name, pid, identity, scratch, stacks, changes, groups, oom)
        self._pids[name] = pid
        self._reply(message, {"pid": pid})

    def _base(self, name: str) -> layers.Layer:
        """The host's layer, or a directory, which is opened once."""
        if name not in self._layers:
            if not name.startswith("/"):
                raise KeyError(name)
            self._layers[name] = layers.from_directory(name)
        return self._layers[name]

    def _fill_plan(self, plan: dict[str, Any], stacks: dict[str, list[int]], identity: Identity) -> None:
        plan["trees"] = [[at, len(stack)] for at, stack in stacks.items()]
        plan["userxattr"] = identity.base is not None
        plan["ids"], plan["tty"] = identity.size, identity.size > 5
        plan["held"] = [controller.name for controller in self._groups.controllers]
        plan["processes"] = -1 if "pids" in plan["held"] else plan["limits"][2]

    def _birth(
        self, plan: dict[str, Any], channel: int, groups: list[str], oom: int | None,
        stacks: dict[str, list[int]], scratch: layers.Scratch, identity: Identity,
    ) -> int:  # fmt: skip
        """Lets a box be born, maps its ids, and hands it what is its own."""
        flags = _NAMESPACES | (sys.CLONE_NEWNET if plan["network"] == "none" else 0)
        pid, go = self._nursery.birth(flags | (sys.CLONE_NEWUSER if identity.base is not None else 0))
        entries: list[int] = []
        try:
            entries = [os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for path in groups]
            fds = (channel, *entries, *([oom] if oom is not None else []))
            wire.send(go, {**plan, "groups": len(entries)}, b"", fds)
            self._hand_over(pid, go, stacks, scratch, identity)
        except (OSError, wire.Closed):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            go.close()
            for fd in entries:
                os.close(fd)
        return pid

    def _hand_over(
        self, pid: int, go: socket.socket, stacks: dict[str, list[int]], scratch: layers.Scratch, identity: Identity
    ) -> None:
        write_maps(pid, identity)
        userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC) if identity.idmap else None
        fds: list[int] = []
        try:
            fds.append(layers.lend(self._stage.copy_once(scratch.mount), identity, userns, readonly=False))
            fds.append(sys.open_tree(self._devices, recursive=True))
            for stack in stacks.values():
                fds.extend(layers.lend(sys.open_tree(fd), identity, userns, readonly=True) for fd in stack)
            wire.send(go, {}, b"", tuple(fds))
        finally:
            for fd in (*fds, *([userns] if userns is not None else [])):
                os.close(fd)

    def _do_destroy(self, message: wire.Message) -> None:
        if (pid := self._pids.get(message.header["box"])) is not None:
            os.kill(pid, signal.SIGKILL)
        self._reply(message, {})

    def _reap(self) -> bool:
        """Forgets boxes that have ended, and tells the host."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if (gone := self._boxes.pop(pid, None)) is not None:
                self._forget(gone, status)
                ended = True

    def _forget(self, gone: Box, status: int) -> None:
        del self._pids[gone.name]
        oom = limits.count_oom(gone.oom)
        layers.Layer(gone.stacks).close()
        for fd in (gone.scratch.mount, *([gone.oom] if gone.oom is not None else [])):
            os.close(fd)
        self._groups.remove_later(gone.groups)
        self._identities.give_back(gone.identity)
        wire.send(self._control, {"ended": gone.name, "status": os.waitstatus_to_exitcode(status), "oom": oom})

    # Layers.

    def _do_export(self, message: wire.Message) -> None:
        """Makes what a box left a layer; the host has had it frozen before."""
        box = self._boxes[self._pids[message.header["box"]]]
        opaque = "trusted.overlay.opaque" if box.identity.base is None else "user.overlay.opaque"
        paths = message.header["paths"]
        if paths == ["*"]:
            paths = [at for at in box.scratch.uppers if at in box.changes]
        elif "/" in paths:
            layers.hide_programs(box.scratch)
        layer = layers.export(box.stacks, box.scratch, paths, opaque, self._stage)
        self._layers[message.header["layer"]] = layer
        self._reply(message, {})

    def _do_drop(self, message: wire.Message) -> None:
        if (layer := self._layers.pop(message.header["layer"], None)) is not None:
            layer.close()
            self._stage.remove(layer.staged)
        self._reply(message, {})


def _leave_mounts(needed: list[str]) -> None:
    """Unmounts, for itself alone, what no box needs: each new box copies and frees the whole table."""
    with open("/proc/self/mounts") as file:
        rows = [line.split() for line in file]
    for _, path, kind, *_ in reversed(rows):
        unused = kind in ("cgroup", "cgroup2") and not any(root.startswith(path) for root in needed)
        if kind in _NEEDLESS or unused:
            with contextlib.suppress(OSError):
                sys.umount(path)


def main(
    descriptor: int, serve: Serve = supervise, base: Callable[[Identity, Stage], layers.Layer] = hostlayer.build
) -> NoReturn:
    """Serves the socket that the host left open at `descriptor`."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    os.chdir("/")
    os.umask(0o22)
    sys.rename_process("rollout-box-launcher")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    launcher = Launcher(control, serve, base)
    try:
        launcher.start()
        try:
            launcher.run()
        finally:
            launcher.stop()
    except wire.Closed:
        pass
    except BaseException as error:
        with contextlib.suppress(wire.Closed, OSError):
            wire.send(control, {"fatal": f"{type(error).__name__}: {error}"})
        python.exit(1)
    python.exit(0)
