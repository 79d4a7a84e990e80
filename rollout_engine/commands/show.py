"""`rollout show`: an overview of a run's tasks, a list of rollouts, or one of them as a person reads it."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.commands import text
from rollout_engine.commands.console import OK, make_console, print_json
from rollout_engine.commands.report import Report, read_report, shown_path
from rollout_engine.commands.rollout_view import print_rollout, rollout_document
from rollout_engine.commands.tables import headline, missing_line, plain_table, shrink
from rollout_engine.errors import InputError
from rollout_engine.rewards import Kind
from rollout_engine.store import RunDir

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_ROWS = 40
"""Lines of a list; --full leaves none out."""
MAX_MARKS = 24
"""Attempts of a group that are drawn one by one; of more, the counts are shown."""
MARKS = {
    Kind.VALID: ("✗", "red"),
    Kind.VERIFIER_ERROR: ("?", "magenta"),
    Kind.FAILED: ("!", "yellow"),
    Kind.CANCELLED: ("c", "yellow"),
    Kind.NONE: ("·", "dim"),
}
PASSED = ("✓", "green")
LEGEND = "✓ passed  ✗ not passed  ? verifier error  ! failed  c cancelled  · no row yet"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which rollouts are meant; None: all."""

    task: str | None = None
    model: str | None = None
    attempt: int | None = None
    round: int | None = None

    @property
    def narrowed(self) -> bool:
        return self != Chosen()


def show(path: Path, chosen: Chosen, *, full: bool, as_json: bool) -> int:
    """Raises InputError where the path is no run, or nothing of it is meant."""
    report = read_report(path)
    if not chosen.narrowed and not as_json:
        _overview(report, full)
        return OK
    rows = _rows(report, chosen)
    if len(rows) == 1:
        document = rollout_document(report.run, rows.to_pylist()[0])
        print_json(document) if as_json else print_rollout(report.run, document, full=full)
    elif as_json:
        print_json({**report.to_dict(), "rollouts": rows.to_pylist()})
    else:
        _list(report.run, rows, full)
    return OK


# -- an overview ------------------------------------------------------------------------------------------------


def _overview(report: Report, full: bool) -> None:
    console, scores = make_console(), report.scores
    console.print(headline(report))
    if (line := missing_line(report)) is not None:
        console.print(line, style="yellow")
    if not len(scores.task_ids):
        return
    console.print()
    rounds = len(set(scores.rounds.tolist())) > 1
    first: list[str | tuple[str, str]] = [*(["round"] if rounds else []), ("task", "left")]
    table = plain_table(*first, *((name, "left") for name in scores.models))
    _bound(table, len(first) - 1)
    rows = len(scores.task_ids) if full else min(MAX_ROWS, len(scores.task_ids))
    for slot in range(rows):
        cells = [str(scores.rounds[slot])] if rounds else []
        marks = [_group(report, slot, model) for model in range(len(scores.models))]
        table.add_row(*cells, text.safe(str(scores.task_ids[slot])), *marks)
    console.print(table)
    if rows < len(scores.task_ids):
        console.print(f"… and {len(scores.task_ids) - rows:,} more (--full shows them)")
    console.print()
    console.print(LEGEND, style="dim")
    example = f"rollout show {shown_path(report.path)} TASK [--model NAME] [--attempt N]"
    console.print(f"{example} shows the rollouts of a task, and one of them turn by turn", style="dim")


def _group(report: Report, slot: int, model: int) -> Text:
    """The attempts of a group: a mark for each, or how many of each kind."""
    from rich.text import Text

    kinds, passed = report.scores.kinds[slot, model], report.scores.passed[slot, model]
    marks = [PASSED if ok else MARKS[Kind(int(kind))] for kind, ok in zip(kinds, passed, strict=True)]
    if len(marks) <= MAX_MARKS:
        return Text.assemble(*marks)
    order = dict.fromkeys([PASSED, *MARKS.values()])
    return Text(" ").join(Text(f"{mark[0]}{marks.count(mark)}", mark[1]) for mark in order if mark in marks)


def _bound(table: Table, column: int) -> None:
    table.columns[column].max_width = 48
    table.columns[column].overflow = "ellipsis"


# -- a list -----------------------------------------------------------------------------------------------------


