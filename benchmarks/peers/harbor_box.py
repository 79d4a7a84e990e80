"""Harbor's trials of its `oracle` agent on a task with a `docker_image`, one exec of `true` and a verifier's script.

Runs in the environment `harbor` of envs.py (Python 3.12). Settings: `n_concurrent_trials` as asked, one attempt at each
of n copies of the task, the default (public) network because any other needs images from the network, telemetry off.
The verifier's script writes the reward, as its tasks do: one exec more than in the other cases, in the same container.
CPU is that of everything, see everything.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

os.environ["HARBOR_TELEMETRY"] = "0"

from harbor.job import Job
from harbor.models.environment_type import EnvironmentType
from harbor.models.job.config import JobConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig

from benchmarks.cases import scratch
from benchmarks.measure import emit, result, versions
from benchmarks.peers.compose import docker_config
from benchmarks.peers.everything import Everything

WARM_UP = 1
FILES = {
    "task.toml": 'schema_version = "1.4"\n\n[metadata]\n\n[verifier]\ntimeout_sec = 60.0\n\n[agent]\n'
    'timeout_sec = 60.0\n\n[environment]\ndocker_image = "pybox:latest"\n',
    "instruction.md": "Run `true`.\n",
    "solution/solve.sh": "#!/bin/bash\ntrue\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
}


def make_task(folder: Path) -> Path:
    """A task folder of Harbor's format."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "environment").mkdir()
    return folder


async def run(n: int, in_flight: int, folder: Path) -> None:
    """n trials. Exits unless each has reward 1.0."""
    tasks = [TaskConfig(path=make_task(folder / f"task-{index}")) for index in range(n)]
    job = await Job.create(
        JobConfig(
            job_name=folder.name,
            jobs_dir=folder / "jobs",
            n_concurrent_trials=in_flight,
            quiet=True,
            environment=EnvironmentConfig(type=EnvironmentType.DOCKER),
            agents=[AgentConfig(name="oracle")],
            tasks=tasks,
        )
    )
    done = await job.run()
    rewards = [
        trial.verifier_result.rewards.get("reward") if trial.verifier_result and trial.verifier_result.rewards else None
        for trial in done.trial_results
    ]
    if rewards != [1] * n:
        errors = [trial.exception_info for trial in done.trial_results if trial.exception_info]
        raise SystemExit(f"{rewards.count(1)} of {n} trials have reward 1.0: {str(errors[:1])[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    with Everything(docker=True) as meter, scratch("harbor") as folder:
        os.environ["DOCKER_CONFIG"] = str(docker_config())
        for name, count in (("warm-up", WARM_UP), ("run", args.n)):
            meter.start()
            asyncio.run(run(count, args.in_flight, folder / name))
            meter.stop()
    more = {"parts_ms": meter.parts_ms(args.n), "by": meter.by, "versions": versions(["harbor"])}
    emit(result("harbor, oracle", args.n, args.in_flight, meter, **more))


if __name__ == "__main__":
    main()
