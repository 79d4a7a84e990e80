"""Runs one rollout from sandbox to score, and turns every failure into data. The only place that does so."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_engine.agents.base import Agent, AgentLimits
from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.errors import (
    DeadlineError,
    InfraError,
    LimitReached,
    ModelTimeout,
    SandboxError,
    SandboxStartError,
    VerifierBadReturn,
    VerifierTimeout,
    failure_of,
)
from rollout_engine.models.base import ModelClient
from rollout_engine.permits import Permits
from rollout_engine.sandboxes.base import SNAPSHOT, Recipe, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.services import start_services
from rollout_engine.specs import Task
from rollout_engine.types import (
    Boundary,
    CallContext,
    Completion,
    Isolation,
    Message,
    RolloutRecord,
    RolloutSpec,
    Sampling,
    Score,
    Status,
    StopReason,
    ToolSpec,
    Trajectory,
    Turn,
    new_record,
)
from rollout_engine.verifiers.base import Verifier, takes_sandbox

CALL_GRACE_S = 1.0
"""A model call may outlive the agent's time by this much, so that it is the agent's limit that ends the agent."""


VERIFY_TRIES = 3
"""Sandboxes that a verification is tried in where they fail under it."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task with what every rollout of it shares on a host."""

    task: Task
    verifier: Verifier
    sandbox: SandboxSpec | None
    """The agent's; None: nothing of the task happens in a sandbox."""
    base: SandboxSpec
    """What a sandbox of this task is made from, the verifier's own among them."""
    recipe: Recipe
    """The task's files and setup commands."""
    limits: AgentLimits
    start_s: float
    verify_s: float
    deadline_s: float


@dataclass(slots=True)
class Model:
    """One model of the run on a host: its client, and the host's share of its budgets."""

    spec: ModelSpec
    client: ModelClient
    sampling: Sampling
    permits: Permits = field(default_factory=Permits)


@dataclass(frozen=True, slots=True)
class Resources:
    """What the rollouts of a host share."""

    config: RunConfig
    agent: Agent
    models: Mapping[str, Model]
    provider: SandboxProvider | None
    starting: asyncio.Semaphore
    verifying: asyncio.Semaphore
    host_id: str
    node_id: str


class BoundModel:
    """The model as one rollout sees it: within the host's budgets and the rollout's deadline, and counted."""

    def __init__(self, model: Model, context: CallContext, deadline: float, record: RolloutRecord) -> None:
        self._model = model
        self._context = context
        self._deadline = deadline
        self._record = record
        self._calls = 0

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Completion:
        model = self._model
        context = self._context if not self._calls else _at_turn(self._context, self._calls)
        self._calls += 1
        await model.permits.acquire()
        try:
            completion = await model.client.complete(
                messages, sampling=model.sampling, tools=tools, deadline=self._deadline, context=context
            )
        finally:
            model.permits.release()
        self._count(completion)
        return completion

    def _count(self, completion: Completion) -> None:
        record, spec, usage = self._record, self._model.spec, completion.usage
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        if spec.price_prompt is not None or spec.price_completion is not None:
            cost = usage.prompt_tokens * (spec.price_prompt or 0) + usage.completion_tokens * (
                spec.price_completion or 0
            )
            record.cost_usd = (record.cost_usd or 0.0) + cost / 1e6
        if completion.weight_version is not None:
            record.weight_version_end = completion.weight_version
            if record.weight_version_start is None:
                record.weight_version_start = completion.weight_version


def _at_turn(context: CallContext, turn: int) -> CallContext:
    return replace(context, turn=turn)


