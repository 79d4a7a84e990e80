"""Runs one rollout from sandbox to score, and turns every failure into data. The only place that does so."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rollout_engine.agentclock import AgentClock
from rollout_engine.agents.base import equipped
from rollout_engine.bound import BoundJudge, BoundModel
from rollout_engine.disk import on_some_disk
from rollout_engine.errors import (
    DeadlineError,
    InfraError,
    LimitReached,
    ModelTimeout,
    RolloutEngineError,
    SandboxError,
    SandboxFull,
    SandboxOutOfMemory,
    SandboxStartError,
    SetupError,
    SetupTimeout,
    VerifierBadReturn,
    VerifierError,
    VerifierTimeout,
    VerifierUnavailable,
    failure_of,
    forget_frames,
)
from rollout_engine.hooks import has_hook, hooked, noting
from rollout_engine.prepare import PreparedTask
from rollout_engine.resources import Resources
from rollout_engine.sandboxes.base import SNAPSHOT, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.services import start_services
from rollout_engine.teardown import MIN_CLOSE_S, Kept, Owned, remove_all
from rollout_engine.types import (
    Boundary,
    CallContext,
    CallGate,
    Isolation,
    RolloutSpec,
    Score,
    Status,
    StopReason,
    Trajectory,
    Turn,
    new_record,
)
from rollout_engine.verifiers.base import kept_output, takes_sandbox
from rollout_engine.verifiers.case import enter_case, leave_case
from rollout_engine.waiting import Cell, Phase, enter_rollout

T = TypeVar("T")

VERIFY_TRIES = 3
"""Sandboxes that a verification is tried in where they fail under it."""


class Rollout:
    """One rollout in the making. `record` is complete once `run` has returned or raised CancelledError."""

    def __init__(
        self, spec: RolloutSpec, prepared: PreparedTask, resources: Resources, on_slot_free: Callable[[], None]
    ) -> None:
        self.record = new_record(spec, resources.clock())
        self.record.host_id, self.record.node_id = resources.host_id, resources.node_id
        self.at = Cell(resources.activity)
        """Phase and awaited thing, for whoever asks what everything waits for."""
        self._prepared = prepared
        self._resources = resources
        self._on_slot_free = on_slot_free
        self._sandbox: Sandbox | None = None
        self._owned: list[Owned] = []
        """All that must be gone when it ends."""
        self._deadline = math.inf
        self._services: list[str] = []
        """The jobs in the sandbox that are the task's services, not the agent's."""
        self._waited_s = 0.0
        """How long the agent's model calls waited for the run's budgets."""

    @property
    def phase(self) -> Phase:
        return self.at.phase

    async def run(self) -> None:
        """Never raises but CancelledError; what went wrong is in the record."""
        enter_rollout(self.at)
        record, limits = self.record, self._resources.config.limits
        whole_s = self._prepared.deadline_s - min(record.queue_s, limits.queue_s)
        self._deadline = asyncio.get_running_loop().time() + whole_s
        try:
            # The time to clean up is a part of the whole.
            with on_some_disk():
                await self._phases(self._deadline - limits.close_s)
        # A SystemExit that escaped would end the host's loop and with it every other rollout.
        except BaseException as error:
            if _asked_to_end(error):
                raise
            record.fail(failure_of(error, _BOUNDARY_OF_PHASE.get(self.phase, Boundary.HOST)))
            forget_frames(error)
        finally:
            self._free_slot()
            await self._close()
            self._sandbox = None  # which still knows, by its tasks, on whose behalf it was closed
            record.num_turns = len(record.turns)
            record.ended_at = self._resources.clock()

    async def abandon(self) -> None:
        """Frees the slot and removes the sandbox of a rollout whose user code does not let itself be cancelled."""
        self._free_slot()
        await self._close()

    async def _phases(self, deadline: float) -> None:
        loop, record = asyncio.get_running_loop(), self.record
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                began = loop.time()
                try:
                    if self._prepared.sandbox is not None:
                        await self._start(self._prepared.sandbox)
                finally:
                    started = loop.time()
                    record.start_s = started - began
                try:
                    await self._work(deadline)
                finally:
                    worked = loop.time()
                    record.agent_s = worked - started - self._waited_s
                    record.queue_s += self._waited_s
                self._free_slot()
                try:
                    await self._verify()
                finally:
                    record.verify_s = loop.time() - worked
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._past_deadline() from None

    def _past_deadline(self) -> DeadlineError:
        within_s = self._prepared.deadline_s - self._resources.config.limits.close_s
        return DeadlineError(f"no verdict within {within_s:g} s; was in phase {self.phase}")

    # -- sandbox ------------------------------------------------------------------------------------------------

    async def _start(self, spec: SandboxSpec) -> None:
        provider = self._resources.provider
        if provider is None:
            raise SandboxStartError("the task needs a sandbox and the run has none (--sandbox none)")
        self.at.enter("start", "its turn to start a sandbox")
        late = SandboxStartError(f"the sandbox was not ready within {self._prepared.start_s:g} s")
        async with self._resources.starting, _phase_limit(self._prepared.start_s, late):
            spec = await self._ready(provider, spec)
            self.at.wait("its agent's installation")
            spec = await equipped(self._resources.agent, spec)
            self.at.wait("a sandbox to be created")
            self._sandbox = self._own(await provider.open(spec))
            self.record.sandbox = provider.name
            self.record.limits_enforced = self._sandbox.limits_enforced
            self.at.enter("setup", "its services")
            self._services = await start_services(self._prepared.task.services, self._sandbox)

    async def _ready(self, provider: SandboxProvider, spec: SandboxSpec) -> SandboxSpec:
        """A spec that holds the task's files, and what its setup made of them: once per task and node."""
        recipe = self._prepared.recipe
        if not recipe.files and not recipe.commands:
            return spec
        phase = self.phase
        self.at.enter("setup", "the prepared sandbox of its task")
        ready = await provider.prepare(spec, recipe)
        self.at.enter(phase, "a sandbox")
        return ready

    def _own(self, sandbox: Sandbox) -> Sandbox:
        self._owned.append(Owned(f"a sandbox of {self.record.task_id}", sandbox.close))
        return sandbox

    async def _close(self) -> None:
        """Removes sandboxes and layers before the deadline, also while the rollout is being cancelled."""
        owned, self._owned = self._owned, []
        if not owned:
            return
        self.at.enter("close", "its sandbox to be removed")
        loop = asyncio.get_running_loop()
        began = loop.time()
        left_s = min(self._resources.config.limits.close_s, self._deadline - began)
        try:
            await remove_all(owned, max(left_s, MIN_CLOSE_S), self._resources.leftovers)
        finally:
            self.record.close_s = loop.time() - began

    # -- agent --------------------------------------------------------------------------------------------------

    async def _work(self, deadline: float) -> None:
        self.at.enter("agent", "its agent")
        record, task, limits = self.record, self._prepared.task, self._prepared.limits
        model = self._resources.models[record.model]
        clock = AgentClock(min(deadline, asyncio.get_running_loop().time() + limits.agent_s), deadline)
        bound = BoundModel(model, self._context, clock, record)
        try:
            async with clock.limit:
                work = partial(self._resources.agent.run, task, bound, self._sandbox, limits, self._on_turn)
                reason = await self._hooked(work, self._resources.agent, self._sandbox, SetupError, SetupTimeout)
        except LimitReached as error:
            reason = error.reason
        except SandboxOutOfMemory:
            reason = StopReason.OUT_OF_MEMORY
        except SandboxFull:
            reason = StopReason.DISK_LIMIT
        except TimeoutError:
            if not clock.limit.expired():
                raise
            if clock.at_deadline:
                raise self._past_deadline() from None
            reason = self._out_of_time()
        finally:
            record.oom_kills = None if self._sandbox is None else self._sandbox.oom_kills
            record.agent_exit_code, record.evidence = bound.report.exit_code, bound.report.evidence
            self._waited_s = clock.waited_s
        if not isinstance(reason, StopReason):
            raise TypeError(f"the agent returned {reason!r:.200}, not a StopReason")
        record.stop_reason = reason.value
        done = reason is StopReason.FINISHED
        record.status = (Status.COMPLETED if done else Status.TRUNCATED).value
        reported = bound.report.final_answer
        record.final_answer = reported if reported is not None else final_answer(record.turns)

    def _context(self, turn: int, gate: CallGate) -> CallContext:
        """What the agent's model is told of a call."""
        record, task, seed = self.record, self._prepared.task, self._resources.config.seed
        key = (seed, record.round, record.task_id, record.model, record.attempt)
        return CallContext(*key, turn, task.answer, task.script, gate)

    def _hooked(
        self,
        work: Callable[[], Awaitable[T]],
        owner: Any,
        sandbox: Sandbox | None,
        failed: type[RolloutEngineError],
        late: type[RolloutEngineError],
    ) -> Awaitable[T]:
        """What the owner does, its setup and cleanup around it; their errors are in the row."""
        if not has_hook(owner, "setup", "cleanup"):
            return work()  # as for nearly every rollout there is
        note, cleanup_s = noting(self.record.hook_errors), self._resources.config.limits.close_s / 2
        task = self._prepared.task
        return hooked(work, owner, task, sandbox, note=note, failed=failed, late=late, cleanup_s=cleanup_s)

    def _on_turn(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(f"on_turn takes a Turn, not {type(turn).__name__}")
        self.record.turns.append(turn)
        self.at.moved()

    def _out_of_time(self) -> StopReason:
        """The agent's time is over. Without a single answer it was the model that hung, not the agent that was slow."""
        if not self.record.turns:
            raise ModelTimeout(f"no answer within the agent's {self._prepared.limits.agent_s:g} s") from None
        return StopReason.AGENT_TIMEOUT

    # -- verifier -----------------------------------------------------------------------------------------------

    async def _verify(self) -> None:
        self.at.enter("verify", "its turn to verify")
        record, prepared = self.record, self._prepared
        record.verifier_isolation = prepared.verifier.isolation.value
        trajectory = Trajectory(tuple(record.turns), record.final_answer)
        try:
            async with self._resources.verifying, asyncio.timeout(prepared.verify_s) as limit:
                enter_case(self._judge, limit)
                with on_some_disk():
                    self._score(await self._verdict(trajectory))
        # User code may raise anything, SystemExit included: all of it is the verifier's own failure.
        except BaseException as error:
            if isinstance(error, InfraError) or _asked_to_end(error):
                raise
            late = isinstance(error, TimeoutError) and limit.expired()
            self._no_score(VerifierTimeout(f"no verdict within {prepared.verify_s:g} s") if late else error)
        finally:
            leave_case()

    async def _verdict(self, trajectory: Trajectory) -> Score:
        """The verifier's finding, in the isolation that it asks for."""
        verifier = self._prepared.verifier
        self.at.wait("its verifier")
        if not takes_sandbox(verifier):
            return await self._verdict_in(None, trajectory)
        if verifier.isolation is Isolation.IN_PLACE and self._sandbox is not None:
            with _workspace_kept():
                await self._sandbox.quiesce(keep=self._services)
                return await self._verdict_in(self._sandbox, trajectory)
        return await self._verdict_apart(trajectory)

    async def _verdict_in(self, sandbox: Sandbox | None, trajectory: Trajectory) -> Score:
        verifier = self._prepared.verifier
        work = partial(verifier.verify, self._prepared.task, trajectory, sandbox)
        return await self._hooked(work, verifier, sandbox, VerifierError, VerifierTimeout)

    def _judge(self, name: str | None) -> BoundJudge:
        """The judge of a name, or the run's only one. Raises VerifierUnavailable."""
        config, record = self._resources.config, self.record
        judge = config.judge(name)
        if judge is None:
            known = ", ".join(config.judges) or "none"
            raise VerifierUnavailable(f"the run has no judge {name or 'that is its only one'} (judges: {known})")

        def context(turn: int, gate: CallGate) -> CallContext:
            return CallContext(config.seed, record.round, record.task_id, judge.name, record.attempt, turn, gate=gate)

        deadline = asyncio.get_running_loop().time() + self._prepared.verify_s
        return BoundJudge(judge, self._resources.models[judge.name], context, deadline, record)

    async def _verdict_apart(self, trajectory: Trajectory) -> Score:
        """In a sandbox of its own, which the agent was never in, over the workspace that the agent left.

        A fault of that sandbox is tried again in another one, over the same workspace: the agent's work is kept.
        """
        provider, prepared = self._resources.provider, self._prepared
        if provider is None:
            raise SandboxStartError("the verifier needs a sandbox and the run has none (--sandbox none)")
        spec = await self._ready(provider, prepared.base)
        if self._sandbox is not None:
            self.at.wait("its workspace to be handed over")
            kept = Kept(self._sandbox.export(self._handed_over()), provider.release)
            self._owned.append(Owned(f"a layer of {self.record.task_id}", kept.end))
            with _workspace_kept():
                layer = await kept.name()
            spec = replace(spec, layers=(*spec.layers, layer))
        for tries_left in reversed(range(VERIFY_TRIES)):
            try:
                self.at.wait("a sandbox for its verifier to be created")
                sandbox = self._own(await provider.open(spec))
                self.at.wait("its verifier")
                return await self._verdict_in(sandbox, trajectory)
            except SandboxOutOfMemory as error:
                raise VerifierError(f"the verifier was out of memory: {error}") from error
            except SandboxError:
                if not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _handed_over(self) -> list[str]:
        """Which of the agent's files the verifier sees."""
        if self._prepared.verifier.isolation is Isolation.SNAPSHOT:
            return [SNAPSHOT]
        return list(self._prepared.task.workspace) or [self._prepared.base.workdir]

    def _score(self, score: Score) -> None:
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
        record = self.record
        record.score = value
        threshold = self._resources.config.rewards.pass_threshold
        record.passed = score.passed if score.passed is not None else value >= threshold
        record.score_components, record.verifier_output = components, kept_output(score)

    def _no_score(self, error: BaseException) -> None:
        """The score is null, unless the task declared that its verifier's errors count as zero."""
        self.record.note(failure_of(error, Boundary.VERIFIER))
        forget_frames(error)
        if self._prepared.task.on_verifier_error == "zero":
            self.record.score, self.record.passed = 0.0, False

    def _free_slot(self) -> None:
        """Tells the host, once, that another rollout may start."""
        free, self._on_slot_free = self._on_slot_free, _nothing
        free()


def _nothing() -> None:
    return None


def _asked_to_end(error: BaseException) -> bool:
    """Whether this is a cancellation of the rollout itself; user code may raise a CancelledError of its own."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_BOUNDARY_OF_PHASE = {
    "start": Boundary.SANDBOX,
    "setup": Boundary.SETUP,
    "agent": Boundary.AGENT,
    "verify": Boundary.VERIFIER,
}


@contextlib.contextmanager
def _workspace_kept() -> Iterator[None]:
    """A sandbox that went out of memory as a whole took the agent's files along: there is nothing to judge them by."""
    try:
        yield
    except SandboxOutOfMemory as error:
        raise VerifierError(f"the agent's files are lost: {error}") from error


@contextlib.asynccontextmanager
async def _phase_limit(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Bounds a phase; raises `late` when it, and not somebody else's limit, is what expired."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise


def final_answer(turns: Sequence[Turn]) -> str | None:
    """The text of the last message that an agent's turn got from the model."""
    for turn in reversed(turns):
        if turn.role == "agent":
            content = turn.completion.message.get("content")
            return content if isinstance(content, str) else None
    return None
