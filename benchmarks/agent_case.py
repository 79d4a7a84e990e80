"""Rollouts of an agent program: what they cost, beside verifiers 0.4 in the same run, and what they do to the loop.

    python -m benchmarks.agent_case [-n 1000] [--few 8] [--runs 3] [--only TEXT]

The program (tiny_agent.py) asks a model of 50 ms twice and leaves a file; `agent_rollouts.py` says what our rollouts
are, `peers/verifiers04.py` what theirs are. The cases, those of the group `agent` of `make bench-peers`, take turns.
CPU is that of everything but the model server, by control groups; the load and each case's settings are in its row.
Then the longest callback of the event loop with 64 agents at once (agent_loop.py), as often as there are runs. Prints
what was measured against what is to be reached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.cases import model_server, run_case, server_stats
from benchmarks.measure import machine, median
from benchmarks.peers import report
from benchmarks.peers.__main__ import PACKAGES, chosen, measure_all
from benchmarks.peers.groups import AGENT, Case

COST_MS, TIMES, LONGEST_MS = 45.0, 20.0, 50.0
"""To reach: at most, at least, less than."""
NO_TARGET = {"verifiers 0.4, same program": "told for the record: a process of the host, with no sandbox and no limits"}
AT_ONCE, SLOW_MS = 64, 2000
"""Of the loop's case: while a call takes so long, all of the agents come to ask."""


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def compared(cases: tuple[Case, ...], records: list[dict[str, Any]]) -> list[str]:
    """Our cost, and how often the others' is that."""
    runs = report.of(cases[0], AGENT, records)
    if not runs:
        return []
    cost = median(runs, report.COST)
    said = f"{runs[0]['n']} rollouts: {cost:.1f} ms CPU each, to reach: at most {COST_MS:.0f}"
    lines = [f"{said}: {verdict(cost <= COST_MS)} (counted by {runs[0]['by']})"]
    for case in cases:
        if case.environment and (theirs := report.of(case, AGENT, records)):
            times = median(theirs, report.COST) / cost
            target = f"to reach: at least {TIMES:.0f}: {verdict(times >= TIMES)}"
            lines.append(f"{case.name}: {times:.3g} times that; {NO_TARGET.get(case.name, target)}")
    return lines


def longest(runs: int) -> str:
    """The loop's case, each run in a process of its own."""
    found: list[dict[str, Any]] = []
    with model_server("--chunks", "0", "--latency-ms", str(SLOW_MS)) as url:
        for _ in range(runs):
            server_stats(url)
            found.append(run_case("benchmarks.agent_loop", ["--url", url, "--in-flight", str(AT_ONCE), "-n", "192"]))
            peak = server_stats(url)["peak_in_flight"]
            print(f"{found[-1]}, {peak} agents asked at once", file=sys.stderr, flush=True)
    values = [record["longest_ms"] for record in found]
    middle = statistics.median(values)
    said = f"longest callback with {AT_ONCE} agents: {middle:.1f} ms of thread CPU ({min(values)}-{max(values)})"
    return f"{said}, to reach: under {LONGEST_MS:.0f}: {verdict(middle < LONGEST_MS)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="agent", type=int, default=1000, help="rollouts of ours and of the same program")
    parser.add_argument("--few", type=int, default=8, help="rollouts of a case that costs a second and more each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="only the cases whose name holds this text, with ours to compare with")
    args = parser.parse_args()
    groups = [AGENT] if args.only is None else [group for group in chosen(args.only) if group.key == AGENT.key]
    where = machine(PACKAGES)
    records = list(measure_all(groups, args))
    print(report.report(groups, records, where, args.runs), end="\n\n")
    for line in (line for group in groups for line in compared(group.cases, records)):
        print(line)
    print(longest(args.runs))


if __name__ == "__main__":
    main()
