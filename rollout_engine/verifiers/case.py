"""What a verifier may ask for while it judges a rollout: the judges of the run's config. Ambient, as `waiting` is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from rollout_engine.config import JudgeSpec
from rollout_engine.errors import VerifierUnavailable
from rollout_engine.types import Completion, Message


class BoundJudge(Protocol):
    """A judge as one verdict sees it: within the run's budgets and the rollout's deadline, counted in its row."""

    @property
    def judge(self) -> JudgeSpec: ...

    async def complete(self, messages: Sequence[Message]) -> Completion:
        """One call. Raises ModelError."""
        ...


FindJudge: TypeAlias = Callable[[str | None], BoundJudge]
"""The judge of a name, or the only one. Raises VerifierUnavailable."""


def _nobody(name: str | None) -> BoundJudge:
    raise VerifierUnavailable("a judge is asked only within a rollout, and this is none")


_find: ContextVar[FindJudge] = ContextVar("judges", default=_nobody)


def enter_case(find: FindJudge) -> None:
    """From here on, this task's verifiers ask these judges."""
    _find.set(find)


def find_judge(name: str | None) -> BoundJudge:
    """Raises VerifierUnavailable where the run has no such judge."""
    return _find.get()(name)
