"""Placeholder."""

from rollout_engine.specs import Task


def static_reasons(task: Task) -> tuple[str, ...]:
    return ()
