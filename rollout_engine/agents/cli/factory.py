"""Makes the agent of a program that the engine knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rollout_engine.agents.cli.agent import CliAgent
from rollout_engine.agents.cli.options import CliOptions
from rollout_engine.agents.cli.program import Program
from rollout_engine.problems import checked


@dataclass(frozen=True, slots=True)
class Factory:
    """Takes `agent_options`. Raises InputError."""

    program: Program
    needs_sandbox: ClassVar[bool] = True

    def __call__(self, **options: Any) -> CliAgent:
        return CliAgent(self.program, checked(CliOptions, options, "agent_options"))
