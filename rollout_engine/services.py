"""Starts the services of a task in its sandbox, and waits until each says that it is up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_engine.errors import ExecTimeout, SetupError, SetupTimeout
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import ServiceSpec
from rollout_engine.waiting import awaiting

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
"""Between two looks at a service: the pause doubles up to this."""
_TAIL_BYTES = 500


async def start_services(services: Sequence[ServiceSpec], sandbox: Sandbox) -> list[str]:
    """Starts them in their order, each once the one before is healthy; the names of their jobs.

    They end with their sandbox. Raises SetupError where one exits with an error, SetupTimeout where it is
    not healthy in time.
    """
    jobs = []
    for service in services:
        job = await sandbox.start(["sh", "-c", service.command])
        if service.health is not None:
            with awaiting(f"service {service.name} to be healthy"):
                await _healthy(service, service.health, job, sandbox)
        jobs.append(job)
    return jobs


async def _healthy(service: ServiceSpec, health: str, job: str, sandbox: Sandbox) -> None:
    clock = asyncio.get_running_loop().time
    ends, pause = clock() + service.health_timeout_s, FIRST_PAUSE_S
    while True:
        left = ends - clock()
        if left > 0 and await _passes(health, sandbox, left):
            return
        status = await sandbox.poll(job)
        # A service may well end with 0: one that goes into the background by itself does.
        if status.exit_code not in (None, 0):
            raise _unhealthy(service, f"ended with {status.exit_code}", status.stderr or status.stdout)
        if ends - clock() <= pause:
            why = f"is not healthy within {service.health_timeout_s:g} s ({health})"
            raise _unhealthy(service, why, status.stderr or status.stdout, SetupTimeout)
        await asyncio.sleep(pause)
        pause = min(pause * 2, MAX_PAUSE_S)


async def _passes(health: str, sandbox: Sandbox, timeout_s: float) -> bool:
    try:
        return (await sandbox.exec(["sh", "-c", health], timeout_s=timeout_s)).ok
    except ExecTimeout:
        return False


def _unhealthy(service: ServiceSpec, what: str, output: bytes, kind: type[SetupError] = SetupError) -> SetupError:
    tail = output[-_TAIL_BYTES:].decode(errors="replace").strip()
    return kind(f"service {service.name!r} {what}" + (f": {tail}" if tail else ""))
