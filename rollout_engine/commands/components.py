"""The parts of a score beside the parts of the verifier that gave them: pure, over a task's spec and a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from rollout_engine.verifiers.nesting import MAX_DEPTH, nested


class Component(NamedTuple):
    """One part of a score. `value` None: it was not asked, or was left out for want of a finding."""

    name: str
    value: float | None
    verifier: str | None = None
    """The type of the verifier that gave it; None: a number within the finding of one."""
    weight: float | None = None
    optional: bool = False


def components_of(verifier: Any, values: Mapping[str, float]) -> list[Component]:
    """Every part that the verifier has, in its order, and behind each what else its finding brought."""
    parts = list(_parts(verifier))
    names = {part.name for part in parts}
    rest = {name: value for name, value in values.items() if name not in names}
    found: list[Component] = []
    for part in parts:
        found.append(part._replace(value=values.get(part.name)))
        own = [name for name in rest if _owner(name, names) == part.name]
        found += [Component(name, rest.pop(name)) for name in own]
    return found + [Component(name, value) for name, value in rest.items()]


def _owner(name: str, parts: Set[str]) -> str | None:
    """The innermost part whose number this is: `style` of `style.length`."""
    return max((part for part in parts if name.startswith(f"{part}.")), key=len, default=None)


def _parts(verifier: Any, prefix: str = "", depth: int = 0) -> Iterator[Component]:
    if depth > MAX_DEPTH:
        return
    for place, inner in nested(verifier):
        name = place.removeprefix("components.").removesuffix(".verifier")
        kind = str(inner.get("type")) if isinstance(inner, Mapping) else None
        its = verifier["components"][name] if verifier["type"] == "composite" else {}
        weight = its.get("weight", 1.0) if verifier["type"] == "composite" else None
        yield Component(prefix + name, None, kind, weight, bool(its.get("optional")))
        yield from _parts(inner, f"{prefix}{name}.", depth + 1)
