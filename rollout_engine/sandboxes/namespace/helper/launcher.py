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

from rollout_engine.sandboxes.namespace.helper import groups, hostlayer, layers, limits, mounts, programs, wire
from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.box import Serve
from rollout_engine.sandboxes.namespace.helper.identity import Identities, Identity, become_user_root, write_maps
from rollout_engine.sandboxes.namespace.helper.nursery import Nursery
from rollout_engine.sandboxes.namespace.helper.plan import Plan
from rollout_engine.sandboxes.namespace.helper.stage import Stage
from rollout_engine.sandboxes.namespace.helper.supervisor import supervise

_SWEEP_S = 0.5
_NAMESPACES = sys.CLONE_NEWNS | sys.CLONE_NEWPID | sys.CLONE_NEWIPC | sys.CLONE_NEWUTS | sys.CLONE_NEWCGROUP


class Box(NamedTuple):
    """What the launcher keeps of a live box."""

    name: str
    pid: int
    identity: Identity
    scratch: layers.Scratch
    stacks: dict[str, list[int]]
    changes: frozenset[str]
    group: groups.Group


class Launcher:
    """Makes boxes on request, and clears up after those that have ended."""

    def __init__(self, control: socket.socket, serve: Serve, base: Callable[[Identity, Stage], layers.Layer]) -> None:
        """`serve` is what a box does once it is closed in; `base` makes what boxes without a root of their own see."""
        self._control, self._serve_box, self._make_base = control, serve, base
        self._boxes: dict[int, Box] = {}
        self._pids: dict[str, int] = {}
        self._exported: set[str] = set()
        self._layers: dict[str, layers.Layer] = {}
        self._lifeline, self._held_open = os.pipe2(os.O_CLOEXEC)

    # Start.
    def start(self) -> None:
        """Takes the first message: what to be. Answers what works."""
        hello = wire.receive_order(self._control)
        try:
            self._reply(hello, self._become(hello))
        except OSError as error:
            self._reply(hello, {"error": str(error)})
            raise

    def _become(self, hello: wire.Message) -> dict[str, Any]:
        mode = hello.header["mode"]
        self._library = programs.open_library()  # before it is a user whom the way there may be closed to
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
        mounts.leave([controller.root for controller in controllers])
        limits.remove_dead(controllers)
        self._groups = groups.Groups(controllers)
        self._stage = Stage(pretend_old=hello.header["pretend_old"])
        self._devices = hostlayer.device_tree(self._stage)
        self._layers["host"] = self._make_base(self._identities.sample(), self._stage)
        if self._library < 0:
            self._library = programs.open_library()
        self._nursery = Nursery(self._lifeline, self._library, hello.blob, self._serve_box)
        held = [controller.name for controller in self._groups.controllers]
        owner = -1 if mode == "user" else self._identities.sample().owner
        return {
            "mode": mode,
            "held": held,
            "ids": self._identities.count,
            "owner": owner,
            "library": self._library >= 0,
        }

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
                    self._serve(wire.receive(self._control, orders=True))
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
            self._groups.give_back(self._boxes[pid].group, spoiled=True)
        poll = select.poll()
        for _ in range(100):
            if not self._groups.sweep(idle_s=0):
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
        try:
            self._create(message)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            wire.send(self._control, {"ended": message.header["box"], "error": f"{type(error).__name__}: {error}"})

    def _create(self, message: wire.Message) -> None:
        plan, name = message.header["plan"], message.header["box"]
        limit = limits.Limits(*plan["limits"])
        above = [self._layers[layer] for layer in plan["layers"]]
        above += [self._mount(*mount) for mount in plan.get("mounts", ())]
        stacks = layers.stack_up(self._base(plan["base"]), above)
        identity = self._identities.take()
        group = scratch = None
        try:
            group = self._groups.take(name, limit)
            scratch = layers.make_scratch(stacks, limit.disk_bytes, limit.inodes, identity)
            stacks = {at: [os.dup(fd) for fd in stack] for at, stack in stacks.items()}
            pid = self._birth(
                self._plan(plan, group, stacks, identity), message.fds[0], group, stacks, scratch, identity
            )
        except OSError:
            if scratch is not None:
                os.close(scratch.mount)
            if group is not None:
                self._groups.give_back(group)
            self._identities.give_back(identity)
            raise
        changes = frozenset(self._base(plan["base"]).stacks)
        self._boxes[pid] = Box(name, pid, identity, scratch, stacks, changes, group)
        self._pids[name] = pid

    def _base(self, name: str) -> layers.Layer:
        """The host's layer, or a directory, which is opened once."""
        if name not in self._layers:
            if not name.startswith("/"):
                raise KeyError(name)
            self._layers[name] = layers.from_directory(name)
        return self._layers[name]

    def _mount(self, directory: str, at: str) -> layers.Layer:
        """A directory of the host's at a place of its own: the box sees it, and writes to a copy."""
        name = f"{directory}\0{at}"
        if name not in self._layers:
            self._layers[name] = layers.from_directory(directory, at)
        return self._layers[name]

    def _plan(self, asked: dict[str, Any], group: groups.Group, trees: dict[str, list[int]], own: Identity) -> Plan:
        return Plan(
            group.limits, tuple(controller.name for controller in self._groups.controllers), len(group.entries),
            own.size, own.base is not None, asked["network"] == "none",
            tuple((at, len(stack)) for at, stack in trees.items()), asked["workdir"], asked["user"], self._library,
        )  # fmt: skip

    def _birth(
        self, plan: Plan, channel: int, group: groups.Group,
        stacks: dict[str, list[int]], scratch: layers.Scratch, identity: Identity,
    ) -> int:  # fmt: skip
        """Lets a box be born, maps its ids, and hands it what is its own."""
        flags = _NAMESPACES | (sys.CLONE_NEWNET if plan.network else 0)
        pid, go = self._nursery.birth(flags | (sys.CLONE_NEWUSER if identity.base is not None else 0))
        try:
            fds = (channel, *group.entries, *([group.oom] if group.oom is not None else []))
            wire.order(go, {"plan": (tuple(plan.limits), *plan[1:])}, b"", fds)
            self._hand_over(pid, go, stacks, scratch, identity)
        except (OSError, wire.Closed):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            go.close()
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
            wire.order(go, {}, b"", tuple(fds))
        finally:
            for fd in (*fds, *([userns] if userns is not None else [])):
                os.close(fd)

    def _do_destroy(self, message: wire.Message) -> None:
        if (pid := self._pids.get(message.header["box"])) is not None:
            os.kill(pid, signal.SIGKILL)

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
        oom = limits.count_oom(gone.group.oom)
        layers.Layer(gone.stacks).close()
        os.close(gone.scratch.mount)
        self._groups.give_back(gone.group, spoiled=gone.name in self._exported)
        self._exported.discard(gone.name)
        self._identities.give_back(gone.identity)
        wire.send(self._control, {"ended": gone.name, "status": os.waitstatus_to_exitcode(status), "oom": oom})

    # Layers.

    def _do_export(self, message: wire.Message) -> None:
        """Makes what a box left a layer; the host has had it frozen before."""
        box = self._boxes[self._pids[message.header["box"]]]
        self._exported.add(box.name)
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
    programs.load()
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
