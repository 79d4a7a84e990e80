"""What a verifier's result file says, as a score. Pure: bytes in, Score out."""

from __future__ import annotations

import json
import math
from typing import Any

from rollout_engine.errors import VerifierBadReturn
from rollout_engine.types import Score

SCORE_KEYS = ("reward", "score")
MAX_RESULT_BYTES = 64 * 1024
MAX_COMPONENTS = 100


def score_of_json(data: bytes, name: str = "reward.json") -> Score:
    """A bare number, or a flat object of finite numbers of which `reward` or `score` is the score."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VerifierBadReturn(f"{name} is no JSON ({error}): {_shown(data)}") from error
    if not isinstance(value, dict):
        return Score(finite(value, name))
    key = next((key for key in SCORE_KEYS if key in value), None)
    if key is None:
        raise VerifierBadReturn(f"{name} has neither {' nor '.join(SCORE_KEYS)}: {_shown(data)}")
    return Score(finite(value[key], f"{name}: {key}"), components=components(value, name))


def score_of_text(data: bytes, name: str = "reward.txt") -> Score:
    """One number."""
    try:
        value = float(data.decode())
    except (ValueError, OverflowError) as error:
        raise VerifierBadReturn(f"{name} is no number: {_shown(data)}") from error
    return Score(finite(value, name))


def components(values: dict[Any, Any], what: str) -> dict[str, float]:
    """Raises VerifierBadReturn where one is no finite number."""
    if len(values) > MAX_COMPONENTS:
        raise VerifierBadReturn(f"{what} has {len(values)} components, more than {MAX_COMPONENTS}")
    return {str(name): finite(value, f"{what}: {str(name)[:80]}") for name, value in values.items()}


def finite(value: Any, what: str) -> float:
    """A number or bool as a float. Never clips, never replaces: anything else is no finding."""
    if not isinstance(value, int | float):
        raise VerifierBadReturn(f"{what} is {value!r:.80}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VerifierBadReturn(f"{what} is {value!r:.80}, which is not finite")
    return number


def _shown(data: bytes) -> str:
    return repr(data[:80].decode(errors="replace"))
