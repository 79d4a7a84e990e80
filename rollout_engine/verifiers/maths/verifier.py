"""The `math` verifier: compares the final answer with an expected expression, by the package math-verify.

    {"type": "math", "expected": "\\\\frac{1}{2}", "isolation": "pure", "limit_s": 10}

expected    LaTeX or plain; what the answer says last in \\boxed{}, as LaTeX, or as a number is compared with it
isolation   pure                 in processes of the host, at most one per core, without environment or privileges
            fresh or in_place    in a sandbox whose Python has math-verify
limit_s     of one comparison, seconds; a process that takes longer is killed

An answer without an expression is wrong: score 0. A comparison that takes too long or fails, an expected text without
an expression, and a missing package are no finding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rollout_engine.errors import (
    ExecTimeout,
    VerifierBadReturn,
    VerifierError,
    VerifierTimeout,
    VerifierUnavailable,
)
from rollout_engine.problems import checked
from rollout_engine.sandboxes import sandbox_spec
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Spec, Task
from rollout_engine.types import Isolation, Score, Trajectory
from rollout_engine.verifiers.maths.pool import missing, parse_line, source
from rollout_engine.verifiers.workshop import Workshop, a_core

MAX_ANSWER_CHARS = 10_000
"""Of a longer answer its end is looked at."""
SANDBOX_START_S = 60.0
"""Starting Python in a sandbox and importing sympy."""


class MathSpec(Spec):
    """The fields of a task's `verifier` of type math."""

    type: Literal["math"] = "math"
    expected: str | int | float
    isolation: Literal["pure", "fresh", "in_place"] = "pure"
    limit_s: float = Field(default=10.0, gt=0, le=600)


class Math:
    """Verifies by mathematical equality."""

    uses_workshop = True

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> None:
        """Raises InputError naming the field that cannot be used. Without a workshop it cannot judge."""
        self._spec = checked(MathSpec, spec, "verifier")
        self._limit_s = min(self._spec.limit_s, timeout_s)
        self._workshop = workshop
        self.isolation = Isolation(self._spec.isolation)

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        answer = trajectory.final_answer
        if answer is None or not answer.strip():
            return Score(0.0, False)
        expected, answer = str(self._spec.expected), answer[-MAX_ANSWER_CHARS:]
        if sandbox is not None:
            async with a_core(self._workshop):
                return self._score(await self._inside(task, sandbox, expected, answer))
        if self._workshop is None:
            raise VerifierUnavailable("there is no host whose processes could compare expressions")
        async with self._workshop.core():
            return self._score(await self._workshop.maths().compare(expected, answer, self._limit_s))

    async def _inside(self, task: Task, sandbox: Sandbox, expected: str, answer: str) -> dict[str, Any]:
        python, *_ = await (self._workshop or Workshop()).python(sandbox, sandbox_spec(task))
        request = {"expected": expected, "answer": answer, "limit_s": self._limit_s}
        argv, stdin = [python, "-I", "-c", source()], json.dumps(request).encode() + b"\n"
        try:
            result = await sandbox.exec(argv, stdin=stdin, timeout_s=self._limit_s + SANDBOX_START_S)
        except ExecTimeout as error:
            raise VerifierTimeout(f"the expressions were not compared within {self._limit_s:g} s") from error
        lines = result.stdout.splitlines()
        hello = parse_line(lines[0] if lines else b"")
        if "missing" in hello:
            fix = f"install math-verify for {python} in the task's image, directory or tar, or say isolation = pure"
            raise VerifierUnavailable(f"in the sandbox, {missing(hello['missing'], fix)}")
        if len(lines) < 2 and result.exit_code == -24:  # SIGXCPU: the program's own limit
            raise VerifierTimeout(f"the expressions were not compared within {self._limit_s:g} s of CPU time")
        return parse_line(lines[1] if len(lines) > 1 else b"")

    def _score(self, reply: dict[str, Any]) -> Score:
        if "failed" in reply:
            whose = "the expected expression" if reply.get("whose") == "expected" else "the comparison"
            raise VerifierError(f"{whose}: {reply['failed']!s:.500}")
        right = reply.get("right")
        if not isinstance(right, bool):
            raise VerifierBadReturn(f"what came back is no verdict: {reply!r:.200}")
        return Score(float(right), right)
