"""The contract of a verifier: from a task and what the agent did to a score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import Isolation, Score, Trajectory

MAX_OUTPUT_CHARS = 4_000
"""Of what a verifier had to say a row keeps the end."""


class Verifier(Protocol):
    """Decides how good a result is. Built once per task from its `verifier` spec; keeps no state between calls."""

    @property
    def isolation(self) -> Isolation:
        """Where it runs. PURE verifiers get no sandbox.

        Others get one, unless they say `takes_sandbox = False`: they find themselves a clean place.
        """
        ...

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """Returns a finding. Raises VerifierError where it has none; any other error means the same."""
        ...


def kept_output(score: Score) -> str | None:
    """What a row keeps of it, as any UTF-8 column can hold it; None: it said nothing."""
    if not isinstance(score.output, str):  # a verifier of the user's own may say anything
        return None
    said = score.output.strip()
    kept = said if len(said) <= MAX_OUTPUT_CHARS else f"…{said[1 - MAX_OUTPUT_CHARS :]}"
    return kept.encode("utf-8", "replace").decode() or None


def takes_sandbox(verifier: Verifier) -> bool:
    """Whether `verify` wants a sandbox."""
    return verifier.isolation is not Isolation.PURE and getattr(verifier, "takes_sandbox", True)


def runs_code(verifier: Verifier) -> bool:
    """Whether it, or a part of it, runs Python code that the task brought along: its `runs_code`."""
    return any(getattr(part, "runs_code", False) for part in parts_of(verifier))


def parts_of(verifier: Verifier) -> Iterator[Verifier]:
    """It, and the verifiers that it is made of (its `parts`), and theirs."""
    yield verifier
    for part in getattr(verifier, "parts", ()):
        yield from parts_of(part)


def judges_of(verifier: Verifier) -> list[str | None]:
    """The judges that it may ask, by name; None stands for the run's only one."""
    return [part.judge for part in parts_of(verifier) if hasattr(part, "judge")]
