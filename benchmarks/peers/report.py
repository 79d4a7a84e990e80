"""What is made of the peers' records: tables with ratios to ours, the README's block, the chart's data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import median, number, spread, table
from benchmarks.peers.groups import Case, Group

BEGIN, END = "<!-- bench-peers: begin (made by make bench-peers) -->", "<!-- bench-peers: end -->"
COST = "cpu_ms_per_rollout"
Record = dict[str, Any]


def of(case: Case, group: Group, records: Sequence[Record]) -> list[Record]:
    """The records of a case that are runs, not failures."""
    return [
        record
        for record in records
        if record["group"] == group.key and record["case"] == case.name and "failed" not in record
    ]


def failure(case: Case, group: Group, records: Sequence[Record]) -> str | None:
    """Why a case has no figures, or ran fewer times than the others; None where nothing went wrong."""
    said = [r["failed"] for r in records if r["group"] == group.key and r["case"] == case.name and "failed" in r]
    return said[0] if said else None if of(case, group, records) else "not asked for"


def ratio(case: Case, group: Group, records: Sequence[Record]) -> float | None:
    """CPU for each, as a multiple of the case of ours that it is compared with; None where either has no figures."""
    base = next(one for one in group.cases if one.name == (case.against or group.cases[0].name))
    runs, ours = of(case, group, records), of(base, group, records)
    return median(runs, COST) / median(ours, COST) if runs and ours else None


def rows(group: Group, records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each case of a group, in its order; a case without figures says why."""
    return [row(case, group, records) for case in group.cases]


def row(case: Case, group: Group, records: Sequence[Record]) -> dict[str, Any]:
    runs, why = of(case, group, records), failure(case, group, records)
    times = ratio(case, group, records)
    against = f" ({case.against})" if case.against and times is not None else ""
    return {
        "what": case.name,
        "version": next(iter(runs[0]["versions"].values()), "") if runs else "",
        f"CPU ms / {group.unit}": median(runs, COST) if runs else "not run",
        "low-high": spread(runs, COST) if runs else "",
        "x ours": "" if times is None else number(times) + against,
        "per s": median(runs, "rate") if runs else None,
        "n": runs[0]["n"] if runs else None,
        "in flight": runs[0]["in_flight"] if runs else None,
        "load": median(runs, "load") if runs else None,
        "settings; what is kept": case.settings if why is None else f"{missing(len(runs))}: {one_line(why)}",
    }


def missing(runs: int) -> str:
    return f"failed after {runs} good runs" if runs else "not run"


def one_line(text: str, limit: int = 200) -> str:
    """The end of a message, where the reason is, fit for a cell of a table."""
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) <= limit else "... " + flat[-limit:]


def parts(group: Group, records: Sequence[Record]) -> list[str]:
    """Where the CPU of each case with several parts went, medians: `name: case 1.0 + daemon 2.0 ms`."""
    lines = []
    for case in group.cases:
        runs = [run["parts_ms"] for run in of(case, group, records) if len(run.get("parts_ms", ())) > 1]
        if runs:
            said = " + ".join(f"{part} {number(median(runs, part))}" for part in runs[0])
            lines.append(f"{case.name}: {said} ms")
    return lines


def section(group: Group, records: Sequence[Record]) -> str:
    """One group as Markdown."""
    lines = [f"### {group.title}", "", f"Counted: {group.counted}.", "", table(rows(group, records))]
    if said := parts(group, records):
        lines += ["", "```", *said, "```"]
    return "\n".join(lines)


def described(machine: Mapping[str, Any], runs: int) -> str:
    """The machine in a sentence."""
    return (
        f"Medians of {runs} runs, the cases taking turns, on {machine['cores']} cores ({machine['cpu']}, "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}), Python {machine['python']}; load at each case's start "
        "in its row. `x ours`: CPU as a multiple of the first row's, or of the row that is named."
    )


def report(groups: Sequence[Group], records: Sequence[Record], machine: Mapping[str, Any], runs: int) -> str:
    """All tables, as Markdown."""
    return "\n\n".join([described(machine, runs), *(section(group, records) for group in groups)])


def replaced(readme: str, block: str) -> str:
    """A text with what is between the markers replaced. Raises ValueError unless both are there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"the text must hold {BEGIN!r} and, after it, {END!r}, each once")
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n{block.strip()}\n{END}{after}"


def chart(groups: Sequence[Group], records: Sequence[Record]) -> list[dict[str, Any]]:
    """What chart.py draws: for each group with figures its title, unit, and bars (name, CPU ms, ours or not)."""
    found = []
    for group in groups:
        bars = [
            {"name": case.name, "cpu_ms": median(runs, COST), "ours": case.environment is None and ours(case)}
            for case in group.cases
            if (runs := of(case, group, records))
        ]
        if bars:
            found.append({"title": group.title, "unit": group.unit, "bars": bars})
    return found


def ours(case: Case) -> bool:
    """Whether a case is the engine or its sandboxes, rather than a raw limit."""
    return case.name.startswith("rollout_engine") or case.name.endswith(" sandbox")
