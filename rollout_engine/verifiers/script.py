"""The `script` verifier: a command in a sandbox, whose exit code or result file is the score.

    {"type": "script", "command": "sh /tests/test.sh", "files": {"/tests/test.sh": "..."}, "reward": "file"}

command      run by `sh -c` in the workspace
files        path -> text, put only into the verifier's sandbox; relative paths are in the workspace
reward       exit_code           0 is score 1, any other is score 0
             file                `reward.json` in `reward_dir` (a number, or an object of numbers with `reward` or
                                 `score`), else `reward.txt` (a number); the exit code does not matter
             file_or_exit_code   the exit code where there is neither file
reward_dir   emptied before; the command finds it in REWARD_DIR
isolation    fresh, snapshot or in_place
env, user    of the command

A command that cannot be run (126, 127), is killed, or leaves no or no usable result is no finding: the score is null.
"""

from __future__ import annotations

import posixpath
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollout_engine.disk import is_full
from rollout_engine.errors import ExecTimeout, SandboxUnavailable, VerifierBadReturn, VerifierError, VerifierTimeout
from rollout_engine.problems import checked
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import EnvironmentSpec, Spec, Task
from rollout_engine.types import ExecResult, Isolation, Score, Trajectory
from rollout_engine.verifiers.base import MAX_OUTPUT_CHARS
from rollout_engine.verifiers.reward import MAX_RESULT_BYTES, score_of_json, score_of_text
from rollout_engine.verifiers.workshop import Workshop, a_core

TAIL_BYTES = 1_200
"""Of a command's output, in the message of a verdict that could not be had."""
SAID_BYTES = 4 * MAX_OUTPUT_CHARS
"""Of each of its streams, beside a verdict."""

_EMPTY = """
set -e
owner=$1; shift
for folder; do
  above=$folder
  while [ -n "$above" ]; do
    if [ -L "$above" ]; then rm -f -- "$above"; fi
    case $above in */*) above=${above%/*} ;; *) above= ;; esac
  done
  rm -rf -- "$folder"
  mkdir -p -- "$folder"
  if [ -n "$owner" ]; then chown -- "$owner" "$folder"; fi
done
"""
"""Makes folders anew, and no link on the way to them survives: an agent may have prepared either."""

_SYSTEM = "bin boot dev etc home lib lib32 lib64 libx32 media mnt opt proc root run sbin srv sys tmp usr var"
"""Top folders that are more than a verifier's own."""


class ScriptSpec(Spec):
    """The fields of a task's `verifier` of type script."""

    type: Literal["script"] = "script"
    command: str = Field(min_length=1)
    files: dict[str, str] = Field(default_factory=dict)
    reward: Literal["exit_code", "file", "file_or_exit_code"] = "exit_code"
    reward_dir: str = "/logs/verifier"
    isolation: Literal["fresh", "snapshot", "in_place"] = "fresh"
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None