class Rollout:
    """One rollout in the making. `record` is complete once `run` has returned or raised CancelledError."""

    def __init__(
        self, spec: RolloutSpec, prepared: PreparedTask, resources: Resources, on_slot_free: Callable[[], None]
    ) -> None:
        self.record = new_record(spec, time.time())
        self.record.host_id, self.record.node_id = resources.host_id, resources.node_id
        self.phase = "queue"
        """What the rollout is waiting for, for the watchdog."""
        self._prepared = prepared
        self._resources = resources
        self._on_slot_free = on_slot_free
        self._sandbox: Sandbox | None = None
        self._services: list[str] = []
        """The jobs in the sandbox that are the task's services, not the agent's."""

    async def run(self) -> None:
        """Never raises but CancelledError; what went wrong is in the record."""
        record, loop = self.record, asyncio.get_running_loop()
        deadline = loop.time() + self._prepared.deadline_s - min(record.queue_s, self._resources.config.limits.queue_s)
        try:
            await self._phases(deadline)
        # A SystemExit that escaped would end the host's loop and with it every other rollout.
        except BaseException as error:
            if _asked_to_end(error):
                raise
            record.fail(failure_of(error, _BOUNDARY_OF_PHASE.get(self.phase, Boundary.HOST)))
        finally:
            self._free_slot()
            await self._close()
            record.num_turns = len(record.turns)
            record.ended_at = time.time()

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
                    record.agent_s = worked - started
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
        return DeadlineError(f"no verdict within {self._prepared.deadline_s:g} s; was in phase {self.phase}")

    # -- sandbox ------------------------------------------------------------------------------------------------

    async def _start(self, spec: SandboxSpec) -> None:
        provider = self._resources.provider
        if provider is None:
            raise SandboxStartError("the task needs a sandbox and the run has none (--sandbox none)")
        self.phase = "start"
        late = SandboxStartError(f"the sandbox was not ready within {self._prepared.start_s:g} s")
        async with self._resources.starting, _phase_limit(self._prepared.start_s, late):
            spec = await self._ready(provider, spec)
            self._sandbox = await provider.open(spec)
            self.record.sandbox = provider.name
            self.record.limits_enforced = self._sandbox.limits_enforced
            self.phase = "setup"
            self._services = await start_services(self._prepared.task.services, self._sandbox)

    async def _ready(self, provider: SandboxProvider, spec: SandboxSpec) -> SandboxSpec:
        """A spec that holds the task's files, and what its setup made of them: once per task and node."""
        recipe = self._prepared.recipe
        if not recipe.files and not recipe.commands:
            return spec
        self.phase = "setup"
        ready = await provider.prepare(spec, recipe)
        self.phase = "start"
        return ready

    async def _close(self) -> None:
        """Removes the sandbox, within `close_s`, also while the rollout is being cancelled."""
        if self._sandbox is None:
            return
        self.phase = "close"
        loop = asyncio.get_running_loop()
        began = loop.time()
        await finish(self._sandbox.close(), self._resources.config.limits.close_s)
        self.record.close_s = loop.time() - began

    # -- agent --------------------------------------------------------------------------------------------------

    async def _work(self, deadline: float) -> None:
        self.phase = "agent"
        record, task, limits = self.record, self._prepared.task, self._prepared.limits
        model = self._resources.models[record.model]
        seed = self._resources.config.seed
        context = CallContext(
            seed, record.round, record.task_id, record.model, record.attempt, 0, task.answer, task.script
        )
        ends = min(deadline, asyncio.get_running_loop().time() + limits.agent_s)
        bound = BoundModel(model, context, ends + CALL_GRACE_S, record)
        limit = asyncio.timeout_at(ends)
        try:
            async with limit:
                reason = await self._resources.agent.run(task, bound, self._sandbox, limits, self._on_turn)
        except LimitReached as error:
            reason = error.reason
        except TimeoutError:
            if not limit.expired():
                raise
            if ends == deadline:
                raise self._past_deadline() from None
            reason = self._out_of_time()
        if not isinstance(reason, StopReason):
            raise TypeError(f"the agent returned {reason!r:.200}, not a StopReason")
        record.stop_reason = reason.value
        done = reason is StopReason.FINISHED
        record.status = (Status.COMPLETED if done else Status.TRUNCATED).value
        record.final_answer = final_answer(record.turns)

    def _on_turn(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(f"on_turn takes a Turn, not {type(turn).__name__}")
        self.record.turns.append(turn)

    def _out_of_time(self) -> StopReason:
        """The agent's time is over. Without a single answer it was the model that hung, not the agent that was slow."""
        if not self.record.turns:
            raise ModelTimeout(f"no answer within the agent's {self._prepared.limits.agent_s:g} s") from None
        return StopReason.AGENT_TIMEOUT

    # -- verifier -----------------------------------------------------------------------------------------------

    async def _verify(self) -> None:
        self.phase = "verify"
        record, prepared = self.record, self._prepared
        record.verifier_isolation = prepared.verifier.isolation.value
        trajectory = Trajectory(tuple(record.turns), record.final_answer)
        late = VerifierTimeout(f"no verdict within {prepared.verify_s:g} s")
        try:
            async with self._resources.verifying, _phase_limit(prepared.verify_s, late):
                self._score(await self._verdict(trajectory))
        # User code may raise anything, SystemExit included: all of it is the verifier's own failure.
        except BaseException as error:
            if isinstance(error, InfraError) or _asked_to_end(error):
                raise
            self._no_score(error)

    async def _verdict(self, trajectory: Trajectory) -> Score:
        """The verifier's finding, in the isolation that it asks for."""
        verifier, task = self._prepared.verifier, self._prepared.task
        if not takes_sandbox(verifier):
            return await verifier.verify(task, trajectory, None)
        if verifier.isolation is Isolation.IN_PLACE and self._sandbox is not None:
            await self._sandbox.quiesce(keep=self._services)
            return await verifier.verify(task, trajectory, self._sandbox)
        return await self._verdict_apart(trajectory)

    async def _verdict_apart(self, trajectory: Trajectory) -> Score:
        """In a sandbox of its own, which the agent was never in, over the workspace that the agent left.

        A fault of that sandbox is tried again in another one, over the same workspace: the agent's work is kept.
        """
        provider, prepared = self._resources.provider, self._prepared
        if provider is None:
            raise SandboxStartError("the verifier needs a sandbox and the run has none (--sandbox none)")
        spec = await self._ready(provider, prepared.base)
        layer = None
        if self._sandbox is not None:
            layer = await self._sandbox.export(self._handed_over())
            spec = replace(spec, layers=(*spec.layers, layer))
        try:
            for tries_left in reversed(range(VERIFY_TRIES)):
                try:
                    return await self._verdict_in(await provider.open(spec), trajectory)
                except SandboxError:
                    if not tries_left:
                        raise
            raise AssertionError("unreachable: the last try returns or raises")
        finally:
            if layer is not None:
                await finish(provider.release(layer), self._resources.config.limits.close_s)

    async def _verdict_in(self, sandbox: Sandbox, trajectory: Trajectory) -> Score:
        try:
            return await self._prepared.verifier.verify(self._prepared.task, trajectory, sandbox)
        finally:
            await finish(sandbox.close(), self._resources.config.limits.close_s)

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
        record.score_components = components

    def _no_score(self, error: BaseException) -> None:
        """The score is null, unless the task declared that its verifier's errors count as zero."""
        self.record.note(failure_of(error, Boundary.VERIFIER))
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


async def finish(work: object, seconds: float) -> None:
    """Lets a teardown end under cancellation, for at most `seconds`; its own errors do not matter any more."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    cancelled = False
    ends = asyncio.get_running_loop().time() + seconds
    while not task.done() and (left := ends - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    if not task.done():
        task.cancel()
    elif not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError


def final_answer(turns: Sequence[Turn]) -> str | None:
    """The text of the last message that an agent's turn got from the model."""
    for turn in reversed(turns):
        if turn.role == "agent":
            content = turn.completion.message.get("content")
            return content if isinstance(content, str) else None
    return None
