"""The `math` verifier: whether two mathematical expressions are the same, by the package math-verify."""

from __future__ import annotations

from rollout_engine.verifiers.maths.verifier import Math

__all__ = ["Math"]
