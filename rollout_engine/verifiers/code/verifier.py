"""The `code` verifier: runs a task's own Python function where neither it nor the agent can do harm.

    {"type": "code", "code": "def verify(env, final_answer=None, conversation=None): ...", "isolation": "fresh"}

code          `[async] def verify` or `validate_task`, else the last function at the top that takes `env`; it returns a
              number, a bool, or {"score": ..., "components": {...}}, and anything else is no verdict
isolation     fresh, snapshot or in_place: where code that reads `env` runs. Code that does not is a pure function,
              and is judged in a box of its own, apart from every sandbox (recorded as fresh)
score_range   [lowest, highest]: a score outside is no verdict; it is never clipped
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from rollout_engine.errors import ExecTimeout, SandboxUnavailable, VerifierBadReturn, VerifierError, VerifierTimeout
from rollout_engine.problems import checked
from rollout_engine.sandboxes import sandbox_spec
from rollout_engine.sandboxes.base import RunsPython, Sandbox, SandboxSpec
from rollout_engine.specs import Spec, Task
from rollout_engine.types import ExecResult, Isolation, Score, Trajectory
from rollout_engine.verifiers.code.program import marshalled, program
from rollout_engine.verifiers.code.source import parse as parse_code
from rollout_engine.verifiers.reply import parse_reply
from rollout_engine.verifiers.reward import components, finite
from rollout_engine.verifiers.workshop import Workshop, a_core, check_trust

OUTPUT_CHARS = 600
"""Of what the code printed, in the message of a verdict that could not be had."""


class CodeSpec(Spec):
    """The fields of a task's `verifier` of type code."""

    type: Literal["code"] = "code"
    code: str = Field(min_length=1)
    isolation: Literal["fresh", "snapshot", "in_place"] = "fresh"
    score_range: tuple[float, float] | None = None

    @field_validator("score_range")
    @classmethod
    def _not_empty(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and not given[0] < given[1]:
            raise ValueError(f"the range {list(given)} is empty: give the lowest score, then the highest")
        return given


class Code:
    """Verifies by one task's own code."""

    uses_workshop = True
    runs_code = True

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> None:
        """Raises InputError about code that can never come to a verdict. Without a workshop it cannot judge."""
        self._spec = checked(CodeSpec, spec, "verifier")
        self._source = parse_code(self._spec.code)
        self._timeout_s = timeout_s
        self._workshop = workshop
        self.takes_sandbox = self._source.uses_env
        self.isolation = Isolation(self._spec.isolation) if self.takes_sandbox else Isolation.FRESH

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        request = {
            "code": self._spec.code,
            "final_answer": trajectory.final_answer,
            "conversation": trajectory.messages or task.messages(),
        }
        if sandbox is None:
            return self._score(await self._apart(task, request))
        spec = sandbox_spec(task)
        check_trust(sandbox, spec)
        return self._score(await self._inside(sandbox, request, spec))

    async def _apart(self, task: Task, request: dict[str, Any]) -> dict[str, Any]:
        """A pure function's verdict: warm where that works, else in a sandbox that is opened for it."""
        if self._source.uses_env or self._workshop is None:
            raise SandboxUnavailable("the code reads `env`, and there is no sandbox for it")
        warm = await self._workshop.warm()
        if warm is not None:
            async with self._workshop.core():
                return await warm.judge(request, self._timeout_s)
        spec = sandbox_spec(task)
        sandbox = await self._workshop.open(spec)
        try:
            return await self._inside(sandbox, request, spec)
        finally:
            await sandbox.close()

    async def _inside(self, sandbox: Sandbox, request: dict[str, Any], spec: SandboxSpec) -> dict[str, Any]:
        """The verdict of a process of its own in a sandbox, given by its standard output alone."""
        workdir = spec.workdir if sandbox.isolated else "."  # else it is at another place, where commands start
        # Through JSON first, as nothing but plain values can be marshalled; version 2 is read by every Python 3.
        stdin = marshal.dumps(json.loads(json.dumps({**request, "workdir": workdir})), 2)
        try:
            async with a_core(self._workshop):
                result = await self._run(sandbox, spec, stdin)
        except ExecTimeout as error:
            output = _tail(error.partial)
            raise VerifierTimeout(f"the code did not end within {self._timeout_s:g} s{output}") from error
        if not result.stdout:
            how = "it was out of memory" if result.oom else f"exit code {result.exit_code}"
            raise VerifierError(f"the code ended without a verdict ({how}): it must return, not exit{_tail(result)}")
        return {"output": result.stderr.decode(errors="replace"), **parse_reply(result.stdout)}

    async def _run(self, sandbox: Sandbox, spec: SandboxSpec, stdin: bytes) -> ExecResult:
        """In a fork of what is there already, where that has all that the code names; else by a fresh interpreter."""
        uses_env, imports = self._source.uses_env, self._source.imports
        offered = sandbox.python_modules if isinstance(sandbox, RunsPython) else None
        if isinstance(sandbox, RunsPython) and imports is not None and offered is not None and imports <= offered:
            return await sandbox.run_python(marshalled(uses_env=uses_env), stdin=stdin, timeout_s=self._timeout_s)
        python = await (self._workshop or Workshop()).python(sandbox, spec)
        return await sandbox.exec([*python, "-c", program(uses_env=uses_env)], stdin=stdin, timeout_s=self._timeout_s)

    def _score(self, verdict: dict[str, Any]) -> Score:
        """The verdict as a score; nothing that came out of a sandbox is taken for granted."""
        failed, output = verdict.get("failed"), str(verdict.get("output") or "")[-OUTPUT_CHARS:].strip()
        if failed is not None:
            message = str(verdict.get("text")) + (f"\nit printed: {output}" if output else "")
            raise VerifierBadReturn(message) if failed == "returned" else VerifierError(message)
        parts, passed = verdict.get("components") or {}, verdict.get("passed")
        if not isinstance(parts, dict) or not isinstance(passed, bool | None):
            raise VerifierBadReturn(f"what came back is no verdict: {verdict!r:.200}")
        score = finite(verdict.get("score"), "the score")
        if self._spec.score_range is not None:
            low, high = self._spec.score_range
            if not low <= score <= high:
                raise VerifierBadReturn(f"the score {score:g} is not within the declared {low:g} to {high:g}")
        return Score(score, passed, components(parts, "the verdict"), output)


def _tail(result: ExecResult) -> str:
    text = result.stderr[-OUTPUT_CHARS:].decode(errors="replace").strip()
    return f"\nit printed: {text}" if text else ""
