"""`rollout rewards`: what a run says of each task and of its models, recomputed from the run directory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rollout_engine.commands import text
from rollout_engine.commands.console import OK, make_console, print_json
from rollout_engine.commands.report import Report, read_report
from rollout_engine.commands.tables import closing_lines, fitting, headline, missing_line, print_summary, task_table
from rollout_engine.rewards import groups_table, rewards_table

MAX_TASKS = 40
"""Tasks shown to a person; --all, --csv and --json have every one."""
MAX_REASONS = 5
PER_MODEL = ("n_valid", "mean_score", "pass_rate", "pass_at_k", "learnability")
"""Columns of groups that a CSV line has once for each model."""


def rewards(path: Path, *, everything: bool, as_json: bool, as_csv: bool) -> int:
    """Raises InputError where the path is no run."""
    report = read_report(path)
    groups = groups_table(report.scores, report.config.rewards)
    found = rewards_table(report.scores, report.config.rewards)
    if as_json:
        print_json({**report.to_dict(), "groups": groups.to_pylist(), "rewards": found.to_pylist()})
    elif as_csv:
        _print_csv(report, groups, found)
    else:
        _show(report, groups, found, len(found) if everything else MAX_TASKS)
    return OK


def _print_csv(report: Report, groups: pa.Table, found: pa.Table) -> None:
    import pyarrow.csv as csv

    names = report.config.model_names
    for position, name in enumerate(names):
        mine = groups.take(pa.array(range(position, len(groups), len(names)), pa.int64()))
        for column in PER_MODEL:
            found = found.append_column(f"{column}_{name}", mine[column])
    sys.stdout.flush()
    csv.write_csv(found, sys.stdout.buffer, csv.WriteOptions(quoting_style="needed"))


def _show(report: Report, groups: pa.Table, found: pa.Table, limit: int) -> None:
    console = make_console()
    console.print(headline(report))
    if (line := missing_line(report)) is not None:
        console.print(line, style="yellow")
    if len(found):
        console.print()
        rows, m = min(limit, len(found)), len(report.config.models)
        rounds = len(set(found["round"].to_pylist())) > 1
        shown = groups.slice(0, rows * m).to_pylist()
        rest = found.slice(0, rows).to_pylist()
        console.print(fitting(console, lambda compact: task_table(report, shown, rest, rounds, compact)))
        if rows < len(found):
            console.print(f"… and {len(found) - rows:,} more (--all shows them, --csv and --json have them)")
        for line in _reasons(found):
            console.print(line, style="yellow")
    print_summary(console, report.summary)
    console.print()
    for each in closing_lines(report):
        console.print(each)


def _reasons(found: pa.Table) -> Iterator[str]:
    """Why rewards are null, the most frequent reasons first."""
    counts = Counter(reason for reason in found["null_reason"].to_pylist() if reason is not None)
    if counts:
        yield ""
        yield f"{text.MISSING} stands where there is no value, never for 0:"
    for reason, count in counts.most_common(MAX_REASONS):
        yield f"  {text.plural(count, 'task')}: {reason}"
    if len(counts) > MAX_REASONS:
        yield f"  and {len(counts) - MAX_REASONS:,} other reasons (null_reason in --csv and --json)"
