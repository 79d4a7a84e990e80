"""The `hybrid` verifier: a cheap rule first, and a judge only where the rule says wrong.

    {"type": "hybrid", "rule": {"type": "math", "expected": "1/2"}, "judge": {"type": "judge", "expected": "1/2"}}

rule, judge   any verifiers. The score is the rule's where it passed, else the judge's. Both are in
              score_components, as `rule` and, where it was asked, `judge`. One that comes to no finding is no finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollout_engine.problems import checked
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Spec, Task
from rollout_engine.types import Score, Trajectory
from rollout_engine.verifiers.parts import common_place, has_passed, make_part, named, outputs, run_part, saying
from rollout_engine.verifiers.workshop import Workshop


class HybridSpec(Spec):
    """The fields of a task's `verifier` of type hybrid."""

    type: Literal["hybrid"] = "hybrid"
    rule: dict[str, Any]
    judge: dict[str, Any]


class Hybrid:
    """Asks the second of two verifiers about what the first one rejects."""

    uses_workshop = True

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> None:
        """Raises InputError naming the field that cannot be used."""
        fields = checked(HybridSpec, spec, "verifier")
        self._rule = make_part(fields.rule, "verifier.rule", timeout_s, workshop)
        self._second = make_part(fields.judge, "verifier.judge", timeout_s, workshop)
        self.parts = (self._rule, self._second)
        self.isolation, self.takes_sandbox = common_place(self.parts, "verifier")

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        with saying("rule"):
            first = await run_part(self._rule, task, trajectory, sandbox)
        components = named("rule", first)
        if has_passed(first):
            return Score(first.value, True, components, outputs({"rule": first}))
        with saying("judge"):
            second = await run_part(self._second, task, trajectory, sandbox)
        components |= named("judge", second)
        return Score(second.value, second.passed, components, outputs({"rule": first, "judge": second}))
