"""How long a run of a million rollouts, nine tenths of them done, takes from `rollout resume` to its next rollout.

    python -m benchmarks.resume_case [-n 1000000] [-k 10] [--runs 3] [--ray off local] [--left killed closed]

`benchmarks.finished_run` makes the run directory, once as a driver leaves it that was interrupted (with its tables) and
once as one that was killed (the log alone, torn at its end). Then, each time in a fresh process, `rollout resume` goes
on with it until the first new row is on the disk, and is killed. Counted from the start of that process, by the
kernel's clock. The run is on the repository's own disk; its files are in the page cache, as they are after a kill.

Prints when each step had begun and ended, the CPU seconds of all processes (Ray's as well) and of the driver's alone,
its memory (PSS, the highest of samples every 0.2 s, and VmHWM), against 20 s; and in turns with it the same of a run of
1,000, which is what imports and Ray cost on this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.cases import ROOT, CaseError, scratch
from benchmarks.measure import TICKS_PER_S, machine, median, peak_rss_mb, pss_mb, spread, table, tree
from rollout_engine.store.epochs import process_start

TO_REACH_S = 20.0
SMALL = 1000
"""Rollouts of the run beside it."""
LIMIT_S = 600.0
LAST = "first row"
"""The step after which a process has done what it is here for: it prints its marks."""
SAMPLE_S = 0.2
GONE_S = 60.0
"""How long what a killed driver has started may take to end."""


# -- the process that resumes -----------------------------------------------------------------------------------------


def since_start() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S


class Marks:
    """When each step began and ended, in seconds since the process was started; only its first time counts."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[float, float]] = {}

    def watch(self, name: str, owner: Any, attribute: str, told: Callable[[Any], bool] = lambda _: True) -> None:
        """Puts a watch around a function; `told`: whether its result is the one that is waited for."""
        function = getattr(owner, attribute)

        def watched(*arguments: Any, **named: Any) -> Any:
            began = since_start()
            result = function(*arguments, **named)
            if name not in self.spans and told(result):
                self.spans[name] = began, since_start()
                if name == LAST:
                    print(json.dumps(self.spans), flush=True)
            return result

        setattr(owner, attribute, watched)

    def watch_async(self, name: str, owner: Any, attribute: str) -> None:
        function = getattr(owner, attribute)

        async def watched(*arguments: Any, **named: Any) -> Any:
            began = since_start()
            result = await function(*arguments, **named)
            self.spans.setdefault(name, (began, since_start()))
            return result

        setattr(owner, attribute, watched)


def resume(run_dir: str, ray: str) -> None:
    """`rollout resume` in this process. Prints the marks once the first new row is on the disk, and goes on."""
    marks = Marks()
    from rollout_engine import runstore
    from rollout_engine.cli import main
    from rollout_engine.commands import resume as command
    from rollout_engine.commands.source import Source
    from rollout_engine.driver import Driver
    from rollout_engine.scheduler import Scheduler
    from rollout_engine.store import PlanLog, RunDir, RunWriter

    marks.watch("tasks", Source, "check")
    marks.watch("report", command, "read_report")
    marks.watch("store", RunWriter, "__init__")
    marks.watch("plan", PlanLog, "__init__")
    marks.watch("log", RunDir, "winners")
    marks.watch_async("hosts", Driver, "open")
    marks.watch("first grant", Scheduler, "grant", bool)
    marks.watch(LAST, runstore.RunStore, "write")
    marks.spans["imports"] = 0.0, since_start()
    sys.argv = ["rollout", "resume", run_dir, "--ray", ray, "--quiet"]
    main()


# -- the process that measures ----------------------------------------------------------------------------------------


