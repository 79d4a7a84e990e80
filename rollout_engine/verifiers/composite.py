"""The `composite` verifier: the weighted mean of several verifiers, each of them in score_components.

    {"type": "composite", "components": {"right": {"verifier": {"type": "match", "expected": "42"}, "weight": 3},
                                         "style": {"verifier": {"type": "judge"}, "optional": true}}}

weight     at least 0, and some of them above (default 1); one of weight 0 is only reported
optional   where it comes to no finding it is left out, and the mean is that of the others; without it one component
           that comes to no finding is no finding of the whole
pass_threshold   the mean from which it is a pass; default: the run's

Components run one after the other, in the order written, in one sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rollout_engine.errors import InfraError, InputError, VerifierError, describe
from rollout_engine.problems import checked
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Spec, Task
from rollout_engine.types import Score, Trajectory
from rollout_engine.verifiers.base import Verifier
from rollout_engine.verifiers.parts import common_place, make_part, named, outputs, run_part, saying
from rollout_engine.verifiers.workshop import Workshop

MAX_COMPONENTS = 32


class ComponentSpec(Spec):
    """One component."""

    verifier: dict[str, Any]
    weight: float = Field(default=1.0, ge=0, le=1e6, allow_inf_nan=False)
    optional: bool = False


class CompositeSpec(Spec):
    """The fields of a task's `verifier` of type composite."""

    type: Literal["composite"] = "composite"
    components: dict[str, ComponentSpec] = Field(min_length=1, max_length=MAX_COMPONENTS)
    pass_threshold: float | None = Field(default=None, allow_inf_nan=False)


class Composite:
    """Weighs the findings of its parts."""

    uses_workshop = True

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> None:
        """Raises InputError naming the field that cannot be used."""
        self._spec = checked(CompositeSpec, spec, "verifier")
        _check(self._spec.components)
        self._parts: dict[str, Verifier] = {
            name: make_part(each.verifier, f"verifier.components.{name}.verifier", timeout_s, workshop)
            for name, each in self._spec.components.items()
        }
        self.parts = tuple(self._parts.values())
        self.isolation, self.takes_sandbox = common_place(self.parts, "verifier.components")

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        found: dict[str, Score] = {}
        missing: list[str] = []
        for name, part in self._parts.items():
            try:
                with saying(f"component {name}"):
                    found[name] = await run_part(part, task, trajectory, sandbox)
            except InfraError:
                raise
            except Exception as error:
                if not self._spec.components[name].optional:
                    raise
                missing.append(describe(error))
        weights = {name: each.weight for name, each in self._spec.components.items()}
        value = weighted_mean({name: score.value for name, score in found.items()}, weights)
        if value is None:
            raise VerifierError(f"no component that has a weight came to a finding: {'; '.join(missing)}")
        passed = None if self._spec.pass_threshold is None else value >= self._spec.pass_threshold
        components = {key: part for name, score in found.items() for key, part in named(name, score).items()}
        return Score(value, passed, components, outputs(found))


def weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The mean of the values that are there, between the least and the greatest; None where none has a weight."""
    counted = [(weights[name], value) for name, value in values.items() if weights[name] > 0]
    if not counted:
        return None
    total = sum(weight for weight, _ in counted)
    mean = sum(weight / total * value for weight, value in counted)
    return min(max(mean, min(value for _, value in counted)), max(value for _, value in counted))


def _check(components: Mapping[str, ComponentSpec]) -> None:
    for name in components:
        if not name.isidentifier():
            raise InputError(
                f"{name!r} is no name of a component", "verifier.components", "letters, digits and _, not a digit first"
            )
    if not any(each.weight for each in components.values()):
        raise InputError("all weights are 0", "verifier.components", "give at least one component a weight above 0")