def _rows(report: Report, chosen: Chosen) -> pa.Table:
    """The chosen rollouts, in order of round, task, model and attempt. Raises InputError where there are none."""
    run = report.run
    _check(run, chosen)
    table = run.rollouts()
    keep = np.ones(len(table), np.bool_)
    if chosen.task is not None:
        keep &= _matching(table["task_id"], chosen.task)
    for name, value in (("model", chosen.model), ("attempt", chosen.attempt), ("round", chosen.round)):
        if value is not None:
            keep &= pc.equal(table[name], value).to_numpy()
    table = table.filter(pa.array(keep))
    if not len(table):
        planned = chosen.task is not None and _matching(pa.chunked_array([report.scores.task_ids]), chosen.task).any()
        raise InputError(
            "there is no such rollout" + (" yet" if planned and report.missing else ""),
            where=run.where,
            fix=f"`rollout show {shown_path(run.path)}` lists the tasks",
        )
    rank = pc.index_in(table["model"], pa.array(run.info.config.model_names))
    order = [("round", "ascending"), ("task_id", "ascending"), ("rank", "ascending"), ("attempt", "ascending")]
    return table.append_column("rank", rank).sort_by(order).drop_columns(["rank"])


def _check(run: RunDir, chosen: Chosen) -> None:
    names, k = run.info.config.model_names, run.space.k
    if chosen.model is not None and chosen.model not in names:
        raise InputError(f"the run has no model {chosen.model!r}", "--model", f"it has {', '.join(names)}")
    if chosen.attempt is not None and not 0 <= chosen.attempt < k:
        raise InputError(f"the run has no attempt {chosen.attempt}", "--attempt", f"it has 0 to {k - 1}")


def _matching(ids: pa.ChunkedArray, task: str) -> Any:
    """Whether each id is meant: an id that is there is taken as it is, though it may look like a pattern."""
    exact = pc.equal(ids, task).to_numpy()
    if exact.any():
        return exact
    matches = re.compile(fnmatch.translate(task)).match
    chosen = [name for name in pc.unique(ids).to_pylist() if matches(name)]
    return pc.is_in(ids, pa.array(chosen, pa.string())).to_numpy()


def _list(run: RunDir, rows: pa.Table, full: bool) -> None:
    console = make_console()
    shown = rows if full else rows.slice(0, MAX_ROWS)
    rounds = len(pc.unique(rows["round"])) > 1
    left = [(name, "left") for name in ("task", "model")]
    table = plain_table(
        *(["round"] if rounds else []), *left, "attempt", ("status", "left"), "score", "turns", "tokens", "time",
        ("answer, or why there is no score", "left"),
    )  # fmt: skip
    _bound(table, 1 if rounds else 0)
    table.columns[-1].max_width, table.columns[-1].overflow = 60, "ellipsis"
    for row in shown.to_pylist():
        table.add_row(*([str(row["round"])] if rounds else []), *_line(row))
    shrink(console, table, -1)
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"… and {len(rows) - len(shown):,} more (--full shows them)")
    path = shown_path(run.path)
    console.print()
    console.print(f"rollout show {path} TASK --model NAME --attempt N shows one of them turn by turn", style="dim")


def _line(row: dict[str, Any]) -> list[Text | str]:
    from rich.text import Text

    mark, style = _mark(row)
    why = f"{row['failure_boundary']}:{row['failure_type']}: {row['failure_message'] or ''}"
    last = why if row["failure_type"] is not None else row["final_answer"] or ""
    seconds = (row["ended_at"] - row["started_at"]).total_seconds()
    return [
        Text(text.safe(row["task_id"])),
        row["model"],
        str(row["attempt"]),
        Text(f"{mark} {row['status']}", style),
        text.score(row["score"]),
        str(row["num_turns"]),
        text.short(row["prompt_tokens"] + row["completion_tokens"]),
        text.took(seconds),
        Text(text.one_line(last, 60)),
    ]


def _mark(row: dict[str, Any]) -> tuple[str, str]:
    if row["score"] is not None:
        return PASSED if row["passed"] else MARKS[Kind.VALID]
    if row["status"] in ("completed", "truncated"):
        return MARKS[Kind.VERIFIER_ERROR]
    return MARKS[Kind.CANCELLED if row["status"] == "cancelled" else Kind.FAILED]
