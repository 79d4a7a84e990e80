"""Verifiers that are made of other verifiers: how parts are made, found, and run in the one place that all share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollout_engine.errors import InfraError, InputError, VerifierBadReturn, VerifierError, describe
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import Isolation, Score, Trajectory
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import Verifier, kept_output, takes_sandbox
from rollout_engine.verifiers.nesting import MAX_DEPTH, is_deeper
from rollout_engine.verifiers.reward import components, finite
from rollout_engine.verifiers.workshop import Workshop

PASS = 1.0
"""A part's score from which it has passed where it does not say so itself."""


def make_part(spec: Any, where: str, timeout_s: float, workshop: Workshop | None) -> Verifier:
    """The verifier that stands at `where` of a task's verifier. Raises InputError that names the place."""
    if not isinstance(spec, Mapping):
        raise InputError(f"must be an object, found {spec!r:.60}", where, 'describe a verifier: {"type": ...}')
    if is_deeper(spec, MAX_DEPTH):
        raise InputError(f"verifiers are nested more than {MAX_DEPTH} deep", where, "make it flatter")
    try:
        return make_verifier(spec, timeout_s=timeout_s, workshop=workshop)
    except InputError as error:
        raise InputError(error.message, where + error.where.removeprefix("verifier"), error.fix) from error


def common_place(parts: Sequence[Verifier], where: str) -> tuple[Isolation, bool]:
    """(isolation, whether a sandbox is needed) of all parts together: they share one sandbox, in their order."""
    sandboxed = {part.isolation for part in parts if takes_sandbox(part)}
    if len(sandboxed) > 1:
        kinds = ", ".join(sorted(kind.value for kind in sandboxed))
        raise InputError(f"its parts want different isolations: {kinds}", where, "give all parts the same isolation")
    if sandboxed:
        return sandboxed.pop(), True
    apart = any(part.isolation is not Isolation.PURE for part in parts)
    return (Isolation.FRESH if apart else Isolation.PURE), False


async def run_part(part: Verifier, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
    """The part's finding; it gets the sandbox only where it wants one."""
    score = await part.verify(task, trajectory, sandbox if takes_sandbox(part) else None)
    return check_score(score)


def check_score(score: Score) -> Score:
    """Raises VerifierBadReturn where a part returned no finite score."""
    if not isinstance(score, Score) or not isinstance(score.passed, bool | None):
        raise VerifierBadReturn(f"it returned {score!r:.200}, not a Score")
    parts = components(dict(score.components), "the score")
    return Score(finite(score.value, "the score"), score.passed, parts, kept_output(score) or "")


def has_passed(score: Score) -> bool:
    """By its own word, else by its value."""
    return score.passed if score.passed is not None else score.value >= PASS


def named(name: str, score: Score) -> dict[str, float]:
    """A part's score and components as components of the whole: `name`, `name.component`."""
    return {name: score.value, **{f"{name}.{inner}": value for inner, value in score.components.items()}}


def outputs(scores: Mapping[str, Score]) -> str:
    """What the parts had to say, each under its name."""
    return "\n".join(f"[{name}] {score.output}" for name, score in scores.items() if score.output)


@contextmanager
def saying(which: str) -> Iterator[None]:
    """Names the part that came to no finding, and keeps the kind of its error; infrastructure passes as it is."""
    try:
        yield
    except VerifierError as error:
        raise type(error)(f"{which}: {describe(error)}") from error
    except InfraError:
        raise
    except Exception as error:
        raise VerifierError(f"{which}: {type(error).__name__}: {describe(error)}") from error
