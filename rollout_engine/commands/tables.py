"""The tables with which a run ends: one line for each model, for each pair of models, for each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollout_engine.commands import text
from rollout_engine.commands.report import Report, shown_path
from rollout_engine.rewards import Estimate, Kind, ModelSummary, Summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

UNBOUNDED = 10_000
"""Columns of a terminal that has room for everything."""
STATUS_STYLES = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def print_report(console: Console, report: Report) -> None:
    """All that is worth seeing at the end of a run, and what to do next."""
    console.print()
    console.print(headline(report))
    print_summary(console, report.summary)
    console.print()
    for line in closing_lines(report):
        console.print(line)
    console.print()
    console.print(steps_table(report.next_steps()))


def headline(report: Report) -> RenderableType:
    """`runs/a  finished  12 tasks × 2 models × 8 attempts = 192 rollouts in 0:12`."""
    from rich.text import Text

    m, k = len(report.config.models), report.config.k
    slots = report.planned // (m * k)
    of = f"{text.plural(slots, 'task')} × {text.plural(m, 'model')} × {text.plural(k, 'attempt')}"
    rounds = len(set(report.scores.rounds.tolist()))
    if rounds > 1:
        of = f"{text.plural(report.summary.tasks, 'task')} in {rounds} rounds × {m} models × {k} attempts"
    head = Text.assemble(
        (shown_path(report.path), "bold"),
        "  ",
        (report.status, STATUS_STYLES.get(report.status, "")),
        f"  {of} = {text.plural(report.planned, 'rollout')}",
    )
    if report.seconds is not None:
        head.append(f" in {text.clock(report.seconds)}")
    return head


def print_summary(console: Console, found: Summary) -> None:
    """A line for each model, and for each pair of them."""
    console.print()
    console.print(fitting(console, lambda compact: model_table(found, compact)))
    if found.pairs:
        console.print()
        console.print(pair_table(found))


def fitting(console: Console, make: Callable[[bool], Table]) -> Table:
    """The full table where the terminal has room for it, else the compact one."""
    table = make(False)
    return table if natural_width(console, table) <= console.width else make(True)


def natural_width(console: Console, table: Table) -> int:
    """What a table would like to have."""
    return table.__rich_measure__(console, console.options.update(width=UNBOUNDED)).maximum


def shrink(console: Console, table: Table, column: int) -> None:
    """Where a table is too wide, this column gives way, so that no other is cut."""
    if natural_width(console, table) > console.width:
        table.expand, table.columns[column].ratio, table.columns[column].max_width = True, 1, None


def plain_table(*columns: str | tuple[str, str]) -> Table:
    """A table with one rule under its head. A column is its header, or (header, justify)."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        header, justify = (column, "right") if isinstance(column, str) else column
        table.add_column(header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def model_table(found: Summary, compact: bool = False) -> Table:
    """Strongest first, as they were given. Compact: without standard errors."""
    k, shown = found.k, _value if compact else plus_minus
    several = [f"pass@{k}", f"pass^{k}"] if k > 1 else []
    troubles = [name for name in ("failed", "verifier_errors", "cancelled", "pending") if _any(found, name)]
    heads = [name.replace("verifier_errors", "verifier errors").replace("pending", "to do") for name in troubles]
    table = plain_table(("model", "left"), "valid", *heads, "mean score", "pass@1", *several, "learnability")
    for model in found.models:
        cells = [model.model, text.part(model.valid, model.requested)]
        cells += [text.whole(getattr(model, name)) for name in troubles]
        cells += [shown(each) for each in (model.mean_score, model.pass_at_1, *_several(model, k), model.learnability)]
        table.add_row(*cells)
    return table


def _any(found: Summary, name: str) -> bool:
    return any(getattr(model, name) for model in found.models)


def _several(model: ModelSummary, k: int) -> list[Estimate]:
    return [model.pass_at_k, model.pass_all_k] if k > 1 else []


def _value(estimate: Estimate) -> str:
    return text.score(estimate.value)


def plus_minus(estimate: Estimate) -> str:
    """`0.812 ± 0.031`: the standard error after the value, where there is one."""
    if estimate.value is None:
        return text.MISSING
    error = f" ± {text.score(estimate.se)}" if estimate.se is not None else ""
    return text.score(estimate.value) + error


def interval(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return text.MISSING
    return f"[{text.score(low)}, {text.score(high)}]"


def pair_table(found: Summary) -> Table:
    """What sets each two models apart, over the tasks that both have been scored on."""
    level = f"{found.confidence * 100:g} % interval"
    what = "separation" if found.ordered else "difference"
    table = plain_table(("pair", "left"), what, level, "superiority", "tasks")
    for pair in found.pairs:
        estimate = pair.separation
        table.add_row(
            f"{pair.first} − {pair.second}",
            text.score(estimate.value),
            interval(estimate.low, estimate.high),
            text.score(pair.superiority.value),
            text.whole(estimate.n),
        )
    return table


def closing_lines(report: Report) -> Iterator[RenderableType]:
    """Reward, coverage, failures by kind, and what it took: one line each, where there is something to say."""
    from rich.text import Text

    found = report.summary
    if found.reward.value is not None:
        over = f"over {text.whole(found.reward.n)} of {text.plural(found.tasks, 'task')}"
        yield Text(f"reward     {plus_minus(found.reward)}  {over}  ({formula(report)})")
    yield Text(f"coverage   {text.percent(found.coverage)}  ({text.part(found.valid, report.planned)} rollouts scored)")
    if report.failures:
        yield Text(f"no score   {text.kinds(report.failures, most=5)}", style="red")
    yield Text(f"took       {_took(report)}")


def formula(report: Report) -> str:
    """The combined reward in the run's own weights."""
    spec, names = report.config.rewards, report.config.model_names
    terms = [f"{spec.w_learnability:g} · learnability of {spec.policy or names[-1]}"] if spec.w_learnability else []
    if spec.alpha and len(names) > 1:
        terms.append(f"{spec.alpha:g} · {'separation' if spec.ordered else 'between-model variance'}")
    return " + ".join(terms) or "all weights are 0"


def _took(report: Report) -> str:
    tokens = f"{text.short(report.prompt_tokens)} prompt + {text.short(report.completion_tokens)} completion tokens"
    parts = [tokens]
    if report.cost_usd is not None:
        parts.append(text.money(report.cost_usd))
    if report.seconds:
        parts.append(f"{text.short(report.rows / report.seconds)} rollouts/s")
    return ", ".join(parts)


def steps_table(steps: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    table.add_column()
    for command, what in steps:
        table.add_row(Text(command, style="cyan"), Text(what, style="dim"))
    return table


def task_table(
    report: Report, groups: list[dict[str, Any]], rewards: list[dict[str, Any]], rounds: bool, compact: bool = False
) -> Table:
    """One line per task and round: `groups` are the m rows of each of `rewards`, in the same order."""
    names = report.config.model_names
    pair = ["separation", f"{report.config.rewards.confidence * 100:g} % interval"] if len(names) > 1 else []
    first: list[str | tuple[str, str]] = [*(["round"] if rounds else []), ("task", "left")]
    learnability = [f"learn.\n{name}" if compact else f"learnability\nof {name}" for name in names]
    table = plain_table(*first, *learnability, *pair, "reward", "coverage")
    table.columns[len(first) - 1].max_width = 48
    table.columns[len(first) - 1].overflow = "ellipsis"
    for row, reward in enumerate(rewards):
        mine = groups[row * len(names) : (row + 1) * len(names)]
        cells = [*([str(reward["round"])] if rounds else []), text.safe(reward["task_id"])]
        cells += [text.score(group["learnability"]) for group in mine]
        if pair:
            cells += [text.score(reward["separation"]), interval(reward["separation_low"], reward["separation_high"])]
        table.add_row(*cells, text.score(reward["reward"]), text.percent(reward["coverage"]))
    return table


def missing_line(report: Report) -> str | None:
    """That a table is not the whole of it, where the run goes on or was interrupted."""
    if not report.missing:
        return None
    done = text.part(report.rows, report.planned)
    cancelled = report.count(Kind.CANCELLED)
    also = f", {text.whole(cancelled)} of them cancelled" if cancelled else ""
    return f"The run is {report.status}: {done} rollouts have a row{also}; what follows is of these."
