"""What a judge replied, as a score. Pure: text in, Score out, or VerifierBadReturn that says what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any

from rollout_engine.errors import VerifierBadReturn
from rollout_engine.types import Score
from rollout_engine.verifiers.reward import finite

FORM = 'Reply with one JSON object and nothing else: {"verdict": "correct" or "incorrect"} or {"score": a number}'
VERDICTS = {"correct": True, "incorrect": False}
KEYS = frozenset({"verdict", "score", "reason"})
MAX_REPLY_CHARS = 64 * 1024
"""A longer reply is no verdict."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n```", re.DOTALL)


def parse_verdict(reply: str, score_range: tuple[float, float] = (0.0, 1.0)) -> Score:
    """One JSON object, alone or in one code fence, with `verdict`, `score` or both, and a `reason` if it likes.

    `score` counts where there is one, and `verdict` then says whether it is a pass. Anything else raises
    VerifierBadReturn: words around it, other or doubled keys, a score that is text, not finite, or out of range.
    """
    found = _object(reply)
    unknown = sorted(set(found) - KEYS)
    if unknown:
        raise VerifierBadReturn(f"it has the key {unknown[0][:80]!r}; known: {', '.join(sorted(KEYS))}")
    passed = _passed(found["verdict"]) if "verdict" in found else None
    if "score" not in found and passed is None:
        raise VerifierBadReturn("it has neither verdict nor score")
    if "score" not in found:
        return Score(score_range[1] if passed else score_range[0], passed)
    if isinstance(found["score"], bool):
        raise VerifierBadReturn(f"score is {found['score']}, not a number")
    score, (low, high) = finite(found["score"], "score"), score_range
    if not low <= score <= high:
        raise VerifierBadReturn(f"score {score:g} is not within {low:g} to {high:g}")
    return Score(score, passed)


def _object(reply: str) -> dict[str, Any]:
    if len(reply) > MAX_REPLY_CHARS:
        raise VerifierBadReturn(f"it has {len(reply)} characters, more than {MAX_REPLY_CHARS}")
    text = reply.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        found = json.loads(fenced[1] if fenced else text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise VerifierBadReturn(f"it is no JSON ({error}): {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise VerifierBadReturn(f"it is no JSON object: {text[:80]!r}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that stands there twice could be the judge's word and somebody else's."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _passed(verdict: Any) -> bool:
    if not isinstance(verdict, str) or verdict not in VERDICTS:
        raise VerifierBadReturn(f"verdict is {verdict!r:.80}, not {' or '.join(map(repr, VERDICTS))}")
    return VERDICTS[verdict]
