"""The suite itself, in a place of its own (place.py): strikes run after run, and looks at each when it is over.

Started by `python -m tests.chaos`, as `python -m tests.chaos.suite FOLDER OPTIONS...`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path

from tests.chaos import check
from tests.chaos.daemon import Daemon
from tests.chaos.leftovers import Leftovers
from tests.chaos.leg import Field, Leg
from tests.chaos.options import options
from tests.chaos.plan import KINDS, Strike, make_plan
from tests.chaos.report import Report
from tests.chaos.work import MODELS, K, work
from tests.nodes.three import three_nodes

FAILED_AGAIN = 2
"""How often what failed is run again at the end of a run, at most."""


class Suite:
    """Strikes run after run, and counts."""

    def __init__(self, ground: Field, work: tuple[int, int], folder: Path, keep: Path | None) -> None:
        """`keep`: where run directories are copied to of which a claim did not hold."""
        self._field, self._work, self._folder, self._keep = ground, work, folder, keep
        self._planned = work[0] * K * len(MODELS)
        self.report = Report()
        self._leftovers = Leftovers(ground.daemon)
        self._calm = check.Rows({}, self.report.failed, 0, 0)

    def calm(self) -> None:
        """The undisturbed run that all others are compared with."""
        run_dir = self._folder / "calm"
        with contextlib.closing(Leg(self._field, run_dir, self._work)) as leg:
            leg.finish()
        self._calm = check.read(run_dir)
        assert len(self._calm.essence) == self._planned, f"without a kill: {self._calm.failed}"
        assert not (left := self._leftovers.after()), f"left over without a kill: {left}"

    def struck(self, strikes: deque[Strike]) -> None:
        """One run. Takes the strikes off that came in time."""
        self.report.runs += 1
        run_dir = self._folder / f"run-{self.report.runs}"
        leg = Leg(self._field, run_dir, self._work)
        try:
            while strikes and leg.strike(strikes[0]):
                say(f"run {self.report.runs}: {strikes.popleft()} -> {leg.killed[-1].seconds or 0:.1f} s")
            leg.finish()
            self._look_at(run_dir, "when it was over")
            self._check(leg, run_dir)
        except Exception as error:
            told = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            self._trouble(run_dir, told)
            raise
        finally:
            leg.close()
            self.report.killed += leg.killed
            self.report.drivers += leg.drivers

    def _check(self, leg: Leg, run_dir: Path) -> None:
        rows = check.read(run_dir)
        check.same(rows, self._calm, self._planned)
        rows_failed = rows.failed
        self.report.failed += rows_failed
        for _ in range(FAILED_AGAIN):
            if rows.failed:
                leg.retry_failed()
                rows = check.read(run_dir)
        check.same(rows, self._calm, self._planned)
        assert not rows.failed, f"still failed: {rows.failed}"
        self.report.rows += len(rows.essence)
        self.report.retries += rows.retries
        self.report.superseded += rows.written - len(rows.essence)
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        took = [event["seconds"] for event in events if event["kind"] == "recovered" and event["seconds"] is not None]
        self.report.host_recoveries += took
        if rows_failed:
            self._look_at(run_dir, "after its failed rows were run again")
        if self._field.daemon is not None:
            self._field.daemon.sweep()

    def _look_at(self, run_dir: Path, when: str) -> None:
        left = self._leftovers.after()
        self.report.left += len(left)
        self.report.forgotten = len(self._leftovers.forgotten)
        if left:
            self._trouble(run_dir, f"{when}: left over: {left}")

    def _trouble(self, run_dir: Path, what: str) -> None:
        self.report.trouble.append(f"{run_dir.name}: {what}")
        say(f"NOT SO: {self.report.trouble[-1]}")
        if self._keep is not None:
            for found in (run_dir, run_dir.with_suffix(".err")):
                copy = shutil.copytree if found.is_dir() else shutil.copy
                with contextlib.suppress(OSError):
                    copy(found, self._keep / found.name)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def daemon(state: Path) -> Daemon | None:
    """None where this machine cannot have one, and need not."""
    try:
        return Daemon(state)
    except Exception as error:
        if os.environ.get("ROLLOUT_REQUIRE") == "1":
            raise
        say(f"no Docker daemon, so none is killed: {error}")
        return None


def absent(error: Exception) -> None:
    if os.environ.get("ROLLOUT_REQUIRE") != "1":
        say(f"skipped: Ray does not start on this machine: {error}")
        sys.exit(0)


def strike_all(said: argparse.Namespace, suite: Suite, strikes: deque[Strike]) -> None:
    """Runs until nothing of the plan is left, or a run could not be brought to its end."""
    ends = time.monotonic() + said.minutes * 60
    suite.calm()
    say("the undisturbed run is done")
    with contextlib.suppress(Exception):  # it is in the report
        while strikes and time.monotonic() < ends:
            suite.struck(strikes)


def main(folder: Path, said: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with its report
    keep = Path(said.keep) if said.keep else None
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    (runs := folder / "runs").mkdir()
    with contextlib.ExitStack() as undo:
        docker = daemon(folder / "docker")
        if docker is not None:
            undo.callback(docker.stop)
        three = undo.enter_context(three_nodes(absent, folder))
        dockers = said.tasks // 10 if docker else 0
        ground = undo.enter_context(contextlib.closing(Field(three, docker, list(work(said.tasks, dockers)))))
        kinds = tuple(kind for kind in KINDS if docker or kind != "docker")
        strikes = deque(make_plan(said.seed, said.kills, kinds))
        say(f"seed {said.seed}: {' '.join(map(str, strikes))}")
        suite = Suite(ground, (said.tasks, dockers), runs, keep)
        undo.callback(lambda: print("\n".join(suite.report.lines()), flush=True))
        strike_all(said, suite, strikes)
    return 1 if suite.report.trouble else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), options(sys.argv[2:], __doc__)))
