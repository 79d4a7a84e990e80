"""Runs one rollout from sandbox to score, and turns every failure into data: only its verification does so too."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from rollout_engine.agentclock import AgentClock
from rollout_engine.agents.base import equipped
from rollout_engine.bound import BoundModel
from rollout_engine.disk import on_some_disk
from rollout_engine.errors import (
    DeadlineError,
    LimitReached,
    ModelTimeout,
    SandboxFull,
    SandboxOutOfMemory,
    SandboxStartError,
    SetupError,
    SetupTimeout,
    failure_of,
    forget_frames,
)
from rollout_engine.hooks import with_hooks
from rollout_engine.phases import BOUNDARY_OF_PHASE, asked_to_end, phase_limit
from rollout_engine.prepare import PreparedTask
from rollout_engine.resources import Resources
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.services import start_services
from rollout_engine.teardown import MIN_CLOSE_S, Owned, remove_all
from rollout_engine.types import (
    Boundary,
    CallContext,
    CallGate,
    RolloutSpec,
    Status,
    StopReason,
    Turn,
    new_record,
)
from rollout_engine.verification import Verification
from rollout_engine.waiting import Cell, Phase, enter_rollout


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
        self._services: Sequence[str] = ()
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
            if asked_to_end(error):
                raise
            record.fail(failure_of(error, BOUNDARY_OF_PHASE.get(self.phase, Boundary.HOST)))
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
        prepared, resources = self._prepared, self._resources
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                began = loop.time()
                try:
                    if prepared.sandbox is not None:
                        await self._start(prepared.sandbox)
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
                    box, services = self._sandbox, self._services
                    await Verification(prepared, resources, record, self.at, box, services, self._owned).run()
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
        async with self._resources.starting, phase_limit(self._prepared.start_s, late):
            spec = await self._prepared.ready(spec, provider, self.at)
            self.at.wait("its agent's installation")
            spec = await equipped(self._resources.agent, spec)
            self.at.wait("a sandbox to be created")
            self._sandbox = self._own(await provider.open(spec))
            self.record.sandbox = provider.name
            self.record.limits_enforced = self._sandbox.limits_enforced
            self.at.enter("setup", "its services")
            self._services = await start_services(self._prepared.task.services, self._sandbox)

    def _own(self, sandbox: Sandbox) -> Sandbox:
        self._owned.append(Owned(f"a sandbox of {self.record.task_id}", sandbox.close))
        return sandbox

    async def _close(self) -> None:
        """Removes sandboxes and layers before the deadline, also while the rollout is being cancelled."""
        if not self._owned:
            return
        owned = self._owned.copy()
        self._owned.clear()  # in place: an abandoned verification may still add to it
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
        agent, model = self._resources.agent, self._resources.models[record.model]
        close_s = self._resources.config.limits.close_s
        clock = AgentClock(min(deadline, asyncio.get_running_loop().time() + limits.agent_s), deadline)
        bound = BoundModel(model, self._context, clock, record)
        try:
            async with clock.limit:
                work = partial(agent.run, task, bound, self._sandbox, limits, self._on_turn)
                reason = await with_hooks(
                    work, agent, task, self._sandbox, record.hook_errors, close_s, SetupError, SetupTimeout
                )
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

    def _free_slot(self) -> None:
        """Tells the host, once, that another rollout may start."""
        free, self._on_slot_free = self._on_slot_free, _nothing
        free()


def _nothing() -> None:
    return None


def final_answer(turns: Sequence[Turn]) -> str | None:
    """The text of the last message that an agent's turn got from the model."""
    for turn in reversed(turns):
        if turn.role == "agent":
            content = turn.completion.message.get("content")
            return content if isinstance(content, str) else None
    return None
