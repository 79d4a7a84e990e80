"""The work done by verifiers 0.4: `run_eval` with its harness `null` in its runtime `subprocess`, single turn.

Runs in the environment `verifiers04` of envs.py. Settings: `max_concurrent` as asked, harness and runtime as its
evaluation command has them for a task without tools, no dashboard, nothing pushed to the vendor. A rollout is a program
of its own in this design: an interpreter is started for each, and its calls go through an interception server; its
traces are written to a file as they end. The program's environment, which uv makes, is made in the warm-up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from benchmarks.cases import CACHE, case_arguments, scratch
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import API_KEY, MODEL

os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(CACHE / "verifiers04-home")}
sys.path.append(str(Path(__file__).parent))  # the taskset is found as a module by its name

from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.cli.resolve import narrow_config
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.episode import Episode

KEY_NAME = "STUB_API_KEY"


def config(url: str, n: int, in_flight: int, folder: Path) -> EvalConfig:
    """What its command line would make of the same settings."""
    taskset = {"id": "verifiers04_questions", "count": n}
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {
        "env": {"taskset": taskset, "agent": agent},
        "model": MODEL,
        "client": {"base_url": url, "api_key_var": KEY_NAME},
        "max_concurrent": in_flight,
        "output_dir": folder,
        "push": False,
        "rich": None,
    }
    kind = narrow_config(EvalConfig, ["--env.taskset.id", taskset["id"], "--env.agent.harness.id", "null"])
    return kind.model_validate(settings)


def rewards(episodes: list[Episode]) -> list[float]:
    return [trace.reward for episode in episodes for trace in episode.traces]


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--warm-up", type=int, default=1)
    args = parser.parse_args()
    os.environ[KEY_NAME] = API_KEY
    logging.disable(logging.WARNING)
    with scratch("verifiers04") as folder:
        os.chdir(folder)
        for count in (args.warm_up, args.n):
            asked = config(args.url, count, args.in_flight, folder / f"{count}")
            with Meter() as meter:
                episodes = asyncio.run(run_eval(asked))
            found = rewards(episodes)
            if found != [1.0] * count:
                errors = [trace.errors for episode in episodes for trace in episode.traces][:2]
                raise SystemExit(f"{found.count(1.0)} of {count} rollouts have reward 1.0: {errors}")
    packages = versions(["verifiers", "openai", "uv"])
    emit(result("verifiers 0.4, null", args.n, args.in_flight, meter, versions=packages))


if __name__ == "__main__":
    main()
