"""The longest callback of the engine's event loop while 64 agent programs run: CPU time of the loop's own thread.

    python -m benchmarks.agent_loop --url URL [-n 192] [--in-flight 64]

The rollouts of agent_rollouts.py against a model that is slow enough that all of them ask at once, through the engine
as it is but for its loop: asyncio's own, whose callbacks can be timed, where it has uvloop's, which does less in
Python. Driver, host, proxies, model clients and sandboxes share that loop. What a first batch has made the process
import and start is left out.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from benchmarks.agent_rollouts import OPTIONS, check, tasks
from benchmarks.cases import case_arguments, scratch
from benchmarks.measure import emit
from benchmarks.timed_loop import TimedLoop
from benchmarks.work import MODEL
from rollout_engine import loopthread
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine

made: list[TimedLoop] = []


def new_loop() -> TimedLoop:
    made.append(TimedLoop())
    return made[-1]


async def watch(url: str, n: int, in_flight: int, run: Path) -> TimedLoop:
    """The loop that ran n rollouts after a warm-up of `in_flight`."""
    engine = RolloutEngine(
        [ModelSpec(name=MODEL, kind="openai", model=MODEL, base_url=url)], run_dir=run, k=1, ray="off",
        agent="command", agent_options=OPTIONS, sandbox="namespace", host=HostSpec(slots=in_flight),
    )  # fmt: skip
    async with engine:
        await engine.finish(tasks(in_flight, "warm-up"))
        gc.collect()
        (loop,) = made
        loop.longest_s = 0.0
        await engine.finish(tasks(n, "task"))
        longest = loop.longest_s, loop.longest
        await engine.close()
        check(await asyncio.to_thread(engine.tables), in_flight + n)
    loop.longest_s, loop.longest = longest
    return loop


def main() -> None:
    parser = case_arguments(__doc__)
    parser.set_defaults(n=192, in_flight=64)
    args = parser.parse_args()
    loopthread.new_event_loop = new_loop
    with scratch("agent-loop") as folder:
        loop = asyncio.run(watch(args.url, args.n, args.in_flight, folder / "run"))
    emit({"case": "agent loop", "n": args.n, "longest_ms": round(loop.longest_s * 1e3, 2), "callback": loop.longest})


if __name__ == "__main__":
    main()
