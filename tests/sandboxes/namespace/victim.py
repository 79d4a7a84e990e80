"""A host with live boxes, to be killed. Prints what it has as one JSON line, then waits."""

import asyncio
import json
import sys

from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider


async def main() -> None:
    mark, run_as = sys.argv[1], sys.argv[2]
    provider = NamespaceProvider(run_as=int(run_as) if run_as else None)
    spec = await provider.prepare(SandboxSpec(), Recipe({"f": b"x"}))
    boxes = await asyncio.gather(*(provider.open(spec) for _ in range(10)))
    for box in boxes:
        await box.start(["sleep", mark])
        await box.exec(
            ["sh", "-c", f"setsid sh -c 'trap \"\" TERM HUP; sleep {mark} & sleep {mark}' >/dev/null 2>&1 &"]
        )
    await boxes[0].export(["."])
    print(json.dumps({"launcher": provider.launcher_pid}), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
