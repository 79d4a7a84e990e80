"""`rollout serve-model`: an OpenAI-compatible server over scripted or recorded models, until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_engine.commands.console import OK
from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models.server_call import Tasks, tasks_of
from rollout_engine.models.server_process import run_server
from rollout_engine.options import load_config, load_run
from rollout_engine.tasks import check_tasks, read_tasks

KINDS = ("scripted", "replay")
EXAMPLE = "for instance -m weak=scripted:skill=0.4 or -m old=replay:answers.jsonl"


@dataclass(frozen=True, slots=True)
class Served:
    """What was asked for, as it was typed."""

    models: Sequence[str]
    config: Path | None
    tasks: Path | None
    host: str
    port: int
    seed: int
    max_concurrency: int | None


def serve(wanted: Served) -> int:
    """Returns when it is told to end. Raises InputError before it listens."""
    options = load_run(wanted.config, {}, wanted.models)
    models = {model.name: model for model in options.config.models if wanted.models or model.kind in KINDS}
    _check(models)
    tasks = wanted.tasks or (Path(options.tasks) if options.tasks is not None else None)
    known = _known(tasks, wanted.config)
    if tasks is None and any(model.kind == "scripted" for model in models.values()):
        raise InputError("a scripted model gives the tasks' own solutions", "--tasks", "name the file of the tasks")
    run_server(
        models,
        solutions=known.solutions,
        prompts=known.prompts,
        host=wanted.host,
        port=wanted.port,
        seed=wanted.seed,
        max_concurrency=wanted.max_concurrency,
        say=lambda line: _say(line, list(models)),
    )
    return OK


def _check(models: dict[str, ModelSpec]) -> None:
    if not models:
        raise InputError("there is no model to serve", "-m", EXAMPLE)
    for model in models.values():
        if model.kind not in KINDS:
            raise InputError(f"a model of kind {model.kind} cannot be served", f"models.{model.name}", EXAMPLE)


def _known(tasks: Path | None, config: Path | None) -> Tasks:
    if tasks is None:
        return Tasks({}, {})
    check_tasks(tasks, load_config(config))
    return tasks_of(read_tasks(tasks))


def _say(line: str, models: list[str]) -> None:
    """What a caller waits for on stdout, and how a run would use it."""
    url = line.rpartition(" ")[2]
    print(line, flush=True)
    for name in models:
        print(f"  -m {name}=openai:{name}@{url} -m {name}.seed_header=true", flush=True)
