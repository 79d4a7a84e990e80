"""The `code` verifier: a Python function that comes with its task, and that nobody trusts."""

from __future__ import annotations

from rollout_engine.verifiers.code.verifier import Code

__all__ = ["Code"]
