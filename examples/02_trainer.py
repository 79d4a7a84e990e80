"""A trainer's loop: groups of k rollouts as they finish, one round per step.

    python examples/02_trainer.py

prints for each step how many groups carry a signal for the policy (not all right, not all wrong).
"""

import asyncio

from rollout_engine import ModelSpec, RolloutEngine, Task

TASKS = [
    Task(
        task_id=f"task-{number}",
        prompt=f"Say {number}.",
        verifier={"type": "match", "expected": str(number)},
        solution=str(number),
    )
    for number in range(20)
]


async def main() -> None:
    policy = ModelSpec(name="policy", kind="scripted", options={"skill": 0.5, "latency_ms": 20})
    async with RolloutEngine([policy], k=4, ray="off", sandbox="none") as engine:
        for step in range(3):
            useful = 0
            async for group in engine.groups(TASKS, round=step):
                # None is not zero: a rollout that infrastructure failed has no score and is left out.
                useful += bool(group.learnability)
            print(f"step {step}: {useful} of {len(TASKS)} groups carry a signal")


if __name__ == "__main__":
    asyncio.run(main())
