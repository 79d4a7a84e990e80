"""Verifies one rollout: its verifier judges what the agent left, in the isolation that it asks for, and is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rollout_engine.bound import BoundJudge
from rollout_engine.disk import on_some_disk
from rollout_engine.errors import (
    InfraError,
    SandboxAway,
    SandboxError,
    SandboxOutOfMemory,
    SandboxStartError,
    VerifierBadReturn,
    VerifierError,
    VerifierTimeout,
    VerifierUnavailable,
    failure_of,
    forget_frames,
)
from rollout_engine.hooks import with_hooks
from rollout_engine.phases import asked_to_end
from rollout_engine.prepare import PreparedTask
from rollout_engine.resources import Resources
from rollout_engine.sandboxes.base import SNAPSHOT, Sandbox
from rollout_engine.teardown import Kept, Owned
from rollout_engine.types import Boundary, CallContext, CallGate, Isolation, RolloutRecord, Score, Trajectory
from rollout_engine.verifiers.base import kept_output, takes_sandbox
from rollout_engine.verifiers.case import enter_case, leave_case
from rollout_engine.waiting import Cell

VERIFY_TRIES = 3
"""Sandboxes that a verification is tried in where they fail under it."""
AWAY_PAUSE_S = 5.0
"""Before another try where the provider does not answer: a daemon's restart takes some seconds, and the agent's work is
worth more than that."""


@dataclass(eq=False, slots=True)
class Verification:
    """Of one rollout, once."""

    prepared: PreparedTask
    resources: Resources
    record: RolloutRecord
    """Gets the score, or why there is none."""
    at: Cell
    sandbox: Sandbox | None
    """The agent's, if it had one."""
    services: Sequence[str]
    """The jobs in it that are the task's, not the agent's."""
    owned: list[Owned]
    """Gets what must be gone when the rollout ends."""

    async def run(self) -> None:
        """Raises InfraError, and CancelledError of the rollout itself; all else is the verifier's failure."""
        self.at.enter("verify", "its turn to verify")
        record, prepared = self.record, self.prepared
        record.verifier_isolation = prepared.verifier.isolation.value
        trajectory = Trajectory(tuple(record.turns), record.final_answer)
        try:
            async with self.resources.verifying, asyncio.timeout(prepared.verify_s) as limit:
                enter_case(partial(judge_of, prepared, self.resources, record), limit)
                with on_some_disk():
                    _score(record, await self._verdict(trajectory), self.resources.config.rewards.pass_threshold)
        # User code may raise anything, SystemExit included: all of it is the verifier's own failure.
        except BaseException as error:
            if isinstance(error, InfraError) or asked_to_end(error):
                raise
            late = isinstance(error, TimeoutError) and limit.expired()
            self._no_score(VerifierTimeout(f"no verdict within {prepared.verify_s:g} s") if late else error)
        finally:
            leave_case()

    async def _verdict(self, trajectory: Trajectory) -> Score:
        """The verifier's finding, in the isolation that it asks for."""
        verifier = self.prepared.verifier
        self.at.wait("its verifier")
        if not takes_sandbox(verifier):
            return await self._verdict_in(None, trajectory)
        if verifier.isolation is Isolation.IN_PLACE and self.sandbox is not None:
            with _workspace_kept():
                await self.sandbox.quiesce(keep=self.services)
                return await self._verdict_in(self.sandbox, trajectory)
        return await self._verdict_apart(trajectory)

    async def _verdict_in(self, sandbox: Sandbox | None, trajectory: Trajectory) -> Score:
        verifier, task = self.prepared.verifier, self.prepared.task
        work = partial(verifier.verify, task, trajectory, sandbox)
        errors, close_s = self.record.hook_errors, self.resources.config.limits.close_s
        return await with_hooks(work, verifier, task, sandbox, errors, close_s, VerifierError, VerifierTimeout)

    async def _verdict_apart(self, trajectory: Trajectory) -> Score:
        """In a sandbox of its own, which the agent was never in, over the workspace that the agent left.

        A fault of that sandbox is tried again in another one, over the same workspace: the agent's work is kept.
        """
        provider, prepared = self.resources.provider, self.prepared
        if provider is None:
            raise SandboxStartError("the verifier needs a sandbox and the run has none (--sandbox none)")
        spec = await prepared.ready(prepared.base, provider, self.at)
        if self.sandbox is not None:
            self.at.wait("its workspace to be handed over")
            kept = Kept(self.sandbox.export(self._handed_over()), provider.release)
            self.owned.append(Owned(f"a layer of {self.record.task_id}", kept.end))
            with _workspace_kept():
                layer = await kept.name()
            spec = replace(spec, layers=(*spec.layers, layer))
        for tries_left in reversed(range(VERIFY_TRIES)):
            try:
                self.at.wait("a sandbox for its verifier to be created")
                sandbox = await provider.open(spec)
                self.owned.append(Owned(f"a sandbox of {self.record.task_id}", sandbox.close))
                self.at.wait("its verifier")
                return await self._verdict_in(sandbox, trajectory)
            except SandboxOutOfMemory as error:
                raise VerifierError(f"the verifier was out of memory: {error}") from error
            except SandboxError as error:
                if not tries_left:
                    raise
                if isinstance(error, SandboxAway):
                    self.at.wait("its sandbox provider to answer again")
                    await asyncio.sleep(AWAY_PAUSE_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def _handed_over(self) -> list[str]:
        """Which of the agent's files the verifier sees."""
        if self.prepared.verifier.isolation is Isolation.SNAPSHOT:
            return [SNAPSHOT]
        return list(self.prepared.task.workspace) or [self.prepared.base.workdir]

    def _no_score(self, error: BaseException) -> None:
        """The score is null, unless the task declared that its verifier's errors count as zero."""
        self.record.note(failure_of(error, Boundary.VERIFIER))
        forget_frames(error)
        if self.prepared.task.on_verifier_error == "zero":
            self.record.score, self.record.passed = 0.0, False


def judge_of(prepared: PreparedTask, resources: Resources, record: RolloutRecord, name: str | None) -> BoundJudge:
    """The judge of a name, or the run's only one. Raises VerifierUnavailable."""
    config = resources.config
    judge = config.judge(name)
    if judge is None:
        known = ", ".join(config.judges) or "none"
        raise VerifierUnavailable(f"the run has no judge {name or 'that is its only one'} (judges: {known})")

    def context(turn: int, gate: CallGate) -> CallContext:
        return CallContext(config.seed, record.round, record.task_id, judge.name, record.attempt, turn, gate=gate)

    deadline = asyncio.get_running_loop().time() + prepared.verify_s
    return BoundJudge(judge, resources.models[judge.name], context, deadline, record)


def _score(record: RolloutRecord, score: Score, pass_threshold: float) -> None:
    """Writes a verifier's finding into the row. Raises VerifierBadReturn where it is none, or no finite number."""
    if not isinstance(score, Score):
        raise VerifierBadReturn(f"the verifier returned {score!r:.200}, not a Score")
    try:
        value = float(score.value)
        components = {str(name): float(part) for name, part in score.components.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise VerifierBadReturn(f"the verifier returned {score!r:.200}: {error}") from error
    if not (math.isfinite(value) and all(map(math.isfinite, components.values()))):
        raise VerifierBadReturn(f"the verifier returned {score!r:.200}, which is not finite")
    if not isinstance(score.passed, bool | None):
        raise VerifierBadReturn(f"the verifier returned passed = {score.passed!r:.200}")
    record.score = value
    record.passed = score.passed if score.passed is not None else value >= pass_threshold
    record.score_components, record.verifier_output = components, kept_output(score)


@contextlib.contextmanager
def _workspace_kept() -> Iterator[None]:
    """A sandbox that went out of memory as a whole took the agent's files along: there is nothing to judge them by."""
    try:
        yield
    except SandboxOutOfMemory as error:
        raise VerifierError(f"the agent's files are lost: {error}") from error
