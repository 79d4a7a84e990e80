"""Kills of every kind in one run after another: no row lost or doubled, nothing left. The long form: `make chaos`.

One part: python -m tests.chaos --seed 1 --kills 15 --tasks 40
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.chaos.conftest import started
from tests.chaos.plan import KINDS, make_plan

SUITE_S = 1800.0
"""Three minutes on a machine with nothing else to do."""


def test_a_plan_is_the_seeds_and_has_every_kind() -> None:
    plan = make_plan(7, 200)
    assert plan == make_plan(7, 200) != make_plan(8, 200)
    kinds = Counter(kind for strike in plan for kind in strike.kinds)
    assert kinds.total() == 200
    assert set(kinds) == set(KINDS)
    assert any(len(strike.kinds) == 2 for strike in plan)


@pytest.mark.ray
def test_fifteen_kills_lose_no_row_and_leave_nothing(as_root: None) -> None:
    with started("-m", "tests.chaos", "--seed", "1", "--kills", "15", "--tasks", "40") as suite:
        ends = time.monotonic() + SUITE_S
        assert suite.stdout is not None
        for line in suite.stdout:  # shown as far as it came
            print(line, end="")
            assert time.monotonic() < ends
        assert suite.wait() == 0
