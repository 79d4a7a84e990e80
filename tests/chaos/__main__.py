"""Kills at random moments, again and again: `python -m tests.chaos --seed 1 --kills 200` (root).

Runs of short rollouts on three Ray nodes are struck while they go on, by a plan that the seed decides and that is
printed first. A run is over when all its rows are there; the next one begins, until nothing of the plan is left. After
each: every planned row once, equal to that of an undisturbed run, and nothing left over. Exit code 1 where not.
"""

from __future__ import annotations

import os
import sys

from tests.chaos.options import options
from tests.chaos.place import Place


def main() -> int:
    options(sys.argv[1:], __doc__)
    if os.geteuid() != 0:
        sys.exit("tests.chaos: only root can shut the suite in a place of its own")
    with Place() as place:
        return place.run("tests.chaos.suite", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
