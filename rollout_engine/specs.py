"""What a user writes about a task: the door where it is checked. One JSON object a line, or `Task(...)`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from rollout_engine.types import Message

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""What servers of models take as the name of a function."""
MAX_PROCESSES = 4_194_304
"""More process ids Linux does not have."""
TaskId = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class Spec(BaseModel):
    """Frozen, and strict about unknown fields: a typing error is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class EnvironmentSpec(Spec):
    """Where a task's sandbox comes from. All fields empty: the host's own programs, read-only."""

    image: str | None = None
    """A Docker or OCI image."""
    directory: str | None = None
    """A directory on the hosts, used as a read-only root layer."""
    tar: str | None = None
    """A tar archive on the hosts, unpacked once per node."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every command."""
    workdir: Annotated[str, StringConstraints(pattern=r"^/")] = "/workspace"
    user: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Who runs the commands; None: the sandbox's own unprivileged default."""
    network: Literal["none", "host"] = "none"
    memory_mb: int | None = Field(default=None, gt=0)
    cpus: float | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, gt=0, le=MAX_PROCESSES)
    disk_mb: int | None = Field(default=None, gt=0)
    inodes: int | None = Field(default=None, gt=0)
    trusted: bool = False
    """The task's code may run without isolation (the `local` sandbox)."""
    require_limits: bool = False
    """Refuse the task where a limit above cannot be held."""

    @property
    def root(self) -> str | None:
        """What its own root is made from; None: it names none."""
        return self.image or self.directory or self.tar

    @model_validator(mode="after")
    def _one_root(self) -> EnvironmentSpec:
        given = [name for name in ("image", "directory", "tar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"a sandbox has one root: give {given[0]} or {given[1]}, not both")
        return self


class ServiceSpec(Spec):
    """A process that runs in the task's sandbox for as long as the rollout."""

    name: str
    command: str
    """Run by `sh -c` in the workspace."""
    health: str | None = None
    """A command that exits 0 once the service is up."""
    health_timeout_s: float = Field(default=30.0, gt=0)


class ToolTaskSpec(Spec):
    """A tool that a task gives its agent: exactly one of command, function, mcp."""

    name: ToolName
    """mcp: only in messages; the server's tools keep their own names."""
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    command: str | None = None
    """Run in the sandbox by `sh -c`; the arguments are its standard input, as JSON."""
    function: str | None = None
    """`module:attribute` of a Python function on the host: it runs with the host's rights, outside of the sandbox."""
    mcp: list[str] | None = None
    """argv of an MCP server over stdio inside the sandbox; all of its tools are offered."""

    @model_validator(mode="after")
    def _one_kind(self) -> ToolTaskSpec:
        if sum(kind is not None for kind in (self.command, self.function, self.mcp)) != 1:
            raise ValueError(f"tool {self.name!r} needs exactly one of command, function, mcp")
        return self


class TaskLimits(Spec):
    """Limits of one rollout; None takes the run's own."""

    max_turns: int | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    """Completion tokens over all turns."""
    max_output_bytes: int | None = Field(default=None, gt=0)
    """Bytes of one command's output that the agent sees."""
    start_s: float | None = Field(default=None, gt=0)
    agent_s: float | None = Field(default=None, gt=0)
    verify_s: float | None = Field(default=None, gt=0)


class Task(Spec):
    """One task. `verifier_code` is the short form of `verifier = {"type": "code", "code": ...}`."""

    task_id: TaskId = ""
    """Unique within a run; default: the hash of the content."""
    prompt: Annotated[str, StringConstraints(min_length=1)] | list[Message]
    """The user's message, or a whole list of chat messages."""
    system_prompt: str | None = None
    environment: EnvironmentSpec | None = None
    env_key: str | None = None
    """A named environment of the config, also `name:version`."""
    env_variables: dict[str, str] = Field(default_factory=dict)
    data_key: str | None = None
    """DATA_KEY in its sandboxes, the verifier's among them; `data_version` is DATA_VERSION."""
    data_version: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the workspace -> text, put there before the agent starts."""
    setup: list[str] = Field(default_factory=list)
    """Commands run once before the agent, by `sh -c`, in the workspace."""
    services: list[ServiceSpec] = Field(default_factory=list)
    tools: list[ToolTaskSpec] = Field(default_factory=list)
    workspace: list[str] = Field(default_factory=list)
    """Paths that the verifier sees; default: the whole working directory."""
    verifier: dict[str, Any] | None = None
    """`type` names the verifier; the other fields are its own."""
    verifier_code: str | None = None
    solution: str | dict[str, str] | None = None
    """The right final answer, or `{"script": ...}` that solves the task in its sandbox."""
    limits: TaskLimits = TaskLimits()
    on_verifier_error: Literal["null", "zero"] = "null"
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("verifier_code") is not None and data.get("verifier") is None:
            data = {**data, "verifier": {"type": "code", "code": data["verifier_code"]}}
            del data["verifier_code"]
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        if self.verifier_code is not None:
            raise ValueError("give verifier or verifier_code, not both")
        if self.verifier is None:
            raise ValueError("a task needs a verifier (or the short form verifier_code)")
        if self.environment is not None and self.env_key is not None:
            raise ValueError("give environment or env_key, not both")
        if isinstance(self.solution, dict) and set(self.solution) != {"script"}:
            raise ValueError('solution is a string (the final answer) or {"script": ...}')
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"two tools have one name: {', '.join(names)}")
        if isinstance(self.prompt, list) and not self.prompt:
            raise ValueError("prompt is an empty list of messages")
        if not self.task_id:
            object.__setattr__(self, "task_id", "task-" + content_digest(self)[:16])
        return self

    @property
    def needs_sandbox(self) -> bool:
        """Whether anything of the task happens in a sandbox."""
        return bool(self.environment or self.files or self.setup or self.services or self.tools)

    @property
    def answer(self) -> str | None:
        """The solution where it is a final answer."""
        return self.solution if isinstance(self.solution, str) else None

    @property
    def script(self) -> str | None:
        """The solution where it is a shell script for the task's sandbox."""
        return self.solution["script"] if isinstance(self.solution, dict) else None

    def messages(self) -> list[Message]:
        """The conversation before the first model call."""
        head: list[Message] = []
        if self.system_prompt is not None:
            head.append({"role": "system", "content": self.system_prompt})
        if isinstance(self.prompt, str):
            return [*head, {"role": "user", "content": self.prompt}]
        return [*head, *self.prompt]


def task_body(task: Task) -> bytes:
    """The canonical JSON of a task: what is stored in the plan, hashed, and sent to hosts."""
    return task.model_dump_json(exclude_defaults=True).encode()


def content_digest(task: Task) -> str:
    """Hex digest (128 bits) of everything in the task but its id."""
    body = task.model_dump_json(exclude_defaults=True, exclude={"task_id"})
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def body_digest(body: bytes) -> str:
    """Hex digest (128 bits) by which a task's body is known to hosts."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()
