"""Verifiers made of others: hybrid and composite. What each part said is on record, and null is never 0.

make one T=tests/verifiers/test_combined.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.errors import InputError, SandboxDied, VerifierBadReturn, VerifierError, VerifierTimeout
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.tasks import check_task
from rollout_engine.types import Isolation, Score, Trajectory
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import takes_sandbox
from rollout_engine.verifiers.composite import weighted_mean
from tests.helpers import make_config

TASK = Task(task_id="t", prompt="p", verifier={"type": "match", "expected": ""})
ERRORS = {
    "VerifierError": VerifierError,
    "VerifierTimeout": VerifierTimeout,
    "SandboxDied": SandboxDied,
    "ValueError": ValueError,
    "SystemError": SystemError,
}
SAID = {"type": f"{__name__}:Says"}


class Says:
    """Gives a score, raises an error, or returns rubbish, as its spec says."""

    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        self._spec = spec

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        assert sandbox is None
        if "raises" in self._spec:
            raise ERRORS[self._spec["raises"]]("it broke")
        if "returns" in self._spec:
            return self._spec["returns"]
        return Score(self._spec["score"], self._spec.get("passed"), self._spec.get("components", {}))


def says(score: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {**SAID, "score": score, **fields}


def verdict(spec: dict[str, Any]) -> Score:
    return asyncio.run(make_verifier(spec).verify(TASK, Trajectory(final_answer="x"), None))


def hybrid(rule: dict[str, Any], judge: dict[str, Any]) -> dict[str, Any]:
    return {"type": "hybrid", "rule": rule, "judge": judge}


def composite(**components: Any) -> dict[str, Any]:
    return {"type": "composite", "components": components}


class TestHybrid:
    def test_a_right_answer_by_the_rule_asks_nobody(self) -> None:
        assert verdict(hybrid(says(1.0), says(raises="ValueError"))) == Score(1.0, True, {"rule": 1.0})

    def test_a_wrong_one_is_judged_and_both_are_on_record(self) -> None:
        score = verdict(hybrid(says(0.0, components={"a": 2.0}), says(0.7, passed=True)))
        assert score == Score(0.7, True, {"rule": 0.0, "rule.a": 2.0, "judge": 0.7})

    def test_the_rules_own_word_counts_more_than_its_number(self) -> None:
        assert verdict(hybrid(says(0.5, passed=True), says(0.0))).value == 0.5
        assert verdict(hybrid(says(1.0, passed=False), says(0.25))).value == 0.25

    @pytest.mark.parametrize(
        ("rule", "judge", "which"),
        [(says(raises="VerifierTimeout"), says(), "rule"), (says(0.0), says(raises="VerifierTimeout"), "judge")],
    )
    def test_a_part_without_a_finding_is_no_finding(self, rule: Any, judge: Any, which: str) -> None:
        with pytest.raises(VerifierTimeout, match=f"{which}: it broke"):
            verdict(hybrid(rule, judge))


class TestComposite:
    def test_the_weighted_mean_and_every_component(self) -> None:
        spec = composite(
            right={"verifier": says(1.0), "weight": 3},
            style={"verifier": says(0.0, components={"length": 9.0})},
            told={"verifier": says(-5.0), "weight": 0},
        )
        components = {"right": 1.0, "style": 0.0, "style.length": 9.0, "told": -5.0}
        assert verdict(spec) == Score(0.75, None, components)
        assert verdict({**spec, "pass_threshold": 0.7}).passed is True

    def test_a_part_without_a_finding_makes_the_whole_null_with_the_reason(self) -> None:
        with pytest.raises(VerifierTimeout, match="component b: it broke"):
            verdict(composite(a={"verifier": says(1.0)}, b={"verifier": says(raises="VerifierTimeout")}))

    @pytest.mark.parametrize("broken", [{"raises": "VerifierError"}, {"raises": "ValueError"}, {"returns": 1.0}])
    def test_an_optional_one_is_left_out(self, broken: dict[str, Any]) -> None:
        spec = composite(a={"verifier": says(0.5)}, b={"verifier": {**SAID, **broken}, "weight": 9, "optional": True})
        assert verdict(spec) == Score(0.5, None, {"a": 0.5})

    def test_nothing_but_optional_ones_without_a_finding_is_no_finding(self) -> None:
        with pytest.raises(VerifierError, match="component a: it broke"):
            verdict(composite(a={"verifier": says(raises="VerifierError"), "optional": True}))
        broken = {"verifier": says(raises="VerifierError"), "optional": True}
        with pytest.raises(VerifierError, match="no component that has a weight"):
            verdict(composite(a=broken, told={"verifier": says(1.0), "weight": 0}))

    def test_infrastructure_is_never_left_out(self) -> None:
        with pytest.raises(SandboxDied):
            verdict(composite(a={"verifier": says()}, b={"verifier": says(raises="SandboxDied"), "optional": True}))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
    def test_what_is_no_finite_score_is_none(self, value: Any) -> None:
        spec = composite(a={"verifier": {**SAID, "returns": Score(value) if value is not True else value}})
        with pytest.raises(VerifierBadReturn, match="component a"):
            verdict(spec)

    @given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e6)), min_size=1))
    def test_the_mean_lies_between_its_parts(self, parts: dict[str, tuple[float, float]]) -> None:
        values, weights = {n: v for n, (v, _) in parts.items()}, {n: w for n, (_, w) in parts.items()}
        mean = weighted_mean(values, weights)
        counted = [values[name] for name in parts if weights[name] > 0]
        assert (mean is None) == (not counted)
        assert mean is None or min(counted) <= mean <= max(counted)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (composite(), r"verifier\.components"),
        (composite(a={"verifier": says(), "weight": 0}), r"all weights are 0"),
        (composite(a={"verifier": says(), "weight": -1}), r"verifier\.components\.a\.weight"),
        (composite(a={"verifier": says(), "weight": float("nan")}), r"verifier\.components\.a\.weight"),
        (composite(**{"a b": {"verifier": says()}}), r"no name of a component"),
        (composite(a={"verifier": {"type": "match"}}), r"verifier\.components\.a\.verifier\.expected"),
        (composite(a={"verifier": {"type": "mathc"}}), r"verifier\.components\.a\.verifier\.type: unknown"),
        (composite(a={}), r"verifier\.components\.a\.verifier"),
        (hybrid({"type": "match", "expected": "("}, {}), r"verifier\.judge\.type"),
        ({"type": "hybrid", "rule": says()}, r"verifier\.judge"),
        (hybrid(says(), composite(a={"verifier": {"type": "match"}})), r"judge\.components\.a\.verifier"),
        (
            hybrid(
                {"type": "script", "command": "true"}, {"type": "script", "command": "true", "isolation": "in_place"}
            ),
            "different isolations: fresh, in_place",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_by_its_place(spec: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError, match=where):
        make_verifier(spec)


def test_verifiers_are_not_nested_without_end() -> None:
    spec: dict[str, Any] = says()
    for _ in range(60):
        spec = hybrid(spec, says())
    with pytest.raises(InputError, match="nested more than"):
        make_verifier(spec)


@pytest.mark.parametrize("spec", [hybrid(says(), says()), composite(a={"verifier": hybrid(says(), says())})])
def test_code_of_the_hosts_must_be_trusted_wherever_it_stands(spec: dict[str, Any]) -> None:
    task = Task(prompt="p", verifier=spec)
    with pytest.raises(InputError, match=r"verifier\..*rule\.type.*not trusted"):
        check_task(task, make_config())
    check_task(task, make_config(trusted_code=[f"{__name__}:*"]))


async def test_parts_share_one_sandbox_and_only_those_that_want_it_get_it(provider: SandboxProvider) -> None:
    spec = composite(
        first={"verifier": {"type": "script", "command": "test ! -e seen && touch seen"}},
        then={"verifier": {"type": "script", "command": "test -e seen"}},
        pure={"verifier": says(1.0)},
    )
    verifier = make_verifier(spec)
    assert takes_sandbox(verifier)
    assert verifier.isolation is Isolation.FRESH
    box = await provider.open(SandboxSpec())
    try:
        score = await verifier.verify(TASK, Trajectory(final_answer="x"), box)
    finally:
        await box.close()
    assert score == Score(1.0, None, {"first": 1.0, "then": 1.0, "pure": 1.0})
