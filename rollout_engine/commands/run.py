"""`rollout run`: everything is checked, then k attempts of every task by every model, then the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollout_engine.commands import text
from rollout_engine.commands.carry import Batch, carry_out
from rollout_engine.commands.console import OK, SOME_FAILED, make_console, print_json
from rollout_engine.commands.detach import detach, telling
from rollout_engine.commands.display import Display, make_display
from rollout_engine.commands.dryrun import forecast, print_forecast
from rollout_engine.commands.place import run_path
from rollout_engine.commands.report import read_report, shown_path
from rollout_engine.commands.source import Source, source_of
from rollout_engine.commands.submit import is_job_server, submit
from rollout_engine.commands.tables import print_report
from rollout_engine.config import KEY_VARIABLES, ModelSpec, RunConfig
from rollout_engine.configcheck import check_config
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError
from rollout_engine.options import load_run
from rollout_engine.specs import Task
from rollout_engine.tasks import read_tasks, select

RUNS = Path("runs")
"""Where runs go that nobody has named."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Whether the driver is this process."""

    detach: bool = False
    tell: int | None = None
    """The descriptor on which whoever has started this process in the background waits for word."""
    arguments: Sequence[str] = ()
    """Of this command, to be given to that process."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for, as it was typed."""

    tasks: Path | None
    config: Path | None
    models: Sequence[str]
    flags: Mapping[str, Any]
    """Dotted field of RunConfig -> value; None: not given."""
    out: str | None
    """A path, or the URI of an object store."""
    pattern: str | None
    limit: int | None


def run(wanted: Wanted, mode: Mode, *, dry_run: bool, as_json: bool, quiet: bool) -> int:
    """Returns the exit code. Raises InputError before anything is written."""
    paths = {"tasks": None if wanted.tasks is None else str(wanted.tasks), "run_dir": wanted.out}
    options = load_run(wanted.config, {**wanted.flags, **paths}, wanted.models)
    if options.tasks is None:
        raise InputError(
            "there are no tasks", fix='name a file: rollout run tasks.jsonl ..., or tasks = "..." in --config'
        )
    check_config(options.config)
    check_prices(options.config)
    source, found = source_of(Path(options.tasks), options.config, wanted.pattern, wanted.limit)
    if dry_run:
        forecasted = forecast(options.config, found, tasks_of(source))
        print_json(forecasted.to_dict()) if as_json else print_forecast(forecasted)
        return OK
    if mode.detach:
        return detached(options.config, source, options.run_dir, mode, as_json=as_json)
    run_dir = run_path(options.run_dir) if options.run_dir is not None else new_run_dir()
    engine = RolloutEngine(config=options.config, run_dir=run_dir)
    title = title_of(run_dir, source.count, options.config)
    opened = source.write if mode.tell is None else telling(mode.tell, source.write)
    display = make_display(title, quiet, mode.tell is None)
    return start(engine, [Batch(tasks_of(source), 0, source.count)], opened, display, as_json=as_json)


def detached(config: RunConfig, source: Source, run_dir: str | None, mode: Mode, *, as_json: bool) -> int:
    """As a job of the cluster whose job server was named, else as a process of its own on this machine."""
    if is_job_server(config.ray):
        return submit(config, source, run_dir, as_json=as_json)
    return detach(mode.arguments, as_json=as_json)


def start(
    engine: RolloutEngine, batches: list[Batch], opened: Callable[[Path], None], display: Display, *, as_json: bool
) -> int:
    """Carries the run out, reports on it, and returns the exit code."""
    code = carry_out(engine, batches, display, opened)
    if not (engine.run_dir / "run.json").exists():
        return code
    return report_on(engine.run_dir, code, as_json=as_json)


def report_on(run_dir: Path, code: int, *, as_json: bool) -> int:
    """Prints what the run directory says; the exit code is 1 where `code` is 0 but not all went well."""
    report = read_report(run_dir)
    if code == OK and not report.complete:
        code = SOME_FAILED
    if as_json:
        print_json({**report.to_dict(), "exit_code": code, "next": [command for command, _ in report.next_steps()]})
    else:
        print_report(make_console(), report)
    return code


def title_of(run_dir: Path, count: int, config: RunConfig) -> str:
    """What heads the progress: where it goes, and how much it is."""
    models = ", ".join(config.model_names)
    return f"{shown_path(run_dir)}  {text.plural(count, 'task')} × {models} × {text.plural(config.k, 'attempt')}"


def tasks_of(source: Source) -> Iterator[Task]:
    """The selected tasks, read as there is room for them; given its path, the engine would check the file again."""
    return select(read_tasks(source.path), pattern=source.pattern, limit=source.limit)


def new_run_dir() -> Path:
    """`runs/20251120-104455`, or with a number where two runs start in the same second."""
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    candidates = (RUNS / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def check_prices(config: RunConfig) -> None:
    """A budget over a model without prices would never be spent. Raises InputError."""
    if config.max_cost_usd is None:
        return
    for model in config.clients:
        if model.kind in KEY_VARIABLES and not _priced(model):
            raise InputError(
                f"the model has no price, so a budget of ${config.max_cost_usd:g} cannot be kept",
                where=f"{model.where}.price_completion",
                fix=f"USD per million tokens: -m {model.name}.price_prompt=2.5 -m {model.name}.price_completion=10",
            )


def _priced(model: ModelSpec) -> bool:
    return model.price_prompt is not None or model.price_completion is not None
