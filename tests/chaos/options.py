"""What the suite is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.chaos.work import MODELS, K


def options(arguments: Sequence[str], about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=about)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=120.0, help="no further run is begun after so long")
    parser.add_argument("--tasks", type=int, default=60, help=f"of each run; each has {K * len(MODELS)} rollouts")
    parser.add_argument("--keep", metavar="FOLDER", help="run directories with a failed claim are copied there")
    return parser.parse_args(arguments)
