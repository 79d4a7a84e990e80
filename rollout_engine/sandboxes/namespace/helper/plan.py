"""What a new box is told: its launcher decides, the box does."""

from __future__ import annotations

from typing import NamedTuple

from rollout_engine.sandboxes.namespace.helper.limits import Limits


class Plan(NamedTuple):
    """Travels as a plain tuple: with names, reading it would cost a box a page for each."""

    limits: Limits
    held: tuple[str, ...]
    """The limits that a control group holds."""
    groups: int
    """How many control groups there are to enter."""
    ids: int
    """How many user ids the box has."""
    userns: bool
    """Whether they are those of a user namespace of its own."""
    network: bool
    """Whether it has a network of its own, with nothing but a loopback."""
    trees: tuple[tuple[str, int], ...]
    """Mount points, and of how many layers each is made."""
    workdir: str
    user: str | None
    library: int
    """A descriptor of the standard library, or -1."""


def read(told: tuple[object, ...]) -> Plan:
    """The plan that a launcher sent."""
    plan = Plan(*told)  # type: ignore[arg-type]
    return plan._replace(limits=Limits(*plan.limits))