def build(folder: Path, n: int, left: str, arguments: argparse.Namespace) -> Path:
    """The run directory."""
    flags = {"-n": n, "-k": arguments.k, "--rows": arguments.rows}
    argv = [sys.executable, "-m", "benchmarks.finished_run", str(folder)]
    argv += [str(word) for flag in flags.items() for word in flag]
    killed = left == "killed"
    done = subprocess.run(
        [*argv, *(["--killed"] if killed else [])], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != (-signal.SIGKILL if killed else 0):
        raise CaseError(f"{' '.join(argv)} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return folder / "run"


@contextmanager
def resumed(run_dir: Path, ray: str) -> Iterator[subprocess.Popen[str]]:
    """A process that resumes the run, and its end: it is killed, and what it started is waited for."""
    argv = [sys.executable, "-m", "benchmarks.resume_case", "--resume", str(run_dir), "--ray", ray]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            started = {each.pid: process_start(each.pid) for each in tree(process.pid) if each.pid != process.pid}
            process.kill()
            wait_until_gone(started)


def wait_until_gone(started: Mapping[int, str]) -> None:
    """Ray ends with its driver; what of it does not is killed. `started`: pids, and when the kernel started each."""
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        left = [pid for pid, at in started.items() if at and process_start(pid) == at]
        if not left:
            return
        time.sleep(SAMPLE_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch_memory(pid: int, samples: list[float], over: threading.Event) -> None:
    while not over.wait(SAMPLE_S):
        samples.append(pss_mb([pid]))


def measure(run_dir: Path, ray: str) -> dict[str, Any]:
    """One resume."""
    load = os.getloadavg()[0]
    samples: list[float] = []
    over = threading.Event()
    with resumed(run_dir, ray) as process:
        watcher = threading.Thread(target=watch_memory, args=(process.pid, samples, over))
        watcher.start()
        killer = threading.Timer(LIMIT_S, process.kill)
        killer.start()
        said = process.stdout.readline()
        killer.cancel()
        over.set()
        watcher.join()
        if not said:
            raise CaseError(f"`rollout resume {run_dir}` ended before its first row")
        members = tree(process.pid)
        driver = next(each.cpu_s for each in members if each.pid == process.pid)
        facts = {
            "cpu": sum(each.cpu_s for each in members),
            "driver cpu": driver,
            "pss": max(samples),
            "peak": peak_rss_mb([process.pid]),
        }
    spans = json.loads(said)
    return {"ray": ray, "load": load, **facts, "spans": spans, "total": spans[LAST][1]}


def report(left: str, ray: str, runs: list[dict[str, Any]], small: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table."""
    return {
        "left by": left,
        "ray": ray,
        "first new row, s": median(runs, "total"),
        "low-high": spread(runs, "total"),
        "to reach": TO_REACH_S,
        "a run of 1,000, s": median(small, "total"),
        "CPU s": median(runs, "cpu"),
        "driver's": median(runs, "driver cpu"),
        "PSS MB": median(runs, "pss"),
        "peak RSS MB": median(runs, "peak"),
        "load": median(runs, "load"),
    }


def show(run: dict[str, Any]) -> None:
    """Where the time of one resume went."""
    spans = sorted(run["spans"].items(), key=lambda item: item[1])
    print("  " + ", ".join(f"{name} {began:.2f}-{ended:.2f}" for name, (began, ended) in spans), flush=True)


def measure_all(left: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind of cluster."""
    with scratch("resume") as folder:
        small_dir = build(folder / "small", SMALL, left, arguments)
        run_dir = build(folder / "large", arguments.n, left, arguments)
        for ray in arguments.ray:
            print(f"left by {left}, ray {ray}:")
            small, runs = [], []
            for number in range(arguments.runs):
                # What is left of the large run is enough for many a resume, of the small one for the first.
                fresh = shutil.copytree(small_dir, folder / f"small-{ray}-{number}")
                small.append(measure(fresh, ray))
                runs.append(measure(run_dir, ray))
                show(runs[-1])
            yield report(left, ray, runs, small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1_000_000, help="rollouts of the run")
    parser.add_argument("-k", type=int, default=10, help="attempts of a task")
    parser.add_argument("--rows", type=int, default=256, help="rows of a commit")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ray", nargs="+", default=["off", "local"])
    parser.add_argument("--left", nargs="+", choices=["killed", "closed"], default=["killed", "closed"])
    parser.add_argument("--resume", metavar="RUN", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.resume is not None:
        resume(args.resume, args.ray[0])
        return
    print(table([row for left in args.left for row in measure_all(left, args)]))
    print(f"{args.n} rollouts, k = {args.k}, {args.rows} rows a commit")
    print(machine(["rollout-engine", "ray", "pyarrow"]))


if __name__ == "__main__":
    main()
