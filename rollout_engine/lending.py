"""What the cluster-wide budgets of models say to the driver."""

from __future__ import annotations

from typing import NamedTuple

from rollout_engine.exchange import Lease


class Lent(NamedTuple):
    """What goes to a host with the next request."""

    leases: dict[str, Lease]
    starved: bool
    """It got fewer permits than it could use."""
    watched: bool
    """It has calls to a model with a rate or with limits that adapt: it should be asked again soon."""


class News(NamedTuple):
    """What a host's report means for the others."""

    refused: bool
    """The server has refused calls."""
    pause: bool
    """It has asked for a pause that the others have not heard of."""


class CallLimits(NamedTuple):
    """What calls to one model are held to now, over the whole cluster."""

    at_once: int | None = None
    """None: no limit."""
    per_s: float | None = None
    """Calls begun per second; None: no limit."""
    adaptive: bool = False
    """They are being found out."""

    def __str__(self) -> str:
        rate = "" if self.per_s is None else f", {self.per_s:.3g} calls/s"
        return f"{'any number of' if self.at_once is None else self.at_once} calls at once{rate}"
