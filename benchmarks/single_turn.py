"""The first benchmark: single-turn rollouts over HTTP through our engine, its peers and bare clients, in the same run.

    python -m benchmarks.single_turn [-n 2000] [--runs 3] [--only TEXT] [--json FILE]

Every case answers the same n questions against the same stub server (50 ms, see model_server.py), 256 in flight, and
scores each answer with the same regex; it is a process of its own, and checks that every score is 1.0. The cases take
turns, so that a busy moment of the machine meets them all. Not counted: the start of the interpreter, imports, a
warm-up of 64 rollouts through the whole path (in the same process, before the meter starts), and the stub server.
Counted: user + system CPU seconds of the case's process and all of its children; of our engine the driver's process
and the hosts, with Ray's own processes and the end of the run in a line below the table (see engine_case.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import CaseError, model_server, run_case, server_stats
from benchmarks.measure import machine, median, number, spread, table
from benchmarks.peers import envs
from benchmarks.work import IN_FLIGHT, WARM_UP

PACKAGES = ("rollout-engine", "ray", "aiohttp", "httpx", "httpx-aiohttp", "uvloop", "pyarrow")


class Case(NamedTuple):
    """One row of the table."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    """Name of a peer's environment; None: our own."""
    keeps: str = "nothing"
    """What is left of a rollout when the case ends."""

    def python(self) -> Path:
        return envs.ensure(self.environment) if self.environment else Path(sys.executable)


CASES = (
    Case("rollout_engine, Ray", "benchmarks.engine_case", keeps="a row, synced"),
    Case("rollout_engine, Ray, read", "benchmarks.engine_case", ("--read",), keeps="a row, synced"),
    Case("bare aiohttp, uvloop", "benchmarks.peers.bare_aiohttp"),
    Case("bare aiohttp, asyncio", "benchmarks.peers.bare_aiohttp", ("--loop", "asyncio")),
    Case("bare httpx-aiohttp, uvloop", "benchmarks.peers.bare_httpx_aiohttp"),
    Case("verifiers", "benchmarks.peers.verifiers_single", (), "verifiers", "results in memory"),
    Case("verifiers, saving", "benchmarks.peers.verifiers_single", ("--save",), "verifiers", "a JSON line"),
    Case("inspect, lean", "benchmarks.peers.inspect_single", ("--lean",), "inspect", "a log entry"),
    Case("inspect, defaults", "benchmarks.peers.inspect_single", (), "inspect", "a log entry"),
)


def measure(case: Case, url: str, n: int, in_flight: int) -> dict[str, Any]:
    """One run of one case. Raises CaseError where the server did not see exactly the calls that were due."""
    load = os.getloadavg()[0]
    server_stats(url)
    arguments = ("--url", url, "-n", str(n), "--in-flight", str(in_flight), *case.arguments)
    record = run_case(case.module, arguments, python=case.python())
    stats = server_stats(url)
    if stats["served"] != n + WARM_UP:
        raise CaseError(f"{case.name}: the server gave {stats['served']} answers where {n + WARM_UP} were due")
    return {**record, "case": case.name, "load": round(load, 2), "peak_in_flight": stats["peak_in_flight"]}


def measure_all(cases: Sequence[Case], n: int, runs: int, in_flight: int) -> Iterator[dict[str, Any]]:
    """Every run of every case, the cases taking turns; a line on standard error for each."""
    for case in cases:
        case.python()
    with model_server() as url:
        for turn in range(runs):
            for case in cases:
                record = measure(case, url, n, in_flight)
                cost = f"{record['cpu_ms_per_rollout']:.3f} ms CPU, {record['rate']:.0f}/s, load {record['load']}"
                print(f"run {turn + 1}/{runs}  {case.name}: {cost}", file=sys.stderr, flush=True)
                yield record


def summary(cases: Sequence[Case], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case, compared with our engine where it ran, else with the first case."""
    base = median([record for record in records if record["case"] == cases[0].name], "cpu_ms_per_rollout")
    rows = []
    for case in cases:
        runs = [record for record in records if record["case"] == case.name]
        cpu = median(runs, "cpu_ms_per_rollout")
        rows.append(
            {
                "what": case.name,
                "version": next(iter(runs[0]["versions"].values())),
                "CPU ms / rollout": cpu,
                "low-high": spread(runs, "cpu_ms_per_rollout"),
                f"x {cases[0].name}": cpu / base,
                "rollouts / s": round(median(runs, "rate")),
                "most in flight": round(median(runs, "peak_in_flight")),
                "peak RSS MB": round(median(runs, "max_rss_mb")),
                "kept": case.keeps,
                "load": median(runs, "load"),
            }
        )
    return rows


def parts(records: Sequence[dict[str, Any]]) -> str:
    """Where our engine's CPU time went, one line for each of its cases; medians."""
    ours = [record for record in records if "host_ms_per_rollout" in record]
    lines = []
    for name in dict.fromkeys(record["case"] for record in ours):
        runs = [record for record in ours if record["case"] == name]
        driver, host, ray, close = (
            number(median(runs, f"{part}_ms_per_rollout")) for part in ("driver", "host", "ray", "close")
        )
        lines.append(f"{name}: driver {driver} + hosts {host} ms; not counted: Ray's own processes {ray} ms,")
        lines.append(f"  nor the end of the run (final tables, Parquet, leaving Ray), {close} ms of the driver")
    return "\n".join(lines)


def chosen(only: str | None) -> list[Case]:
    """The cases whose name holds `only`; ours first."""
    cases = [case for case in CASES if not only or only in case.name]
    if not cases:
        raise SystemExit(f"no case is named like {only!r}: {', '.join(case.name for case in CASES)}")
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2000, help="rollouts of each case")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--only", help="only the cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write every run and the machine to this file")
    args = parser.parse_args()
    cases = chosen(args.only)
    where = machine(PACKAGES)
    try:
        records = list(measure_all(cases, args.n, args.runs, args.in_flight))
    except (CaseError, envs.PeerError) as error:
        raise SystemExit(str(error)) from error
    rows = summary(cases, records)
    print(f"{args.n} single-turn rollouts against a 50 ms stub server, {args.in_flight} in flight, scored by a regex;")
    print(f"medians of {args.runs} runs. CPU: user + system of the case and all its children, server not counted.")
    print(json.dumps(where), end="\n\n")
    print(table(rows))
    print(parts(records))
    if args.json:
        args.json.write_text(json.dumps({"machine": where, "summary": rows, "runs": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
