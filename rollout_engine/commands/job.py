"""`rollout job`: a Ray job carries out the run that it was handed; a job that is tried again goes on with it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rollout_engine.commands.carry import Batch
from rollout_engine.commands.display import make_display
from rollout_engine.commands.place import run_path
from rollout_engine.commands.run import start, tasks_of, title_of
from rollout_engine.commands.source import source_of
from rollout_engine.commands.submit import Orders
from rollout_engine.configcheck import check_config
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, describe


def carry_out(path: Path) -> int:
    """Returns the exit code of `rollout run`. Raises InputError."""
    orders = read_orders(path)
    check_config(orders.config)
    tasks = path.parent / orders.tasks
    source, _ = source_of(tasks, orders.config, orders.pattern, orders.limit)
    run_dir = run_path(orders.run_dir)
    engine = RolloutEngine(config=orders.config, run_dir=run_dir, resume=True)
    title = title_of(run_dir, source.count, orders.config)
    batches = [Batch(tasks_of(source), 0, source.count)]
    return start(engine, batches, source.write, make_display(title, quiet=False, live=False), as_json=False)


def read_orders(path: Path) -> Orders:
    """Raises InputError."""
    try:
        return Orders.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(
            f"is no job of a run: {describe(error)}", where=str(path), fix="`rollout run --detach --ray URL` makes one"
        ) from error
