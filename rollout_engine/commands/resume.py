"""`rollout resume`: goes on with a run where its last driver stopped, with the same tasks and the same config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_engine.commands import text
from rollout_engine.commands.carry import Batch
from rollout_engine.commands.console import OK, say
from rollout_engine.commands.detach import detach, telling
from rollout_engine.commands.display import make_display
from rollout_engine.commands.report import Report, read_report
from rollout_engine.commands.run import Mode, check_prices, report_on, start, tasks_of, title_of
from rollout_engine.commands.source import Source, read_source
from rollout_engine.config import RunConfig
from rollout_engine.configcheck import check_config
from rollout_engine.engine import RolloutEngine
from rollout_engine.modelflags import apply_flags, parse_flag
from rollout_engine.options import load_config
from rollout_engine.problems import checked
from rollout_engine.rewards import Kind
from rollout_engine.store import RunDir, open_run

WITHOUT_SCORE = (Kind.FAILED, Kind.CANCELLED, Kind.VERIFIER_ERROR)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for, as it was typed."""

    path: Path
    config: Path | None
    models: Sequence[str]
    flags: Mapping[str, Any]
    tasks_file: Path | None
    failed: bool


def resume(wanted: Wanted, mode: Mode, *, as_json: bool, quiet: bool) -> int:
    """Returns the exit code. Raises InputError before anything is written."""
    run = open_run(wanted.path)
    config = _config(run, wanted)
    check_config(config)
    check_prices(config)
    run.adopt(config)
    source = read_source(wanted.path)
    if source is not None:
        source = source.check(config, wanted.tasks_file)
    if run.info.status == "finished":  # any other may have all its rows, but not their tables
        report = read_report(wanted.path)
        if run.driver() is None and run.has_tables() and not _left(report, wanted.failed):
            say(_nothing(report, wanted.failed))
            return report_on(wanted.path, OK, as_json=as_json)
    if mode.detach:
        return detach(mode.arguments, as_json=as_json)
    engine = RolloutEngine(config=config, run_dir=wanted.path, resume=True, retry_failed=wanted.failed)
    batch = Batch(tasks_of(source), 0, source.count, go_on=True) if source is not None else _planned(run)
    title = title_of(wanted.path, batch.total or 0, config)
    remember = _remember(source, wanted)
    opened = remember if mode.tell is None else telling(mode.tell, remember)
    return start(engine, [batch], opened, make_display(title, quiet, mode.tell is None), as_json=as_json)


def _config(run: RunDir, wanted: Wanted) -> RunConfig:
    """The run's own config with the flags over it, or the file given. What would mix results the store refuses."""
    if wanted.config is not None:
        return load_config(wanted.config, wanted.flags, wanted.models)
    fields = run.info.config.model_dump(exclude_unset=True)
    models = {model["name"]: model for model in fields.pop("models")}
    apply_flags(models, [parse_flag(flag) for flag in wanted.models])
    fields["models"] = [{**model, "name": name} for name, model in models.items()]
    for name, value in wanted.flags.items():
        if value is not None:
            *tables, last = name.split(".")
            table = fields
            for part in tables:
                table = table.setdefault(part, {})
            table[last] = value
    return checked(RunConfig, fields)


def _left(report: Report, failed: bool) -> bool:
    return report.missing > 0 or (failed and any(report.count(kind) for kind in WITHOUT_SCORE))


def _nothing(report: Report, failed: bool) -> str:
    without = sum(report.count(kind) for kind in WITHOUT_SCORE)
    hint = f"; --failed runs {text.plural(without, 'rollout')} without score again" if without and not failed else ""
    return f"nothing to do: every rollout has a row{hint}"


def _planned(run: RunDir) -> Batch:
    """Without the tasks' source (a run from Python): what was planned so far."""
    say("the run was not started by `rollout run`: going on with the tasks planned so far")
    with closing(run.plan()) as plan:
        return Batch((), 0, len(plan), go_on=True)


def _remember(source: Source | None, wanted: Wanted) -> Any:
    """Where the tasks were found in another place, the next resume looks there."""

    def opened(run_dir: Path) -> None:
        if source is not None and wanted.tasks_file is not None:
            source.write(run_dir)

    return opened
