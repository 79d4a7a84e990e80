"""The checks of `engine.evaluate` for tasks at hand, on this machine: static check and dry run, no model, no run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import islice

from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.evaluation import judge
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.machine import cores
from rollout_engine.specs import Task, task_body
from rollout_engine.staticcheck import static_reasons
from rollout_engine.taskcheck import Finding
from rollout_engine.tasks import check_task

BATCH = 64
"""Tasks tried between two looks at what came of them; no more run at once than twice the cores."""


async def dry_run(tasks: Iterable[Task], config: RunConfig) -> list[Finding]:
    """What speaks against each task, in their order. Raises InputError for a task that does not fit the config."""
    waiting, findings = iter(tasks), list[Finding]()
    at_once = asyncio.Semaphore(2 * cores())
    async with _host(config) as host:

        async def try_one(task: Task) -> list[Finding]:
            async with at_once:
                return await _findings(check_task(task, config), host)

        while batch := list(islice(waiting, BATCH)):
            for found in await asyncio.gather(*map(try_one, batch)):
                findings += found
    return findings


async def _findings(task: Task, host: Host) -> list[Finding]:
    reasons: tuple[str, ...] = static_reasons(task)
    if reasons:
        return [Finding(task.task_id, reason) for reason in reasons]
    validity, reasons = judge(await host.probe(task_body(task)))
    return [Finding(task.task_id, reason, "note" if validity is None else "error") for reason in reasons]


@asynccontextmanager
async def _host(config: RunConfig) -> AsyncIterator[Host]:
    """A host of its own, whose only model is never called."""
    nobody = ModelSpec(name="nobody", kind="scripted", options={"skill": 0.0})
    quiet = config.model_copy(
        update={"models": (nobody,), "rewards": config.rewards.model_copy(update={"policy": None})}
    )
    host = Host(HostPlan(run_id="dry-run", epoch=1, host_id="host-0", node_id="local", config=quiet))
    await host.open()
    try:
        yield host
    finally:
        await host.close()
