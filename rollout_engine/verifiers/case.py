"""What a verifier has of the rollout that it judges: the judges of the run's config, and its limit. Ambient."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
_limit: ContextVar[asyncio.Timeout | None] = ContextVar("verdict_limit", default=None)


def enter_case(find: FindJudge, limit: asyncio.Timeout | None = None) -> None:
    """From here on, this task's verifiers ask these judges, and have until this limit, if there is one."""
    _find.set(find)
    _limit.set(limit)


def leave_case() -> None:
    """The verdict is over. Its limit holds its task, whose context would hold it: neither would ever be freed."""
    _limit.set(None)


def find_judge(name: str | None) -> BoundJudge:
    """Raises VerifierUnavailable where the run has no such judge."""
    return _find.get()(name)


@contextmanager
def off_the_clock() -> Iterator[None]:
    """A wait for others' sake: it does not count against the verdict's limit, only against the whole rollout's."""
    limit = _limit.get()
    ends = limit.when() if limit is not None else None
    if limit is None or ends is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    left = ends - clock()
    with suppress(RuntimeError):  # it is over: a task of the verifier's has outlived it
        limit.reschedule(None)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            limit.reschedule(clock() + left)
