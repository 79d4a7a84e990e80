"""One driver of a run, to be killed: `python -m tests.chaos.drive ORDERS` (JSON).

Says on standard output, one JSON object a line, how far the run is whenever that changes, and which hosts were lost.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from rollout_engine import RolloutEngine
from rollout_engine.config import RunConfig
from tests.chaos.work import work

LOOK_S = 0.05


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def tell(engine: RolloutEngine) -> None:
    """Until it is cancelled."""
    said: dict[str, Any] = {}
    while True:
        progress = engine.progress
        lost = [event.node for event in progress.events if event.kind == "host_lost"]
        now = {"done": progress.before + progress.done, "hosts": progress.hosts, "lost": lost}
        if now != said:
            say(**now)
            said = now
        await asyncio.sleep(LOOK_S)


async def drive(orders: dict[str, Any]) -> None:
    config = RunConfig.model_validate(orders["config"])
    retry_failed = orders.get("retry_failed", False)
    async with RolloutEngine(
        config=config, run_dir=orders["run_dir"], resume=True, retry_failed=retry_failed
    ) as engine:
        telling = asyncio.create_task(tell(engine))
        try:
            await engine.finish(work(*orders["work"]))
        finally:
            telling.cancel()
    say(end=True)


if __name__ == "__main__":
    asyncio.run(drive(json.loads(sys.argv[1])))
