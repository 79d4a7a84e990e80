"""What is killed, and after how many rows: a sequence that a seed decides, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["host", "raylet", "driver", "docker", "model", "stop"]
"""stop: a host gets SIGSTOP, is taken for dead, and wakes up again."""
KINDS: tuple[Kind, ...] = get_args(Kind)
WEIGHTS = {"host": 6, "raylet": 3, "driver": 4, "docker": 3, "model": 4, "stop": 1}
"""How often each kind comes, beside the others."""
MOST_ROWS = 24
"""Rows that are committed between two strikes, at most."""
PAIRS = 0.2
"""The part of the strikes that kill two things at once."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Kills that come at one moment, when `rows` more rows are committed than there were."""

    rows: int
    kinds: tuple[Kind, ...]
    pick: int
    """Decides which host or node, of those that are there then."""

    def __str__(self) -> str:
        return f"{'+'.join(self.kinds)}@{self.rows}"


def make_plan(seed: int, kills: int, kinds: tuple[Kind, ...] = KINDS) -> list[Strike]:
    """The strikes of a suite: `kills` in all, each kind at least once where there is room for all."""
    dice = random.Random(seed)
    order = [*kinds, *dice.choices(kinds, [WEIGHTS[kind] for kind in kinds], k=max(kills - len(kinds), 0))][:kills]
    dice.shuffle(order)
    strikes: list[Strike] = []
    while order:
        taken = [order.pop()]
        if order and order[-1] != taken[0] and dice.random() < PAIRS:
            taken.append(order.pop())
        strikes.append(Strike(dice.randint(1, MOST_ROWS), tuple(taken), dice.randrange(2**16)))
    return strikes
