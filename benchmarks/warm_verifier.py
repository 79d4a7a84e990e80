"""What a verdict of pure verifier code costs: in the warm verifier, and in a fresh interpreter for comparison.

    python -m benchmarks.warm_verifier [--count 200] [--rounds 5] [--user]

CPU is everything that the work caused, kernel and both processes included, by a control group of its own (else by
/proc/stat); the best round is printed, as a shared machine only ever adds. Left out: the rollout around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import marshal
import os
import subprocess
import sys

from benchmarks.control_group import Meter, metered
from benchmarks.sandbox_namespace import ORDINARY_USER, best
from rollout_engine.loopthread import new_event_loop
from rollout_engine.verifiers.code.program import program
from rollout_engine.verifiers.code.warm import WarmVerifier

CODE = """
import re

def verify(env, final_answer=None, conversation=None):
    found = re.findall(r"-?[0-9.]+", final_answer or "")
    return {"score": float(bool(found) and float(found[-1]) == 42.0), "components": {"numbers": len(found)}}
"""
REQUEST = {
    "code": CODE,
    "final_answer": "So the answer is 42",
    "conversation": [{"role": "user", "content": "What is six times seven? " * 20}] * 6,
}
TOGETHER = 8


async def measure(meter: Meter, warm: WarmVerifier, count: int, rounds: int) -> None:
    async def one() -> None:
        assert (await warm.judge(REQUEST, 10.0))["score"] == 1.0

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(TOGETHER)))

    async def fresh() -> None:
        request = marshal.dumps({**REQUEST, "workdir": "/"})
        argv = [sys.executable, "-I", "-S", "-c", program(uses_env=False)]
        done = await asyncio.to_thread(subprocess.run, argv, input=request, capture_output=True, env={})
        assert json.loads(done.stdout)["score"] == 1.0, done

    await one()
    rows = [("warm verifier, one at a time", await best(meter, rounds, count, one), 1)]
    rows.append((f"warm verifier, {TOGETHER} at once", await best(meter, rounds, count // TOGETHER, several), TOGETHER))
    rows.append(("fresh interpreter, no sandbox", await best(meter, rounds, count // 4, fresh), 1))
    print(f"{'':32} {'CPU ms':>8} {'wall ms':>8}  ratio   (per verdict, best of {rounds}, CPU by {meter.by})")
    for name, (cpu, wall), verdicts in rows:
        print(f"{name:32} {cpu / verdicts:8.2f} {wall / verdicts:8.2f} {cpu / verdicts / rows[-1][1][0]:6.2f}")


async def run(count: int, rounds: int, user: bool) -> None:
    with metered() as meter:
        warm = WarmVerifier(run_as=ORDINARY_USER if user and os.geteuid() == 0 else None)
        try:
            await warm.start()
            await measure(meter, warm, count, rounds)
        finally:
            await warm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--user", action="store_true", help="with the zygote as an ordinary user")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # the engine's own
        runner.run(run(options.count, options.rounds, options.user))


if __name__ == "__main__":
    main()
