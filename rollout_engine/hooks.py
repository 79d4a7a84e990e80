"""Optional hooks of agents and verifiers, each apart from the others, and each in bounded time.

    async def setup(self, task, sandbox)      before it works on a rollout; where one fails the work is not begun
    async def cleanup(self, task, sandbox)    after it, however it ended, and while the sandbox is still there
    async def teardown(self)                  once, when its host needs it no more

All three are optional. Where several are due (a verifier made of others has theirs), all run at the same time: one
that raises or hangs keeps none of the others from running. A hook that blocks the event loop itself cannot be ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from rollout_engine.errors import InfraError, RolloutEngineError, describe

T = TypeVar("T")
Note: TypeAlias = Callable[[str], None]
"""Records what a hook did wrong."""

SETUP_S = 60.0
CLEANUP_S = 10.0
TEARDOWN_S = 20.0
"""The longest that a hook of the kind may take; seconds."""
MAX_ERRORS = 16
"""Errors of hooks that one row keeps."""


def noting(errors: list[str]) -> Note:
    """Appends to a row's `hook_errors`, up to MAX_ERRORS."""
    return lambda text: errors.append(text) if len(errors) < MAX_ERRORS else None


def has_hook(owner: Any, *names: str) -> bool:
    """Whether it, or a part of it, has one of the hooks."""
    for name in names:
        if callable(getattr(owner, name, None)):
            return True
    parts = getattr(owner, "parts", ())
    return bool(parts) and any(has_hook(part, *names) for part in parts)


def with_hooks(
    work: Callable[[], Awaitable[T]],
    owner: Any,
    task: Any,
    sandbox: Any,
    errors: list[str],
    close_s: float,
    failed: type[RolloutEngineError],
    late: type[RolloutEngineError],
) -> Awaitable[T]:
    """`hooked`, where the owner has a setup or a cleanup; `errors` are its row's, a cleanup has half of `close_s`."""
    if not has_hook(owner, "setup", "cleanup"):
        return work()  # as for nearly every rollout there is
    note = noting(errors)
    return hooked(work, owner, task, sandbox, note=note, failed=failed, late=late, cleanup_s=close_s / 2)


async def hooked(
    work: Callable[[], Awaitable[T]],
    owner: Any,
    *given: Any,
    note: Note,
    failed: type[RolloutEngineError],
    late: type[RolloutEngineError],
    cleanup_s: float = math.inf,
) -> T:
    """The owner's `setup`, the work, and its `cleanup`, also where the setup failed or the work was cancelled.

    Raises `failed`, or `late` where it was time that ran out, for a setup; an InfraError passes as it is. What goes
    wrong is noted either way, and a cleanup never raises. `cleanup_s`: of a cleanup, where less than CLEANUP_S is left.
    """
    try:
        for error in await _run([owner], "setup", given, SETUP_S, note):
            if isinstance(error, InfraError):
                raise error
            kind = late if isinstance(error, _Late) else failed
            raise kind(f"setup of {type(owner).__name__}: {describe(error)}") from error
        return await work()
    finally:
        await _run([owner], "cleanup", given, min(CLEANUP_S, cleanup_s), note, shielded=True)


async def tear_down(owners: Iterable[Any], note: Note) -> None:
    """The `teardown` of each, also under cancellation."""
    await _run(list(owners), "teardown", (), TEARDOWN_S, note, shielded=True)


class _Late(Exception):
    """A hook did not end in its time."""


def _hooks(owners: Sequence[Any], name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(what it is called in errors, the hook), of the owners and of their `parts`."""
    for each in owners:
        hook = getattr(each, name, None)
        if callable(hook):
            yield f"{type(each).__name__}.{name}", hook
        yield from _hooks(getattr(each, "parts", ()), name)


async def _run(
    owners: Sequence[Any], name: str, given: tuple[Any, ...], seconds: float, note: Note, *, shielded: bool = False
) -> list[BaseException]:
    """Runs all hooks of a name for at most so long. What went wrong; shielded: a cancellation waits for their end."""
    found = list(_hooks(owners, name))
    if not found:
        return []
    tasks = [asyncio.ensure_future(_call(hook, given)) for _, hook in found]
    cancelled = await _settle(tasks, seconds, shielded)
    errors: list[BaseException] = []
    for (what, _), task in zip(found, tasks, strict=True):
        error = task.result() if task.done() and not task.cancelled() else _Late(f"did not end within {seconds:g} s")
        if error is not None:
            errors.append(error)
            kind = "" if isinstance(error, _Late) else f"{type(error).__name__}: "
            note(f"{what}: {kind}{describe(error)}")
    if cancelled:
        raise asyncio.CancelledError
    return errors


async def _settle(tasks: Collection[asyncio.Future[Any]], seconds: float, shielded: bool) -> bool:
    """Waits for all, ends those that are late, and says whether it was cancelled meanwhile."""
    clock = asyncio.get_running_loop().time
    ends, cancelled = clock() + seconds, False
    try:
        while any(not task.done() for task in tasks) and (left := ends - clock()) > 0:
            try:
                await asyncio.wait(tasks, timeout=left)
            except asyncio.CancelledError:
                if not shielded:
                    raise
                cancelled = True
    finally:
        for task in tasks:
            task.cancel()
    return cancelled


async def _call(hook: Callable[..., Any], given: tuple[Any, ...]) -> BaseException | None:
    """What it raised. A SystemExit that left its task would end the host's loop."""
    try:
        await hook(*given)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return error
    return None
