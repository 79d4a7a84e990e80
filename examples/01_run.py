"""The smallest run: two scripted models, three tasks, no key, no sandbox, no cluster.

    python examples/01_run.py

prints each task's reward. Change ray="off" to ray="auto" and the same lines run on Ray.
"""

import rollout_engine
from rollout_engine import ModelSpec, Task


def main() -> None:
    tasks = [
        Task(
            task_id=f"sum-{a}-{b}",
            prompt=f"What is {a} + {b}? End with `A: <number>`.",
            verifier={"type": "match", "pattern": r"A:\s*(\S+)", "compare": "numeric", "expected": a + b},
            solution=f"A: {a + b}",
        )
        for a, b in [(2, 3), (17, 25), (140, 2)]
    ]
    models = [
        ModelSpec(name="strong", kind="scripted", options={"skill": 0.9}),
        ModelSpec(name="weak", kind="scripted", options={"skill": 0.4}),
    ]
    run = rollout_engine.run(tasks, models=models, k=8, ray="off", sandbox="none")
    for row in run.rewards.to_pylist():
        print(f"{row['task_id']:12} separation {row['separation']:+.2f}   reward {row['reward']:.2f}")


if __name__ == "__main__":
    main()