class Script:
    """Verifies what an agent left by one command."""

    uses_workshop = True

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> None:
        """Raises InputError naming the field that cannot be used."""
        self._spec = checked(ScriptSpec, spec, "verifier")
        self._workshop = workshop
        self._timeout_s = timeout_s
        self.isolation = Isolation(self._spec.isolation)

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        if sandbox is None:
            raise SandboxUnavailable("a script verifier needs a sandbox")
        workdir = (task.environment or EnvironmentSpec()).workdir
        folder = posixpath.normpath(posixpath.join(workdir, self._spec.reward_dir))
        if not sandbox.isolated and _within(folder, workdir):
            folder = posixpath.relpath(folder, workdir)  # its commands see the workspace at another place
        await self._make_room(sandbox, workdir, folder)
        for path, text in self._spec.files.items():
            await sandbox.write_file(path, text.encode(), mode=0o755 if text.startswith("#!") else 0o644)
        result = await self._run(sandbox, folder)
        if self._spec.reward == "exit_code":
            return _saying(result, _by_exit_code(result))
        score = await _by_file(sandbox, folder)
        if score is None and self._spec.reward == "file_or_exit_code":
            score = _by_exit_code(result)
        if score is None:
            raise VerifierBadReturn(f"no reward.json or reward.txt in {folder}; {_ending(result)}")
        return _saying(result, score)

    async def _make_room(self, sandbox: Sandbox, workdir: str, folder: str) -> None:
        """Empties, as root, the folders that are the verifier's: nothing that an agent left there counts."""
        own = {_top(path) for path in self._spec.files if path.startswith("/")} - {None, _top(workdir)}
        folders = [*(path for path in own if path is not None), *([folder] if self._spec.reward != "exit_code" else [])]
        outside = [path for path in (*self._spec.files, *folders) if not _within(path, workdir)]
        if outside and not sandbox.isolated:
            raise SandboxUnavailable(
                f"the verifier uses {outside[0]}, and this sandbox has no files of its own outside {workdir}; "
                "use an isolating sandbox, or name paths in the workspace (files, reward_dir)"
            )
        if folders:
            argv = ["sh", "-c", _EMPTY, "sh", self._spec.user or "", *folders]
            result = await sandbox.exec(argv, user="0" if sandbox.isolated else None, timeout_s=self._timeout_s)
            if not result.ok:
                raise VerifierError(f"cannot empty {', '.join(folders)}; {_ending(result)}")

    async def _run(self, sandbox: Sandbox, folder: str) -> ExecResult:
        env = {**_python_env(), **self._spec.env, "REWARD_DIR": folder}
        whole = "case $REWARD_DIR in /*) ;; *) REWARD_DIR=$PWD/$REWARD_DIR ;; esac\n"
        argv = ["sh", "-c", whole + self._spec.command]
        try:
            async with a_core(self._workshop):
                return await sandbox.exec(argv, env=env, user=self._spec.user, timeout_s=self._timeout_s)
        except ExecTimeout as error:
            raise VerifierTimeout(f"no verdict within {self._timeout_s:g} s; {_ending(error.partial)}") from error


def _python_env() -> dict[str, str]:
    """A Python that the command runs takes nothing from an agent's home, nor compiled code from its folders."""
    return {"PYTHONNOUSERSITE": "1", "PYTHONPYCACHEPREFIX": f"/tmp/pycache-{secrets.token_hex(8)}"}


def _within(path: str, workdir: str) -> bool:
    whole = posixpath.normpath(posixpath.join(workdir, path))
    return whole.startswith(posixpath.normpath(workdir).rstrip("/") + "/")


def _top(path: str) -> str | None:
    """The top folder of an absolute path where it can be the verifier's own."""
    first = posixpath.normpath(path).lstrip("/").split("/")[0]
    return None if not first or first in _SYSTEM.split() else f"/{first}"


def _by_exit_code(result: ExecResult) -> Score:
    if result.exit_code < 0 or result.exit_code in (126, 127):
        raise VerifierError(f"the command did not run to its end; {_ending(result)}")
    return Score(1.0, True) if result.ok else Score(0.0, False)


def _saying(result: ExecResult, score: Score) -> Score:
    """The score, with the end of what the command printed."""
    return replace(score, output=(result.stdout[-SAID_BYTES:] + result.stderr[-SAID_BYTES:]).decode(errors="replace"))


async def _by_file(sandbox: Sandbox, folder: str) -> Score | None:
    for name, parse in (("reward.json", score_of_json), ("reward.txt", score_of_text)):
        data = await _read(sandbox, posixpath.join(folder, name))
        if data is not None:
            return parse(data, name)
    return None


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    """A result file's content, None where there is none. Never through a link: `download` follows none."""
    with tempfile.TemporaryDirectory(prefix="rollout-result-") as directory:
        target = Path(directory) / "result"
        try:
            await sandbox.download(path, target, max_bytes=MAX_RESULT_BYTES)
            return target.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if is_full(error):
                raise
            raise VerifierBadReturn(f"{path} is no result file: {error}") from error


def _ending(result: ExecResult) -> str:
    output = (result.stdout + result.stderr)[-TAIL_BYTES:].decode(errors="replace").strip()
    how = "it was out of memory" if result.oom else f"exit code {result.exit_code}"
    return f"{how}, output: {output}" if output else f"{how}, no output"
