"""The benchmark of scale: 10,000 no-op rollouts in flight, 10,000 HTTP calls in flight, and a run of a million rows.

    python -m benchmarks.scale [--runs 3] [--million]

Prints what each measured beside the figure that it should keep to. The million takes some minutes.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.cases import run_case
from benchmarks.measure import machine, median, spread, table

MILLION = ["-n", "1000000", "--hosts", "2", "--in-flight", "4000", "--latency-ms", "200", "--watch"]
SETTLED = 100_000
"""Rollouts after which the driver's memory should not grow any more."""


def row(what: str, records: list[dict[str, Any]], field: str, limit: str) -> dict[str, Any]:
    return {"what": what, "median": median(records, field), "low-high": spread(records, field), "to keep to": limit}


def noop(runs: int) -> list[dict[str, Any]]:
    records = [run_case("benchmarks.noop_case", []) for _ in range(runs)]
    return [
        row("no-op, driver, µs CPU a rollout", records, "driver_us_per_rollout", "40"),
        row("no-op, hosts, µs CPU a rollout", records, "host_us_per_rollout", "250"),
        row("no-op, rollouts a second", records, "rate", ""),
    ]


def in_flight(runs: int) -> list[dict[str, Any]]:
    records = [run_case("benchmarks.in_flight_case", []) for _ in range(runs)]
    return [
        row("10,000 HTTP rollouts in flight, MB added", records, "added_mb", "500"),
        row("calls in flight at the server", records, "max_in_flight", "10,000"),
    ]


def million() -> list[dict[str, Any]]:
    record = run_case("benchmarks.noop_case", MILLION)
    settled: list[float] = [mb for done, mb in record["driver_mb"] if done >= SETTLED]
    last, most = median([{"mb": mb} for mb in settled[-5:]], "mb"), max(settled)
    growth = {"first": settled[0], "end": (last / settled[0] - 1) * 100, "most": (most / settled[0] - 1) * 100}
    return [
        row("a million rows: driver's memory at 100,000, MB", [growth], "first", ""),
        row("a million rows: growth from there to the end, %", [growth], "end", "10"),
        row("a million rows: the highest sample on the way, %", [growth], "most", ""),
        row("a million rows: driver, µs CPU a rollout", [record], "driver_us_per_rollout", "40"),
        row("a million rows: rollouts a second", [record], "rate", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--million", action="store_true", help="also the run of a million rows")
    args = parser.parse_args()
    rows = noop(args.runs) + in_flight(args.runs) + (million() if args.million else [])
    print(table(rows))
    print(machine(["rollout-engine", "ray", "pyarrow", "uvloop"]))


if __name__ == "__main__":
    main()
