"""The work that every case of the first benchmark does: one question, one fixed answer, one regex.

Standard library only: it is imported in the peers' own environments too.
"""

from __future__ import annotations

import re

LATENCY_S = 0.05
"""What the stub server waits before it answers."""
IN_FLIGHT = 256
WARM_UP = 64
"""Rollouts that each case runs through its whole path before its meter starts."""
MODEL = "stub-model"
API_KEY = "not-a-key"
EXPECTED = "42"
ANSWER = f"The answer is: {EXPECTED}"
PATTERN = r"answer is:\s*(\d+)"


def question(index: int) -> str:
    """The prompt of rollout `index`; each is different, so that nobody can cache it."""
    return f"Question {index}: what is {index} - {index} + {EXPECTED}?"


def scored(answer: str) -> bool:
    """What the peers' scorers do: the pattern's capture is the expected text."""
    found = re.search(PATTERN, answer)
    return found is not None and found.group(1) == EXPECTED
