"""Commands by the Engine's own exec: works with every daemon, needs `/bin/sh` in the image.

What the Engine cannot tell: an exit code of 128 + n from a signal n. Where a background child holds the output
open, it reports the end two seconds late. A command that kills everything ends the sandbox.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxError, SandboxStartError
from rollout_engine.sandboxes.docker import files
from rollout_engine.sandboxes.docker.capture import Tail
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, translate
from rollout_engine.sandboxes.docker.hijack import Hijacked, HijackRefused
from rollout_engine.sandboxes.docker.plain_command import PlainRunning, PlainTalk, Refused, RefusedTalk
from rollout_engine.sandboxes.docker.running import Command, Running, Talk

T = TypeVar("T")

# The first line of stderr is the pid inside, which the API does not tell and a kill needs; exec keeps it.
_HEADED = ["/bin/sh", "-c", 'echo $$ >&2; exec "$@"', "sh"]
_OOM_COUNTS = "echo ran; cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
_PATHS_AT_ONCE = 200
_QUIESCE = r"""
spared() { # whose session, or whose parent's, is kept; the container's own two processes; this shell
  p=$1; turn=0
  while [ "$p" -gt 1 ] && [ $turn -lt 50 ]; do
    [ "$p" = $$ ] && return 0
    IFS= read -r line < /proc/$p/stat || return 0
    set -- ${line##*)}
    case "$1" in Z|X) return 0;; esac
    [ "$2" = 1 ] && [ "$4" = 1 ] && return 0
    case "$kept" in *" $4 "*) return 0;; esac
    p=$2; turn=$((turn + 1))
  done
  return 1
}
round=0
while [ $round -lt 200 ]; do
  left=0
  for folder in /proc/[0-9]*; do
    [ ${folder#/proc/} = 1 ] || spared ${folder#/proc/} || { left=1; kill -9 ${folder#/proc/}; }
  done
  [ $left = 0 ] && echo done && exit
  round=$((round + 1))
done 2>/dev/null
"""


class PlainExecutor:
    """Runs each command by exec create, start and inspect."""

    def __init__(self, engine: Engine, container: str, name: str, user: str) -> None:
        self._engine, self._container, self.name, self._user = engine, container, name, user
        self._kernel_kills = 0
        self.oom_kills = 0

    async def spawn(self, command: Command) -> Running:
        if any("\0" in part for part in command.argv):
            return Refused("an argument with a null byte")
        exec_id = await self._create([*_HEADED, *command.argv], command, stdin=command.stdin is not None)
        running = PlainRunning(self, exec_id, await self._start(exec_id))
        if command.stdin is not None:
            running.feed(command.stdin)
        return running

    async def connect(self, command: Command) -> Talk:
        if any("\0" in part for part in command.argv):
            return RefusedTalk("an argument with a null byte")
        exec_id = await self._create([*_HEADED, *command.argv], command, stdin=True)
        return PlainTalk(self, exec_id, await self._start(exec_id))

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self._call("read", lambda api: files.read(api, self._container, path, max_bytes))

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is held between commands."""

    async def cut(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _PATHS_AT_ONCE):
            script = "rm -rf -- " + shlex.join(paths[start : start + _PATHS_AT_ONCE])
            if await self._ask(f"{script} && echo done") != b"done\n":
                raise SandboxStartError(f"docker: {self.name}: its layers' paths could not be removed")

    async def quiesce(self, keep: Sequence[Running]) -> None:
        """By a shell in the container: less certain than the supervisor, as what runs there may get in its way."""
        kept = [str(running.pid) for running in keep if isinstance(running, PlainRunning) and running.ending() is None]
        script = f"kept=' {' '.join(kept)} '\n{_QUIESCE}"
        if await self._ask(script) != b"done\n":
            raise SandboxError(f"docker: {self.name}: not every process could be ended")

    async def freeze(self) -> None:
        await self._call("kill", lambda api: api.kill(self._container))

    async def kill_group(self, pid: int) -> None:
        await self._ask(f"kill -9 -{pid}")

    async def was_oom(self) -> bool:
        """Whether the kernel killed for memory since this was last asked; asked only after a SIGKILL.

        Raises SandboxDied where nothing runs any more: the kill was the whole container's, and the daemon is late.
        """
        text = await self._ask(_OOM_COUNTS)
        if not text.startswith(b"ran\n"):
            raise died(self.name, "its container was killed")
        kills = sum(int(count) for count in re.findall(rb"^oom_kill (\d+)$", text, re.MULTILINE))
        known, self._kernel_kills = self._kernel_kills, kills
        self.oom_kills += kills > known
        return kills > known

    async def _ask(self, script: str) -> bytes:
        """A command of ours, as root; its output."""
        order = ["/bin/sh", "-c", script]
        exec_id = await self._create(order, Command(order, "/", user="0"))
        stream = await self._start(exec_id)
        said = Tail()
        try:
            while (frame := await stream.frame()) is not None:
                said.append(frame[1])
        finally:
            stream.close()
        return said.value()

    async def inspect(self, exec_id: str) -> dict[str, Any]:
        return await self._call("inspect exec", lambda api: api.exec_inspect(exec_id))

    async def state(self) -> dict[str, Any]:
        found = await self._call("inspect", lambda api: api.inspect_container(self._container))
        state: dict[str, Any] = found["State"]
        return state

    async def _create(self, argv: list[str], command: Command, *, stdin: bool = False) -> str:
        def create(api: APIClient) -> dict[str, Any]:
            return api.exec_create(
                self._container,
                argv,
                stdin=stdin,
                environment=dict(command.env),
                workdir=command.cwd,
                user=command.user or self._user,
            )

        made: str = (await self._call("create exec", create))["Id"]
        return made

    async def _start(self, exec_id: str) -> Hijacked:
        try:
            return await self._engine.hijack(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
        except HijackRefused as error:
            state = await self.state()
            if not state["Running"]:
                raise died(self.name, f"its container is {state['Status']}") from error
            raise

    async def _call(self, what: str, function: Callable[[APIClient], T]) -> T:
        try:
            return await self._engine.call(what, function)
        except NotFound as error:
            raise died(self.name) from error
        except APIError as error:
            if error.status_code == 409:
                raise died(self.name, "its container does not run") from error
            raise translate(error, what) from error
