"""Reads what agent programs print: one JSON object a line. Pure, and nothing in it can make it fail."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TEXT_CHARS = 10_000
"""Of a reason that a program gives for giving up."""


def events_of(stdout: bytes) -> Iterator[dict[str, Any]]:
    """The objects among the lines; whatever else is printed, a line cut at the head of a tail too, is passed over."""
    for line in stdout.split(b"\n"):
        if line.lstrip()[:1] == b"{" and isinstance(data := parsed(line), dict):
            yield data


def parsed(text: bytes | None) -> Any:
    """The JSON value; None where it is none."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def at(data: Any, path: str) -> Any:
    """What a dotted path names; None where there is nothing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def text_at(data: Any, path: str) -> str | None:
    found = at(data, path)
    return found if isinstance(found, str) else None


def number_at(data: Any, path: str) -> int:
    """A count; 0 where there is none."""
    found = at(data, path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def reason(value: Any) -> str:
    """Why a program gave up, as a text."""
    return (value if isinstance(value, str) and value else json.dumps(value))[:MAX_TEXT_CHARS]
