"""What `agent_options` of an agent program may say, checked at the door."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator

from rollout_engine.formats.base import Overrides
from rollout_engine.proxy.roles import RoleRule
from rollout_engine.specs import Spec

DEFAULT_PORT = 48_484
"""The proxy's, on the sandbox's own 127.0.0.1."""


class RoleOption(Spec):
    """Calls for which all that is said here holds get this role; see proxy/roles.py."""

    role: Literal["agent", "sub"] = "sub"
    model: str | None = None
    system: str | None = None
    prompt: str | None = None
    tools: bool | None = None
    header: tuple[str, str] | None = None

    def rule(self) -> RoleRule:
        return RoleRule(self.role, self.model, self.system, self.prompt, self.tools, self.header)


class CliOptions(Spec):
    """The same for every agent program."""

    args: tuple[str, ...] = ()
    """Further arguments, behind the program's own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of its environment."""
    directory: str | None = None
    """An installation that is on the hosts already, by its absolute path."""
    package: tuple[str, ...] | None = None
    """Other names of the packages to install, with their versions; None: those that were tried with this engine."""
    cache: str | None = None
    """Where installations are kept on each node; None: /var/tmp/rollout-engine-UID/agents."""
    in_image: bool = False
    """The program is in the sandbox's image, on its PATH: nothing is installed."""
    install_s: float = Field(default=1800.0, gt=0)
    """Installing, waiting for another process that does so included."""
    port: int = Field(default=DEFAULT_PORT, ge=1024, le=65535)
    """Where the proxy listens in the sandbox; a free port where it is taken (no network of the sandbox's own)."""
    idle_s: float = Field(default=600.0, gt=0)
    """A program that neither asks its model nor waits for its answer for this long is ended."""
    limit_grace_s: float = Field(default=5.0, ge=0)
    """A program that met a limit is told so by its next call, and may write its end for this long."""
    drain_s: float = Field(default=30.0, ge=0)
    """Calls of its helpers may go on for this long after its end."""
    agent_at_once: int = Field(default=4, gt=0)
    sub_at_once: int = Field(default=10, gt=0)
    max_sub_calls: int = Field(default=1000, ge=0)
    record_sub: bool = False
    """Calls of helpers are turns too."""
    roles: tuple[RoleOption, ...] = ()
    """Before the program's own rules."""
    system: str | None = None
    """Replaces the program's own system text."""
    log_bytes: int = Field(default=16 * 1024, gt=0, le=2**20)
    """Of each output, its tail, in the row's evidence."""

    @field_validator("directory", "cache")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not os.path.isabs(path):
            raise ValueError("must be an absolute path: each host looks for it on its own machine")
        return path

    def overrides(self) -> Overrides:
        return Overrides(system=self.system)


class EventOption(Spec):
    """Events for which every field has its value, and which field of them is meant. Dotted names."""

    when: dict[str, str | int | bool] = Field(default_factory=dict)
    take: str


class EventsOption(Spec):
    """How the lines of JSON on standard output are read; the last event that fits counts."""

    final: EventOption | None = None
    failed: EventOption | None = None
    prompt_tokens: EventOption | None = None
    """Summed over all events that fit."""
    completion_tokens: EventOption | None = None


class CommandOptions(CliOptions):
    """A program that the config describes. {url}, {model}, {home} and {prompt} are filled in in argv and env."""

    argv: tuple[str, ...] = Field(min_length=1)
    prompt: Literal["stdin", "argument"] = "stdin"
    """argument: argv names {prompt} itself."""
    answer: Literal["turn", "stdout"] | None = None
    """turn: the model's last text; stdout: all that was printed; None: the event stream's, else as turn."""
    answer_file: str | None = None
    """A file in the sandbox that holds the final answer."""
    events: EventsOption | None = None
    own_models: bool = False
    """Whatever model it asks for is answered by the rollout's; False: another name is refused."""
