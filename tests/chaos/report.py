"""The suite in numbers, as a table."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.leg import Killed
from tests.chaos.plan import KINDS


@dataclass
class Report:
    """Sums over all runs."""

    killed: list[Killed] = field(default_factory=list)
    runs: int = 0
    drivers: int = 0
    rows: int = 0
    retries: int = 0
    superseded: int = 0
    """Rows in a log that another row of their key took the place of."""
    failed: Counter[str] = field(default_factory=Counter)
    """Rows that failed for good before `resume --failed`, by boundary and type."""
    host_recoveries: list[float] = field(default_factory=list)
    """Seconds from the loss of a host until all that it held ran again, as the engine itself says."""
    trouble: list[str] = field(default_factory=list)
    """Claims that did not hold: rows lost, doubled or different, and what was left over."""
    left: int = 0
    forgotten: int = 0
    """Processes of containers that a killed Docker daemon was starting, and that its successor does not know."""
    began: float = field(default_factory=time.monotonic)

    def lines(self) -> list[str]:
        """For a terminal. `lost hosts`: until others had taken up all that one held, as the engine itself says."""
        table = [f"{'killed':<10} {'times':>5} {'median s':>9} {'longest s':>9}   until the repair and the next row"]
        for kind in KINDS:
            mine = [each for each in self.killed if each.kind == kind]
            table.append(_line(kind, len(mine), [each.seconds for each in mine if each.seconds is not None]))
        table.append(_line("all", len(self.killed), [each.seconds for each in self.killed if each.seconds is not None]))
        table.append(_line("lost hosts", len(self.host_recoveries), self.host_recoveries))
        failed = ", ".join(f"{times} {what}" for what, times in self.failed.most_common()) or "none"
        return [
            *table,
            f"{self.runs} runs by {self.drivers} drivers in {(time.monotonic() - self.began) / 60:.0f} minutes, "
            f"{self.rows} rows, each there once",
            f"done twice: {self.retries} tries thrown away, {self.superseded} rows superseded",
            f"failed until `resume --failed`: {failed}",
            f"left over: {self.left}; processes that a killed Docker daemon forgot: {self.forgotten}",
            *(f"NOT SO: {each}" for each in self.trouble),
        ]


def _line(what: str, times: int, seconds: list[float]) -> str:
    took = sorted(seconds)
    figures = f"{took[len(took) // 2]:>9.1f} {took[-1]:>9.1f}" if took else ""
    return f"{what:<10} {times:>5} {figures}"
