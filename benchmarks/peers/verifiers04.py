"""The work done by verifiers 0.4: `run_eval` with a harness in one of its local runtimes.

    python -m benchmarks.peers.verifiers04 --url URL --harness null|bash|program [--runtime subprocess|docker]

Runs in the environment `verifiers04` of envs.py. A rollout is a program of its own in this design, whose calls go
through an interception server. `null` is its chat program without tools (one turn); `bash` its default, the same
program with a shell (two turns: it writes the file); `program` the tiny agent of our own case, by a harness as its
documentation asks for one (verifiers04_program.py). Its default runtime is its vendor's remote sandbox, which needs an
account: `subprocess` is a process of the host without any isolation, `docker` a container of the image `pybox`.

Settings: `max_concurrent` as asked, the rest as its evaluation command has it, no dashboard, nothing pushed to the
vendor. Traces are written to a file as they end. CPU is that of everything, see everything.py; the programs'
environment, which uv makes, is made in the warm-up, a run of its own in the same process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import CACHE, case_arguments, scratch
from benchmarks.measure import emit, result, versions
from benchmarks.peers.everything import Everything
from benchmarks.work import API_KEY, MODEL

os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(CACHE / "verifiers04-home")}
sys.path.append(str(Path(__file__).parent))  # tasksets and harnesses are found as modules by their names

from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.cli.resolve import narrow_config
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.episode import Episode

KEY_NAME = "STUB_API_KEY"
IMAGE = "pybox"
QUESTIONS, PROGRAM = "verifiers04_questions", "verifiers04_program"
HARNESSES = {"null": ("null", QUESTIONS), "bash": ("bash", PROGRAM), "program": (PROGRAM, PROGRAM)}
"""Our name -> its id, and the taskset."""
RUNTIMES: dict[str, dict[str, Any]] = {"subprocess": {}, "docker": {"image": IMAGE}}


def config(url: str, harness: str, runtime: str, n: int, in_flight: int, folder: Path) -> EvalConfig:
    """What its command line would make of the same settings."""
    ident, tasks = HARNESSES[harness]
    taskset = {"id": tasks, "count": n}
    agent = {"harness": {"id": ident}, "runtime": {"type": runtime, **RUNTIMES[runtime]}}
    settings = {
        "env": {"taskset": taskset, "agent": agent},
        "model": MODEL,
        "client": {"base_url": url, "api_key_var": KEY_NAME},
        "max_concurrent": in_flight,
        "output_dir": folder,
        "push": False,
        "rich": None,
    }
    kind = narrow_config(EvalConfig, ["--env.taskset.id", tasks, "--env.agent.harness.id", ident])
    return kind.model_validate(settings)


def check(episodes: list[Episode], n: int) -> None:
    """Exits unless there are n rewards, all of them 1.0."""
    traces = [trace for episode in episodes for trace in episode.traces]
    found = [trace.reward for trace in traces]
    if found != [1.0] * n:
        raise SystemExit(f"{found.count(1.0)} of {n} rollouts have reward 1.0: {[t.errors for t in traces][:2]}")


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--harness", choices=tuple(HARNESSES), required=True)
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), default="subprocess")
    parser.add_argument("--warm-up", type=int, default=1)
    args = parser.parse_args()
    os.environ[KEY_NAME] = API_KEY
    logging.disable(logging.WARNING)
    with Everything(docker=args.runtime == "docker") as meter, scratch("verifiers04") as folder:
        os.chdir(folder)
        for count in (args.warm_up, args.n):
            asked = config(args.url, args.harness, args.runtime, count, args.in_flight, folder / f"{count}")
            meter.start()
            episodes = asyncio.run(run_eval(asked))
            meter.stop()
            check(episodes, count)
    more = {"parts_ms": meter.parts_ms(args.n), "by": meter.by, "versions": versions(["verifiers", "openai", "uv"])}
    emit(result(f"verifiers 0.4, {args.harness}", args.n, args.in_flight, meter, **more))


if __name__ == "__main__":
    main()
