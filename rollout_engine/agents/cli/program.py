"""What the engine knows of an agent program: how it is started, and how to read what it says. Small frozen data."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rollout_engine.proxy.roles import RoleRule

MOUNT = "/opt/rollout-agent"
"""Where an installation is seen in the sandbox."""
PROMPT_FILE = ".rollout-prompt"
"""Below the program's HOME; it becomes the program's standard input."""
KEY = "rollout"
"""The API key that programs are given: the proxy asks for none, but most programs do not start without one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One rollout as a program is told of it."""

    url: str
    """The proxy, up to and including the rollout's token."""
    model: str
    prompt: str
    home: str
    """A fresh directory in the sandbox."""

    def fill(self, text: str) -> str:
        """A text of the config's with {url}, {model}, {home} and {prompt} filled in."""
        for name in ("url", "model", "home", "prompt"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text


@dataclass(frozen=True, slots=True)
class Heard:
    """What a program said of itself. None: it does not say."""

    final: str | None = None
    """Its final answer."""
    failed: str | None = None
    """Why it gave up."""
    finished: bool | None = None
    """Whether its own last words came."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """Where an installation comes from. `names` are of one registry, each with its version."""

    manager: Literal["npm", "pip"]
    names: tuple[str, ...]
    programs: Mapping[str, str]
    """Machine (x86_64, aarch64; *: any) -> the program's place in the installation."""

    def program(self) -> str | None:
        """Its place for this machine; None: there is none."""
        return self.programs.get(platform.machine(), self.programs.get("*"))


Hear: TypeAlias = Callable[[bytes, bytes | None], Heard]
"""(standard output or its tail, the file that `Program.result` names) -> what they say."""


def _nothing(launch: Launch) -> Mapping[str, str]:
    return {}


def _silent(stdout: bytes, result: bytes | None) -> Heard:
    return Heard()


@dataclass(frozen=True, slots=True)
class Program:
    """One agent program. `command` gives its arguments, without the program itself."""

    name: str
    command: Callable[[Launch], Sequence[str]]
    binary: str
    """The program's name where it is in the image already."""
    package: Package | None = None
    interpreter: tuple[str, ...] = ()
    """What runs the installed program, where that is no executable itself."""
    env: Callable[[Launch], Mapping[str, str]] = _nothing
    files: Callable[[Launch], Mapping[str, str]] = _nothing
    """Settings, by path below HOME."""
    prompt: Literal["stdin", "argument"] = "stdin"
    hear: Hear = _silent
    result: str | None = None
    """A file (below HOME, or absolute) that holds what the program came to."""
    own_models: bool = False
    """It calls further models, whatever it is told: they are answered by the rollout's."""
    rules: Callable[[str], tuple[RoleRule, ...]] = field(default=lambda model: ())
    """Which of its calls are by helpers, where it knows the rollout's model by this name."""
