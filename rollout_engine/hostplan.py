"""What a host is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_engine.config import LogLevel, RunConfig


@dataclass(frozen=True, slots=True)
class HostPlan:
    """All that a host is told when it is made. Picklable; holds no secrets."""

    run_id: str
    epoch: int
    host_id: str
    node_id: str
    config: RunConfig
    run_dir: str | None = None
    """Where trace and log files may go; None: turns travel inline."""
    log_level: LogLevel = "info"
