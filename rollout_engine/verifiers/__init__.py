"""Verifiers: one contract (base.py), one file per type, each imported only when a task names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rollout_engine.errors import InputError
from rollout_engine.plugins import find
from rollout_engine.verifiers.base import Verifier
from rollout_engine.verifiers.workshop import Workshop

VERIFIERS: dict[str, str] = {
    "code": "rollout_engine.verifiers.code:Code",
    "composite": "rollout_engine.verifiers.composite:Composite",
    "hybrid": "rollout_engine.verifiers.hybrid:Hybrid",
    "judge": "rollout_engine.verifiers.judge:Judge",
    "match": "rollout_engine.verifiers.match:Match",
    "math": "rollout_engine.verifiers.maths:Math",
    "script": "rollout_engine.verifiers.script:Script",
}
"""`type` -> `module:attribute` of a factory `(spec, *, timeout_s) -> Verifier`, which raises InputError about a
spec that it cannot use, with the dotted field (`verifier.pattern`) as its `where`. One with `uses_workshop = True`
also gets `workshop`: what the verifiers of its host share, or None where it is only made to see whether it can be."""

ENTRY_POINTS = "rollout_engine.verifiers"
"""Installed packages add types under this entry-point group."""


def make_verifier(spec: Mapping[str, Any], *, timeout_s: float = 300.0, workshop: Workshop | None = None) -> Verifier:
    """The verifier that a task's `verifier` describes. Raises InputError naming the field.

    `timeout_s` is the verifier's limit for one verdict; it raises VerifierTimeout beyond it.
    """
    kind = spec.get("type")
    if not isinstance(kind, str):
        raise InputError(
            "a required field is missing" if kind is None else f"must be text, found {kind!r}",
            "verifier.type",
            f"name a type: {', '.join(sorted(VERIFIERS))}, or module:attribute of your own",
        )
    factory = find(kind, VERIFIERS, "verifier", group=ENTRY_POINTS, where="verifier.type")
    shared = {"workshop": workshop} if getattr(factory, "uses_workshop", False) else {}
    return cast("Verifier", factory(spec, timeout_s=timeout_s, **shared))


def check_verifier(spec: Mapping[str, Any]) -> Verifier:
    """What the spec describes, only to look at. Raises InputError naming the field where it cannot be made."""
    return make_verifier(spec)
