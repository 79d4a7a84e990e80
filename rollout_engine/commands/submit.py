"""`--detach` with the address of a job server: the run is handed to the Ray cluster behind it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rollout_engine.clusters import JobCluster, make_cluster
from rollout_engine.commands.console import OK, print_json, say
from rollout_engine.commands.source import Source
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.specs import Spec

ORDERS = "job.json"


class Orders(Spec):
    """What a job is told. Its tasks lie beside it."""

    config: RunConfig
    tasks: str
    run_dir: str
    pattern: str | None = None
    limit: int | None = None


def is_job_server(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def submit(config: RunConfig, source: Source, run_dir: str | None, *, as_json: bool) -> int:
    """Hands the run to the job server that `config.ray` names. Raises InputError."""
    if run_dir is None or not ("://" in run_dir or run_dir.startswith("/")):
        raise InputError(
            "a job's run directory must be one that the cluster finds",
            where="-o",
            fix="-o s3://BUCKET/PREFIX, or an absolute path on a disk that the cluster's head has",
        )
    cluster: JobCluster = make_cluster(config)  # type: ignore[assignment]
    tasks = Path(source.path)
    with tempfile.TemporaryDirectory(prefix="rollout-job-") as folder:
        shutil.copy(tasks, Path(folder) / tasks.name)
        orders = Orders(
            config=config.model_copy(update={"ray": "auto"}),
            tasks=tasks.name,
            run_dir=run_dir,
            pattern=source.pattern,
            limit=source.limit,
        )
        (Path(folder) / ORDERS).write_text(orders.model_dump_json(exclude_unset=True))
        job = cluster.submit(f"python -m rollout_engine job {ORDERS}", folder)
    if as_json:
        print_json({"run": run_dir, "job": job, "server": config.ray})
        return OK
    say(f"submitted: {job} at {config.ray}, {run_dir}")
    say(f"  ray job logs {job}   shows what it says\n  rollout attach {run_dir}   shows how it goes, where it is seen")
    return OK
