"""Real pieces put together for tests of the spine: one rollout at a time, a host with its driver's side, servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rollout_engine.agents import make_agent
from rollout_engine.config import RunConfig
from rollout_engine.models import make_client
from rollout_engine.permits import UNLIMITED
from rollout_engine.prepare import prepare
from rollout_engine.rollout import Model, Resources, Rollout
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.types import RolloutRecord, RolloutSpec, Sampling

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

    def rollout(
        self,
        task: Task,
        model: str = "m",
        *,
        deadline_s: float | None = None,
        on_slot_free: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> Rollout:
        prepared = prepare(task_body(task), self.config)
        if deadline_s is not None:
            prepared = replace(prepared, deadline_s=deadline_s)
        return Rollout(spec_of(task, model, **fields), prepared, self.resources, on_slot_free)

    async def run(self, task: Task | None = None, model: str = "m", **fields: Any) -> RolloutRecord:
        rollout = self.rollout(task if task is not None else task_of(), model, **fields)
        async with asyncio.timeout(20):
            await rollout.run()
        return rollout.record


@contextlib.asynccontextmanager
async def bench(
    config: RunConfig, *, provider: SandboxProvider | None = None, starting: int = 4, verifying: int = 4
) -> AsyncIterator[Bench]:
    """What a host makes of a config, without the host."""
    made = provider if provider is not None or config.sandbox == "none" else make_provider(config.sandbox)
    models = {spec.name: Model(spec, make_client(spec), Sampling(max_tokens=spec.max_tokens)) for spec in config.models}
    for model in models.values():
        model.permits.renew(UNLIMITED)
    agent = make_agent(config.agent, config.agent_options)
    slots = asyncio.Semaphore(starting), asyncio.Semaphore(verifying)
    try:
        yield Bench(config, Resources(config, agent, models, made, *slots, "host-0", "node"))
    finally:
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
