"""A driver in a process of its own, so that it can be killed: `python -m tests.ray.drive ORDERS` (JSON).

Says `open` on standard output once its hosts are up, and at the end the number of rows or its InputError.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rollout_engine import RolloutEngine
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.runstore import RunStore
from tests.helpers import make_tasks


def die_at(moment: str, commit: int) -> None:
    """This process is killed right `before` or `after` its nth commit: written, and not yet acknowledged."""
    write, commits = RunStore.write, [0]

    def dying(store: RunStore, batches: list[Any]) -> None:
        commits[0] += 1
        last = commits[0] == commit
        if last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(store, batches)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    RunStore.write = dying  # type: ignore[method-assign]


async def drive(orders: dict[str, Any], say: Callable[[str], None]) -> None:
    config = RunConfig.model_validate(orders["config"])
    async with RolloutEngine(
        config=config, run_dir=orders.get("run_dir"), resume=orders.get("resume", False)
    ) as engine:
        say("open")
        await engine.finish(make_tasks(orders["tasks"]))
        say(f"rows {engine.tables().rollouts.num_rows}")


def main() -> int:
    orders = json.loads(sys.argv[1])
    if "die" in orders:
        die_at(*orders["die"])
    try:
        asyncio.run(drive(orders, lambda line: print(line, flush=True)))
    except InputError as error:
        print(f"InputError: {error}", flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
