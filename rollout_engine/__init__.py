"""k attempts x m models x n tasks, of any agent in any sandbox, over Ray, into Arrow tables with rewards.

The names below are loaded when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_engine.config import ModelSpec, RunConfig
    from rollout_engine.engine import RolloutEngine, run
    from rollout_engine.errors import InputError, RolloutEngineError, RunError
    from rollout_engine.results import Group, Run
    from rollout_engine.specs import Task
    from rollout_engine.types import RolloutRecord
    from rollout_engine.version import VERSION as __version__

_HOMES = {
    "Group": "results",
    "InputError": "errors",
    "ModelSpec": "config",
    "RolloutEngine": "engine",
    "RolloutEngineError": "errors",
    "RolloutRecord": "types",
    "Run": "results",
    "RunConfig": "config",
    "RunError": "errors",
    "Task": "specs",
    "run": "engine",
}

__all__ = [
    "Group",
    "InputError",
    "ModelSpec",
    "RolloutEngine",
    "RolloutEngineError",
    "RolloutRecord",
    "Run",
    "RunConfig",
    "RunError",
    "Task",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("rollout_engine.version").VERSION
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollout_engine.{_HOMES[name]}"), name)
