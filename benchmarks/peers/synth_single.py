"""The work done by synth-ai's evaluation loop: `run_eval_direct`, one rollout of a task app for each seed.

Runs in the environment `synth` of envs.py. The task app is the stub server: it answers POST /rollout after the same
50 ms with the same reward, and is not counted; so asking a model and scoring are not synth-ai's work here. Settings:
`concurrency` as asked, direct mode (its backend mode needs the vendor's service), one request for each seed.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.cases import CACHE, case_arguments
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import API_KEY, MODEL, WARM_UP

os.environ["HOME"] = str(CACHE / "synth-home")  # importing it makes a database below the home folder

from synth_ai.cli.commands.eval.config import EvalRunConfig
from synth_ai.cli.commands.eval.runner import run_eval_direct


async def run(url: str, n: int, in_flight: int) -> Meter:
    """Evaluate n seeds after a warm-up."""
    for count in (WARM_UP, n):
        config = EvalRunConfig(
            app_id="stub",
            task_app_url=url.removesuffix("/v1"),
            task_app_api_key=API_KEY,
            env_name="stub",
            policy_config={"model": MODEL},
            seeds=list(range(count)),
            concurrency=in_flight,
        )
        with Meter() as meter:
            results = await run_eval_direct(config)
        if [result.score for result in results] != [1.0] * count:
            errors = {result.error for result in results if result.error}
            raise SystemExit(f"not every one of {count} seeds scored 1.0: {list(errors)[:3]}")
    return meter


def main() -> None:
    args = case_arguments(__doc__).parse_args()
    meter = asyncio.run(run(args.url, args.n, args.in_flight))
    emit(result("synth-ai, direct", args.n, args.in_flight, meter, versions=versions(["synth-ai", "httpx"])))


if __name__ == "__main__":
    main()
