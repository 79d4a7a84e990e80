"""Real pieces put together for tests of the spine: one rollout at a time, a host with its driver's side, servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aiohttp import web

from rollout_engine.agents import make_agent
from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.bound import Model
from rollout_engine.config import RunConfig
from rollout_engine.models import make_client
from rollout_engine.permits import UNLIMITED
from rollout_engine.prepare import prepare
from rollout_engine.resources import Resources
from rollout_engine.rollout import Rollout
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.teardown import Leftovers
from rollout_engine.types import (
    Isolation,
    RolloutRecord,
    RolloutSpec,
    Sampling,
    Score,
    StopReason,
    Trajectory,
    Turn,
)
from rollout_engine.verifiers.workshop import Workshop

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MATCH = {"type": "match", "compare": "exact", "expected": "42"}


def task_of(**fields: Any) -> Task:
    """A task whose answer is 42."""
    return Task(**{"task_id": "t", "prompt": "Six times seven?", "verifier": MATCH, "solution": "42", **fields})


def spec_of(task: Task, model: str = "m", *, key: int = 0, attempt: int = 0, **fields: Any) -> RolloutSpec:
    """The first try of one attempt, planned now."""
    spec = RolloutSpec(key, 0, task.task_id, body_digest(task_body(task)), model, attempt, 0, 0, time.time())
    return spec._replace(**fields)


@dataclass
class Bench:
    """Runs single rollouts with the resources of a host."""

    config: RunConfig
    resources: Resources
    workshop: Workshop

    def rollout(
        self,
        task: Task,
        model: str = "m",
        *,
        deadline_s: float | None = None,  # without the time to clean up
        on_slot_free: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> Rollout:
        prepared = prepare(task_body(task), self.config, self.workshop)
        if deadline_s is not None:
            prepared = replace(prepared, deadline_s=deadline_s + self.config.limits.close_s)
        return Rollout(spec_of(task, model, **fields), prepared, self.resources, on_slot_free)

    async def run(self, task: Task | None = None, model: str = "m", **fields: Any) -> RolloutRecord:
        rollout = self.rollout(task if task is not None else task_of(), model, **fields)
        async with asyncio.timeout(120):
            await rollout.run()
        return rollout.record


@contextlib.asynccontextmanager
async def bench(
    config: RunConfig, *, provider: SandboxProvider | None = None, starting: int = 4, verifying: int = 4
) -> AsyncIterator[Bench]:
    """What a host makes of a config, without the host."""
    made = provider if provider is not None or config.sandbox == "none" else make_provider(config.sandbox)
    models = {
        spec.name: Model(spec, make_client(spec), Sampling(max_tokens=spec.max_tokens)) for spec in config.clients
    }
    for model in models.values():
        model.permits.renew(UNLIMITED)
    agent = make_agent(config.agent, config.agent_options)
    slots = asyncio.Semaphore(starting), asyncio.Semaphore(verifying)
    workshop, leftovers = Workshop(made), Leftovers(config.limits.close_s)
    try:
        yield Bench(config, Resources(config, agent, models, made, *slots, "host-0", "node", leftovers), workshop)
    finally:
        await leftovers.close()
        await workshop.close()
        for model in models.values():
            await model.client.close()
        if made is not None:
            await made.close()


@contextlib.asynccontextmanager
async def chat_server(handler: Handler) -> AsyncIterator[str]:
    """A real HTTP server whose chat completions one handler answers; gives its base URL."""
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def answer(content: str | None = "42", *, finish: str = "stop", **fields: Any) -> web.Response:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 3}, **fields})


def served(url: str, name: str = "m", **fields: Any) -> dict[str, Any]:
    """A model behind an HTTP server, with its client's own retries off."""
    return {"name": name, "kind": "openai", "model": name, "base_url": url, "call_retries": 0, **fields}


class Gate:
    """Where rollouts stop until a test lets them go on, on whatever loop either of them runs."""

    _all: ClassVar[dict[str, Gate]] = {}
    _names = itertools.count()

    def __init__(self) -> None:
        self.name = f"gate-{next(self._names)}"
        self._all[self.name] = self
        self._lock = threading.Lock()
        self._open = False
        self._stopped: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._watchers: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.inside = 0
        self.most = 0
        """The most that were inside at once."""
        self.arrived = 0
        """All that ever came."""

    async def enter(self) -> None:
        """Waits inside until the gate is open, or was opened for this one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self.arrived += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self._open:
                future.set_result(None)
            else:
                self._stopped.append((loop, future))
            self._tell()
        try:
            await future
        finally:
            with self._lock:
                self.inside -= 1
                self._stopped = [each for each in self._stopped if each[1] is not future]

    def let(self, count: int) -> None:
        """Lets the first `count` that are inside go on."""
        with self._lock:
            going, self._stopped = self._stopped[:count], self._stopped[count:]
        for loop, future in going:
            loop.call_soon_threadsafe(_resolve, future)

    def open(self) -> None:
        """Lets everybody go on, also those that come later."""
        with self._lock:
            self._open = True
        self.let(len(self._stopped))

    async def reached(self, count: int) -> None:
        """Waits until `count` have come, all in all."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._watchers.append((count, loop, future))
            self._tell()
        async with asyncio.timeout(60):
            await future

    def _tell(self) -> None:
        here = [watcher for watcher in self._watchers if watcher[0] <= self.arrived]
        self._watchers = [watcher for watcher in self._watchers if watcher[0] > self.arrived]
        for _, loop, future in here:
            loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class GatedAgent:
    """Stops at a gate, and then asks once."""

    def __init__(self, gate: str) -> None:
        self._gate = Gate._all[gate]

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        await self._gate.enter()
        messages = task.messages()
        completion = await model.complete(messages)
        on_turn(Turn(0, [*messages, completion.message], completion))
        return StopReason.FINISHED


class GatedVerifier:
    """Stops at a gate, and then gives full marks."""

    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        self._gate = Gate._all[spec["gate"]]

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        await self._gate.enter()
        return Score(1.0)


def gated(gate: Gate) -> dict[str, Any]:
    """The part of a config that stops every agent at a gate."""
    return {"agent": "tests.rig:GatedAgent", "agent_options": {"gate": gate.name}}


def gated_verifier(gate: Gate) -> dict[str, Any]:
    """The spec of a verifier that stops at a gate."""
    return {"type": "tests.rig:GatedVerifier", "gate": gate.name}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while there is something to do, and then jumps to the next timer."""

    _now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if not self._ready and timers:
            self._now = max(self._now, min(timers))
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario that waits for timers and for nothing outside of its loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario)
