"""What a process that judges replies, read as what anything may have written."""

from __future__ import annotations

import json
from typing import Any

from rollout_engine.errors import VerifierError

SHOWN_BYTES = 200


def parse_reply(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises VerifierError."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"what came back is no verdict: {data[:SHOWN_BYTES]!r}") from error
    if not isinstance(reply, dict):
        raise VerifierError(f"what came back is no verdict: {data[:SHOWN_BYTES]!r}")
    return reply
