"""What a run directory says of its run, finished or not: counts, failures by kind, and the summary of its scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.commands import text
from rollout_engine.commands.source import Source, read_source
from rollout_engine.config import RunConfig
from rollout_engine.rewards import Kind, Scores, Summary, summary
from rollout_engine.runstore import read_scores
from rollout_engine.spending import JUDGED, THROWN, USED, all_used_by
from rollout_engine.store import RunDir, named, open_run
from rollout_engine.types import Status


@dataclass(frozen=True, slots=True)
class Report:
    """A run at one moment. Counts are of rollouts."""

    run: RunDir
    status: str
    """running, finished, interrupted or failed; a run whose driver is gone without a word is interrupted."""
    source: Source | None
    scores: Scores
    summary: Summary
    planned: int
    """All that the run was asked for, where that is known; else what is planned so far."""
    failures: dict[str, int]
    """`boundary:type` of rollouts without a score, verifier errors among them."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    seconds: float | None
    """From the first rollout's planning to the last one's end."""

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def config(self) -> RunConfig:
        return self.run.info.config

    def count(self, kind: Kind) -> int:
        return int((self.scores.kinds == kind).sum())

    @property
    def rows(self) -> int:
        return int((self.scores.kinds != Kind.NONE).sum())

    @property
    def missing(self) -> int:
        """Rollouts that were asked for and have no row yet."""
        return self.planned - self.rows

    @property
    def complete(self) -> bool:
        """Every planned rollout has a row, and none of them failed or was given up."""
        return not (self.missing or self.count(Kind.FAILED) or self.count(Kind.CANCELLED))

    def next_steps(self) -> list[tuple[str, str]]:
        """(command, what it does), most urgent first."""
        path = shown_path(self.path)
        steps = []
        failed = self.count(Kind.FAILED) + self.count(Kind.CANCELLED) + self.count(Kind.VERIFIER_ERROR)
        if self.missing and self.status != "running":
            steps.append((f"rollout resume {path}", f"go on: {text.plural(self.missing, 'rollout')} to do"))
        if failed and self.status != "running":
            steps.append(
                (f"rollout resume {path} --failed", f"run {text.plural(failed, 'rollout')} without score again")
            )
        steps.append((f"rollout rewards {path}", "the reward of each task"))
        steps.append((f"rollout show {path}", "the rollouts themselves"))
        return steps

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "run_id": self.run.run_id,
            "run_dir": named(self.path.absolute()),
            "status": self.status,
            "models": list(self.config.model_names),
            "k": self.config.k,
            "planned": self.planned,
            "rows": self.rows,
            "missing": self.missing,
            "valid": self.count(Kind.VALID),
            "failed": self.count(Kind.FAILED),
            "verifier_errors": self.count(Kind.VERIFIER_ERROR),
            "cancelled": self.count(Kind.CANCELLED),
            "failures": self.failures,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": self.cost_usd,
            "seconds": self.seconds,
            "summary": self.summary.to_dict(),
        }


def shown_path(path: Path) -> str:
    """As one would type it from here."""
    import shlex

    if (uri := named(path)) != str(path):
        return shlex.quote(uri)
    absolute, here = path.absolute(), Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) and absolute != here else path))


def read_report(path: Path) -> Report:
    """Raises InputError where the path is no run, RunError where a file of it is damaged."""
    run = open_run(path)
    scores = read_scores(run)
    source = read_source(path)
    planned = scores.kinds.size
    if source is not None:
        planned = max(planned, source.count * run.space.per_slot)
    return Report(
        run=run,
        status=_status(run),
        source=source,
        scores=scores,
        summary=summary(scores, run.info.config.rewards),
        planned=planned,
        **_facts(run),
    )


def _status(run: RunDir) -> str:
    if run.info.status == "running" and run.driver() is None:
        return "interrupted"
    return run.info.status


def _facts(run: RunDir) -> dict[str, Any]:
    names = ["status", "score", "failure_boundary", "failure_type", *USED, *THROWN, *JUDGED]
    rows = run.rollouts([*names, "queued_at", "ended_at"])
    used = all_used_by(rows)
    return {
        "failures": _failures(rows),
        **used._asdict(),
        "seconds": _seconds(rows),
    }


def _failures(rows: pa.Table) -> dict[str, int]:
    rows = rows.filter(pc.is_null(rows["score"])).select(["status", "failure_boundary", "failure_type"])
    counts: Counter[str] = Counter()
    for found in rows.group_by(rows.column_names).aggregate([([], "count_all")]).to_pylist():
        kind = f"{found['failure_boundary']}:{found['failure_type']}"
        if found["failure_type"] is None:
            kind = "cancelled" if found["status"] == Status.CANCELLED else "no reason given"
        counts[kind] += found["count_all"]
    return dict(counts.most_common())


def _seconds(rows: pa.Table) -> float | None:
    if not rows.num_rows:
        return None
    first, last = pc.min(rows["queued_at"]).as_py(), pc.max(rows["ended_at"]).as_py()
    return float((last - first).total_seconds())
