"""Inside a box: its first process, which runs commands and serves files until its socket ends."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from rollout_engine.sandboxes.namespace.helper import archive, files, processes, users, wire
from rollout_engine.sandboxes.namespace.helper.limits import count_oom
from rollout_engine.sandboxes.namespace.helper.plan import Plan
from rollout_engine.sandboxes.namespace.helper.spawn import fork_python, spawn
from rollout_engine.sandboxes.namespace.helper.users import User

_DISCARD = 2**16
_MAX_SINKS = 64
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OOM_SCORE = 500
"""Added for commands, so that the kernel kills them before their supervisor and before the host's processes."""


def supervise(
    channel: socket.SocketType, launcher: int, plan: Plan, oom: int | None, score: int, enforced: str
) -> None:
    """What the boxes of sandboxes do: they say that they are ready, and serve."""
    wire.send_text(channel, f'{{"ready":true,"limits":"{enforced}"}}')
    Supervisor(channel, launcher, plan, oom, score).run()


class Supervisor:
    """Serves one box's socket. Every reply carries the number of its request."""

    def __init__(self, channel: socket.SocketType, launcher: int, plan: Plan, oom: int | None, score: int) -> None:
        self._channel, self._launcher, self._oom, self._score_fd = channel, launcher, oom, score
        self._ids, self._user = plan.ids, plan.user
        self._workdir, self._library = plan.workdir, plan.library
        self._score = int(os.pread(score, 16, 0))
        self._poll = select.poll()
        self._jobs: dict[int, tuple[int, float]] = {}
        self._kept: dict[int, int] = {}
        self._helpers: dict[int, int] = {}
        self._sinks: list[int] = []
        self._oom_seen = count_oom(oom)

    def run(self) -> None:
        """Returns when the host or the launcher is gone, which is the end of the box."""
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # SIGCHLD itself the nursery has seen to
        for fd in (self._channel.fileno(), self._launcher, woken):
            self._poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._channel.fileno():
                    self._serve(wire.receive(self._channel, orders=True))
                elif fd == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 512)
                    self._reap()
                elif fd == self._launcher:
                    return
                else:
                    self._discard(fd)

    def _serve(self, message: wire.Message) -> None:
        try:
            getattr(self, f"_do_{message.header['op']}")(message)
        except users.UnknownUser as error:
            self._reply(message, {"error": "user", "text": str(error)})
        except ValueError as error:
            self._reply(message, {"error": "value", "text": str(error)})
        except OSError as error:
            self._reply(message, {"errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
        finally:
            message.drop()

    def _reply(
        self, message: wire.Message, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()
    ) -> None:
        wire.send(self._channel, {"id": message.header["id"], **header}, blob, fds)

    def _find(self, message: wire.Message) -> User:
        return users.find(message.header.get("user") or self._user, self._ids)

    # Commands.

    def _do_exec(self, message: wire.Message) -> None:
        header, user = message.header, self._find(message)
        env = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": user.home, **header["env"]}
        try:
            pid = self._spawn(message, header["cwd"] or self._workdir, env, user)
        except OSError as error:
            self._reply(message, {"errno": error.errno, "text": os.strerror(error.errno or 0), "at": error.filename})
            return
        self._jobs[pid] = (header["id"], time.monotonic())
        if header["keep"]:
            self._kept[header["id"]] = pid

    def _spawn(self, message: wire.Message, cwd: str, env: dict[str, str], user: User) -> int:
        """Children inherit the raised score, this process has it only while it forks. A blob is a Python program."""
        groups, argv, program = self._ids > 1, message.header["argv"], message.blob
        self._set_score(self._score + _OOM_SCORE)
        try:
            if program:
                return fork_python(program, cwd, env, user, message.fds, self._library, groups=groups)
            return spawn(argv, cwd, env, user, message.fds, groups=groups)
        finally:
            self._set_score(self._score)

    def _set_score(self, score: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._score_fd, str(min(1000, score)).encode(), 0)

    def _reap(self) -> None:
        """Collects every child that has ended: commands, helpers, and orphans of either."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._jobs:
                self._ended(*self._jobs.pop(pid), os.waitstatus_to_exitcode(status))
            elif pid in self._helpers:
                # A helper answers by itself; this is for one that was killed, and otherwise ignored.
                wire.send(self._channel, {"id": self._helpers.pop(pid), "errno": errno.EIO, "text": "helper killed"})

    def _ended(self, job: int, started: float, code: int) -> None:
        seen, self._oom_seen = self._oom_seen, count_oom(self._oom)
        seconds = time.monotonic() - started
        oom = self._oom_seen - seen
        wire.send_text(self._channel, f'{{"id":{job},"code":{code},"oom":{oom},"seconds":{seconds!r}}}')

    def _do_kill(self, message: wire.Message) -> None:
        """Kills a command's group; a background job's also when its first process has ended."""
        wanted = message.header["job"]
        group = next((pid for pid, (job, _) in self._jobs.items() if job == wanted), None)
        if group is None and self._jobs.get(self._kept.get(wanted, -1)) is None:  # not the number of another by now
            group = self._kept.get(wanted)
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _do_sink(self, message: wire.Message) -> None:
        """Takes over the output of what a command left running, so that it can go on writing."""
        while message.fds:
            fd = message.fds.pop()
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)
            self._sinks.append(fd)
        while len(self._sinks) > _MAX_SINKS:
            self._drop_sink(self._sinks[0])

    def _discard(self, fd: int) -> None:
        try:
            if not os.read(fd, _DISCARD):
                self._drop_sink(fd)
        except BlockingIOError:
            pass
        except OSError:
            self._drop_sink(fd)

    def _drop_sink(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._sinks.remove(fd)
        os.close(fd)

    def _do_freeze(self, message: wire.Message) -> None:
        """Ends every other process of the box, so that nothing writes to its files any more."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
        for job, started in self._jobs.values():
            self._ended(job, started, -signal.SIGKILL)
        self._jobs.clear()
        self._reply(message, {})

    def _do_quiesce(self, message: wire.Message) -> None:
        """Ends every process but those of the jobs to keep, and what these started.

        A job that has ended keeps nobody: its number may be another's by now.
        """
        wanted = message.header["keep"]
        processes.end_all_but({pid for pid, (job, _) in self._jobs.items() if job in wanted})
        self._reap()
        self._reply(message, {})

    # Files.

    def _do_read(self, message: wire.Message) -> None:
        with users.acting_as(self._find(message)):
            fd, size, data = files.read(message.header["path"], message.header["max_bytes"])
        try:
            if size <= files.MAX_INLINE:
                self._reply(message, {"size": size}, data)
            else:
                self._reply(message, {"size": size}, b"", (fd,))
        finally:
            os.close(fd)

    def _do_write(self, message: wire.Message) -> None:
        with users.acting_as(self._find(message)):
            source = message.fds[0] if message.fds else None
            files.write(message.header["path"], message.blob, source, message.header["mode"])
        self._reply(message, {})

    def _do_pack(self, message: wire.Message) -> None:
        header = message.header
        limits = header["max_bytes"], header["max_files"]
        self._in_child(message, lambda fd: files.pack(header["path"], fd, *limits))

    def _do_unpack(self, message: wire.Message) -> None:
        self._in_child(message, lambda fd: files.unpack(fd, message.header["path"]))

    def _in_child(self, message: wire.Message, work: Callable[[int], None]) -> None:
        """Long work on files, as the box's user, in a process of its own that answers by itself."""
        user = self._find(message)
        pid = os.fork()
        if pid:
            self._helpers[pid] = message.header["id"]
            return
        try:
            signal.set_wakeup_fd(-1)
            self._set_score(self._score + _OOM_SCORE)
            if user.uid:
                if self._ids > 1:
                    os.setgroups(user.groups)
                os.setresgid(user.gid, user.gid, user.gid)
                os.setresuid(user.uid, user.uid, user.uid)
            os.umask(0o22)
            work(message.fds[0])
            self._reply(message, {})
        except archive.TooMuch as error:
            self._reply(message, {"errno": errno.EFBIG, "text": str(error)})
        except OSError as error:
            self._reply(message, {"errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
        except Exception as error:
            self._reply(message, {"errno": errno.EIO, "text": repr(error)})
        finally:
            os._exit(0)

    # Network.

    def _do_listen(self, message: wire.Message) -> None:
        """A socket that listens on the box's own 127.0.0.1, for the host to accept on."""
        with socket.create_server(("127.0.0.1", message.header["port"]), backlog=128) as server:
            self._reply(message, {"port": server.getsockname()[1]}, b"", (server.fileno(),))
