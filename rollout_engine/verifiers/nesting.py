"""Which verifiers a verifier's spec names inside: pure, over what a user wrote, whatever else is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 8
"""Verifiers within verifiers."""


def nested(spec: Any) -> Iterator[tuple[str, Any]]:
    """(place below the spec, spec) of the verifiers that a `hybrid` or `composite` names directly."""
    if not isinstance(spec, Mapping):
        return
    if spec.get("type") == "hybrid":
        yield from ((name, spec[name]) for name in ("rule", "judge") if name in spec)
    components = spec.get("components")
    if spec.get("type") == "composite" and isinstance(components, Mapping):
        for name, component in components.items():
            if isinstance(component, Mapping):
                yield f"components.{name}.verifier", component.get("verifier")


def types_in(spec: Any, where: str = "verifier", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(place, value) of every `type` that names an implementation."""
    if isinstance(spec, Mapping):
        yield f"{where}.type", spec.get("type")
    for name, inner in nested(spec) if depth <= MAX_DEPTH else ():
        yield from types_in(inner, f"{where}.{name}", depth + 1)


def is_deeper(spec: Any, depth: int) -> bool:
    """Whether more than `depth` verifiers stand within each other, this one counted."""
    return depth <= 0 or any(is_deeper(inner, depth - 1) for _, inner in nested(spec))
