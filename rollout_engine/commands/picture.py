"""Draws how a run stands: a headline, and a table each for hosts, models, phases, slow rollouts and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollout_engine.commands import text
from rollout_engine.commands.report import shown_path
from rollout_engine.commands.standing import GONE, STARTING, Standing
from rollout_engine.commands.tables import STATUS_STYLES, plain_table
from rollout_engine.status import HostStatus, ModelStatus, ProgressStatus, Status

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN_HOSTS = 16
"""Hosts that are listed, the longest silent first; --json has more."""
TEXT_WIDTH = 60
"""Columns of an error's example."""
STYLES = {**STATUS_STYLES, "draining": "yellow", "behind": "yellow", STARTING: "cyan", GONE: "bold red"}


def draw(standing: Standing) -> list[RenderableType]:
    """The whole picture, top to bottom."""
    from rich.text import Text

    state = standing.state
    head = Text.assemble((shown_path(standing.path), "bold"), "  ", (state, STYLES.get(state, "")))
    parts: list[RenderableType] = [head]
    remark, status = standing.remark(), standing.status
    if remark:
        parts.append(Text(text.safe(remark), style="red" if state == GONE else "yellow"))
    if status is not None:
        if standing.age_s is not None and not standing.alive:
            parts.append(Text(f"as of {text.clock(standing.age_s)} ago", style="dim"))
        parts += [Text(line) for line in progress_lines(status.progress)]
        parts += _tables(status)
        parts += [Text(f"note: {text.safe(note)}", style="yellow") for note in status.notes]
    return parts


def progress_lines(progress: ProgressStatus) -> list[str]:
    """Counts, then rates and amounts."""
    counts = [
        _share(progress),
        f"{text.whole(progress.running)} running",
        f"{text.whole(progress.queued)} queued",
        f"{text.whole(progress.valid)} scored",
    ]
    if progress.failed:
        counts.append(f"{text.whole(progress.failed)} failed")
    if progress.verifier_errors:
        counts.append(text.plural(progress.verifier_errors, "verifier error"))
    if progress.cancelled:
        counts.append(f"{text.whole(progress.cancelled)} cancelled")
    if progress.retries:
        counts.append(text.plural(progress.retries, "retry"))
    tokens = f"{text.short(progress.prompt_tokens)} + {text.short(progress.completion_tokens)} tokens"
    amounts = [
        text.clock(progress.elapsed_s),
        f"ETA {text.clock(progress.eta_s)}",
        f"{text.short(progress.rate_now)} rollouts/s",
        tokens,
        text.money(progress.cost_usd),
    ]
    return [" · ".join(counts), " · ".join(amounts)]


def line_of(standing: Standing) -> str:
    """All in one line, for logs."""
    if standing.status is None:
        return standing.state
    counts, amounts = progress_lines(standing.status.progress)
    return f"{standing.state} · {counts} · {amounts}"


def _share(progress: ProgressStatus) -> str:
    done = progress.before + progress.done
    if not progress.total:
        return f"{text.whole(done)} done"
    return f"{text.part(done, progress.total)} done ({text.percent(done / progress.total)})"


def _tables(status: Status) -> Iterator[RenderableType]:
    from rich.text import Text

    if status.hosts:
        yield from ("", host_table(status))
    if status.models:
        yield from ("", model_table(status.models))
    if status.phases:
        inner = ", ".join(f"{text.whole(count)} in {text.safe(phase)}" for phase, count in status.phases.items())
        yield from ("", Text(f"phases: {inner}"))
    if status.slowest:
        yield from ("", slow_table(status))
    if status.errors:
        yield from ("", error_table(status))


def host_table(status: Status) -> Table:
    table = plain_table(
        ("host", "left"), ("node", "left"), "slots", "held", "running", "heard", "loop lag", ("", "left")
    )
    hosts = sorted(status.hosts, key=lambda host: -host.heard_s)
    for host in sorted(hosts[:SHOWN_HOSTS], key=lambda host: host.host_id):
        table.add_row(text.one_line(host.host_id, 32), text.one_line(host.node, 32), *_host_cells(host))
    if left := len(hosts) - SHOWN_HOSTS + status.more_hosts if len(hosts) > SHOWN_HOSTS else status.more_hosts:
        table.add_row(f"and {text.plural(left, 'other')}", *[""] * 7)
    return table


def _host_cells(host: HostStatus) -> list[str]:
    numbers = [text.whole(host.slots), text.whole(host.held), text.whole(host.running)]
    return [*numbers, f"{text.took(host.heard_s)} ago", text.took(host.loop_lag_s), "draining" if host.draining else ""]


def model_table(models: tuple[ModelStatus, ...]) -> Table:
    table = plain_table(
        ("model", "left"), "in flight", "limit", "waiting", "calls", "429s", "retries", "tokens/s", "tokens", "cost",
        ("breaker", "left"),
    )  # fmt: skip
    for model in models:
        calls = [text.whole(model.in_flight), _limit(model), text.whole(model.waiting), text.short(model.calls)]
        refused = [text.short(model.rate_limited), text.short(model.retries)]
        used = [text.short(model.tokens_per_s), text.short(model.tokens), text.money(model.cost_usd)]
        breaker = text.one_line(f"{model.breaker.replace('_', '-')} {model.breaker_kind}".rstrip(), 40)
        if model.judge:  # what these are of a judge is in its rollouts' rows
            used, breaker = [text.MISSING] * len(used), "judge"
        table.add_row(text.one_line(model.name, 40), *calls, *refused, *used, breaker)
    return table


def _limit(model: ModelStatus) -> str:
    """Calls in flight, and per second; ~ marks limits that are being found out."""
    parts = [] if model.limit is None else [text.whole(model.limit)]
    if model.limit_per_s is not None:
        parts.append(f"{text.short(model.limit_per_s)}/s")
    return ("~" if model.adaptive else "") + " ".join(parts) if parts else text.MISSING


def slow_table(status: Status) -> Table:
    table = plain_table(("slowest", "left"), ("host", "left"), ("phase", "left"), "age", ("waits for", "left"), "since")
    for slow in status.slowest:
        table.add_row(
            text.one_line(slow.rollout, 48),
            text.one_line(slow.host_id, 24),
            text.one_line(slow.phase, 12),
            text.took(slow.age_s),
            text.one_line(slow.waits_for, TEXT_WIDTH),
            text.took(slow.since_s),
        )
    return table


def error_table(status: Status) -> Table:
    table = plain_table(("no score", "left"), "rollouts", ("for example", "left"), ("of", "left"))
    for error in status.errors:
        table.add_row(
            text.one_line(error.kind, 48),
            text.whole(error.count),
            text.one_line(error.example, TEXT_WIDTH),
            text.one_line(error.rollout, 40),
        )
    return table
