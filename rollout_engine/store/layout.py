"""Where everything of a run lies in its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one run. Nothing is touched here."""

    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def epochs(self) -> Path:
        return self.root / "epochs"

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def turns(self) -> Path:
        return self.root / "turns"

    @property
    def groups(self) -> Path:
        return self.root / "groups.parquet"

    @property
    def rewards(self) -> Path:
        return self.root / "rewards.parquet"

    @property
    def compacted(self) -> Path:
        """Says which log the Parquet tables were made from."""
        return self.root / "compacted.json"

    @property
    def staging(self) -> Path:
        """Holds Parquet tables that are being written or swapped in; absent otherwise."""
        return self.root / ".compact"

    def epoch_file(self, epoch: int) -> Path:
        return self.epochs / f"{epoch}.json"

    def plan_file(self, epoch: int) -> Path:
        return self.plan / f"{epoch}.jsonl"

    def segment(self, epoch: int, number: int) -> Path:
        return self.log / f"{epoch}-{number}.arrows"
