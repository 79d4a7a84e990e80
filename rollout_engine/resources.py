"""What the rollouts of a host share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_engine.agents import make_agent
from rollout_engine.agents.base import Agent
from rollout_engine.bound import Model
from rollout_engine.config import RunConfig
from rollout_engine.hostplan import HostPlan
from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.sandboxes.paced import at_once
from rollout_engine.teardown import Leftovers
from rollout_engine.waiting import Activity


@dataclass(frozen=True, slots=True)
class Resources:
    """Whoever makes them closes them."""

    config: RunConfig
    agent: Agent
    models: Mapping[str, Model]
    provider: SandboxProvider | None
    starting: asyncio.Semaphore
    verifying: asyncio.Semaphore
    host_id: str
    node_id: str
    leftovers: Leftovers
    activity: Activity = field(default_factory=Activity)
    """Counts what goes forward, for the driver's watchdog."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970 on the driver's clock: rows of one run are stamped by one clock."""


def make_resources(
    plan: HostPlan, models: Mapping[str, Model], provider: SandboxProvider | None, clock: Callable[[], float]
) -> Resources:
    """Those of a host, with the agent that its plan names. Raises InputError."""
    config, spec = plan.config, plan.config.host
    rates = spec.creations_per_minute
    return Resources(
        config=config,
        agent=make_agent(config.agent, config.agent_options),
        models=models,
        provider=provider,
        starting=asyncio.Semaphore(at_once(spec.starting, rates, config.sandbox, config.limits.start_s)),
        verifying=asyncio.Semaphore(at_once(spec.verifying, rates, config.sandbox, config.limits.verify_s)),
        host_id=plan.host_id,
        node_id=plan.node_id,
        leftovers=Leftovers(config.limits.close_s),
        clock=clock,
    )
