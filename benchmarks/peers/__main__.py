"""Our engine and its peers at the same work in the same run: `make bench-peers`.

    python -m benchmarks.peers [--http 800] [--mock 800] [--box 40] [--sandboxed 40] [--agent 100] [--few 8]
                               [--runs 3] [--only TEXT] [--json FILE] [--write-readme]

Prints tables with ratios to ours. Every case is a process of its own, checks that all of its scores are right, and
takes turns with the others of its group. What cannot be installed or run here has a row that says why. The sandboxes
with docker need DOCKER_HOST or a daemon at the usual address: eval "$(.ci/docker.py start)". --write-readme also puts
the tables into benchmarks/README.md, between their markers, and draws benchmarks/peers.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import ROOT, CaseError, model_server, run_case, server_stats
from benchmarks.measure import machine
from benchmarks.peers import compose, envs, report
from benchmarks.peers.everything import daemon_pid, docker_host
from benchmarks.peers.groups import GROUPS, Case, Group
from benchmarks.work import IN_FLIGHT

README, PICTURE = ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "peers.png"
CHART = f"![CPU for each piece of work, ours and others']({PICTURE.name})"
PACKAGES = ("rollout-engine", "ray", "aiohttp", "httpx", "httpx-aiohttp", "uvloop", "pyarrow")
FEW_IN_FLIGHT = 8
"""Of a case over HTTP whose rollouts are processes."""
AT_ONCE = {"box": 4, "sandboxed": 4, "agent": FEW_IN_FLIGHT}
"""Sandboxes at once. A test daemon has room for seven networks, and Harbor makes one for each trial."""
CHART_S = 120.0


class Unfit(Exception):
    """A case cannot run on this machine; the message says what is missing."""


def python(case: Case) -> Path:
    """What a case is run by, made where needed. Raises Unfit."""
    for need in case.needs:
        fit(need)
    try:
        return envs.ensure(case.environment) if case.environment else Path(sys.executable)
    except envs.PeerError as error:
        raise Unfit(str(error)) from error


def fit(need: str) -> None:
    """Raises Unfit where the machine lacks something."""
    try:
        if need == "docker":
            daemon_pid(docker_host())
        elif need == "compose":
            compose.docker_config()
        elif os.geteuid():
            raise Unfit("needs root, for control groups")
    except (OSError, compose.ComposeError, subprocess.TimeoutExpired) as error:
        hint = ' (eval "$(.ci/docker.py start)")' if need == "docker" else ""
        raise Unfit(f"no {need}{hint}: {error}") from error


def arguments(case: Case, group: Group, url: str, n: int) -> list[str]:
    """The command line of a case."""
    in_flight = AT_ONCE.get(group.key, FEW_IN_FLIGHT if case.few else IN_FLIGHT)
    server = ["--url", url] if group.calls else []
    return [*server, *case.arguments, "-n", str(n), "--in-flight", str(in_flight)]


def measure(case: Case, group: Group, url: str, n: int) -> dict[str, Any]:
    """One run. Raises CaseError, also where the server did not see exactly the calls that were due, and Unfit."""
    with_python = python(case)
    load = os.getloadavg()[0]
    server_stats(url)
    record = run_case(case.module, arguments(case, group, url, n), python=with_python)
    served, due = server_stats(url)["served"], (n + case.warm_up) * group.calls
    if served != due:
        raise CaseError(f"the server gave {served} answers where {due} were due")
    return {**record, "load": round(load, 2)}


def measure_all(groups: list[Group], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every run of every case; a case that fails once is not run again. A line on standard error for each."""
    for group in groups:  # what has to be made is made before anything is measured
        for case in group.cases:
            with contextlib.suppress(Unfit):
                python(case)
    with model_server("--chunks", "0") as url:
        for group in groups:
            failed: set[str] = set()
            for turn in range(args.runs):
                for case in group.cases:
                    if case.name in failed:
                        continue
                    record = attempt(case, group, url, args.few if case.few else getattr(args, group.key))
                    if "failed" in record:
                        failed.add(case.name)
                    where = f"{turn + 1}/{args.runs} {group.key}: {case.name}"
                    print(f"{where}: {said(record)}", file=sys.stderr, flush=True)
                    yield {**record, "group": group.key, "case": case.name, "turn": turn}


def attempt(case: Case, group: Group, url: str, n: int) -> dict[str, Any]:
    """The record of one run, or of why there is none."""
    try:
        return measure(case, group, url, n)
    except (CaseError, Unfit) as error:
        return {"failed": str(error)}


def said(record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"not run: {report.one_line(record['failed'], 600)}"
    return f"{record[report.COST]:.3f} ms CPU, {record['rate']:.1f}/s, load {record['load']}"


def draw(groups: list[Group], records: list[dict[str, Any]]) -> None:
    """The chart, by the environment `chart`. Raises PeerError, CalledProcessError."""
    script, data = Path(__file__).with_name("chart.py"), json.dumps(report.chart(groups, records))
    subprocess.run([envs.ensure("chart"), script, PICTURE], input=data, text=True, check=True, timeout=CHART_S)


def chosen(only: str | None) -> list[Group]:
    """The groups whose key or title holds `only`, or those of the cases whose name does, with ours to compare with."""
    if only is None:
        return list(GROUPS)
    found = []
    for group in GROUPS:
        named = [case for case in group.cases if only.lower() in case.name.lower()]
        whole = only.lower() in f"{group.key} {group.title}".lower()
        bases = {group.cases[0].name, *(case.against for case in named)}
        cases = tuple(case for case in group.cases if whole or case in named or case.name in bases)
        if whole or named:
            found.append(group._replace(cases=cases))
    if not found:
        names = [name for group in GROUPS for name in (group.key, *(case.name for case in group.cases))]
        raise SystemExit(f"no group or case is named like {only!r}: {', '.join(names)}")
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", type=int, default=800, help="rollouts of a case over HTTP")
    parser.add_argument("--mock", type=int, default=800, help="rollouts of a case with a mock model")
    parser.add_argument("--box", type=int, default=40, help="sandboxes of a case")
    parser.add_argument("--sandboxed", type=int, default=40, help="rollouts with a sandbox, of each of ours")
    parser.add_argument("--agent", type=int, default=100, help="rollouts of an agent program")
    parser.add_argument("--few", type=int, default=8, help="rollouts of a case that costs a second and more each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="only the groups or cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write every run and the machine to this file")
    parser.add_argument("--write-readme", action="store_true", help="put tables and chart into benchmarks/")
    args = parser.parse_args()
    for name in (*(group.key for group in GROUPS), "few", "runs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.write_readme and args.only:
        parser.error("--write-readme wants the whole table: leave out --only")
    return args


def main() -> None:
    args = parsed()
    groups, where = chosen(args.only), machine(PACKAGES)
    records = list(measure_all(groups, args))
    text = report.report(groups, records, where, args.runs)
    print(text)
    if args.json:
        tables = {group.key: report.rows(group, records) for group in groups}
        everything = {"machine": where, "runs_each": args.runs, "summary": tables, "runs": records}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    if args.write_readme:
        page = report.replaced(README.read_text(), f"{CHART}\n\n{text}")
        draw(groups, records)
        README.write_text(page)


if __name__ == "__main__":
    main()
