"""The work done by verifiers: `SingleTurnEnv.evaluate` in process, scored by a rubric over a parser with our regex.

Runs in the environment `verifiers` of envs.py. Settings: `ClientConfig` as it is (its pool holds 28,000 connections),
`max_concurrent` as asked, no progress bar, in process (its env server costs more CPU for each rollout).
With --save, `save_results=True` writes each rollout to results.jsonl as it ends, which is not synced to the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

from benchmarks.cases import case_arguments, scratch
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import API_KEY, EXPECTED, MODEL, PATTERN, WARM_UP, question

os.environ |= {"OPENAI_API_KEY": API_KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def captured(text: str) -> str | None:
    """The pattern's capture in an answer."""
    found = re.search(PATTERN, text)
    return found.group(1) if found else None


def exact_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """The rubric's one reward function."""
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


def environment(n: int) -> vf.SingleTurnEnv:
    """An environment of n questions."""
    rows = [{"question": question(index), "answer": EXPECTED} for index in range(n)]
    parser = vf.Parser(extract_fn=captured)
    rubric = vf.Rubric(funcs=[exact_match], parser=parser)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)


async def evaluate(env: vf.SingleTurnEnv, url: str, n: int, in_flight: int, save: Path | None) -> list[float]:
    """The rewards of one evaluation of n questions."""
    done = await env.evaluate(
        client=ClientConfig(api_base_url=url, api_key_var="OPENAI_API_KEY"),
        model=MODEL,
        num_examples=n,
        rollouts_per_example=1,
        max_concurrent=in_flight,
        save_results=save is not None,
        results_path=save,
        on_start=lambda *_: None,
    )
    return [output["reward"] for output in done["outputs"]]


async def run(url: str, n: int, in_flight: int, folder: Path | None) -> Meter:
    """Evaluate n questions after a warm-up."""
    for count in (WARM_UP, n):
        env = environment(count)
        with Meter() as meter:
            rewards = await evaluate(env, url, count, in_flight, folder and folder / f"{count}")
        if rewards != [1.0] * count:
            raise SystemExit(f"{rewards.count(1.0)} of {count} rollouts have reward 1.0 ({len(rewards)} results)")
    return meter


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--save", action="store_true", help="save the results as they arrive")
    args = parser.parse_args()
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    with scratch("verifiers") as folder:
        os.chdir(folder)
        meter = asyncio.run(run(args.url, args.n, args.in_flight, folder if args.save else None))
    name = "verifiers, results saved" if args.save else "verifiers, nothing saved"
    packages = versions(["verifiers", "openai", "httpx"])
    emit(result(name, args.n, args.in_flight, meter, versions=packages))


if __name__ == "__main__":
    main()
