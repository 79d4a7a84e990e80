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
    def said(self) -> Path:
        """What a driver without a terminal has said."""
        return self.root / "driver.log"

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
    def logs(self) -> Path:
        """What the processes of the run have to say, one file each."""
        return self.root / "logs"

    @property
    def status(self) -> Path:
        """Where the run stands, rewritten by its driver every second or so."""
        return self.root / "status.json"

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
    def events(self) -> Path:
        """What happened to hosts and nodes, for people; nothing is decided by it."""
        return self.root / "events.jsonl"

    @property
    def compacted(self) -> Path:
        """Says which log the Parquet tables were made from."""
        return self.root / "compacted.json"

    @property
    def staging(self) -> Path:
        """Holds Parquet tables that are being written or swapped in; absent otherwise."""
        return self.root / ".compact"

    def stuck(self, epoch: int) -> Path:
        """The state of a run that was ended because nothing went forward, for people."""
        return self.root / f"stuck-{epoch}.txt"

    def epoch_file(self, epoch: int) -> Path:
        return self.epochs / f"{epoch}.json"

    def plan_file(self, epoch: int) -> Path:
        return self.plan / f"{epoch}.jsonl"

    def segment(self, epoch: int, number: int) -> Path:
        return self.log / f"{epoch}-{number}.arrows"
