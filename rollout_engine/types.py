"""The glossary: one frozen type for each thing that a rollout is made of.

task       what is asked, and how an answer is verified (`specs.Task`)
attempt    0..k-1, the repetition index
round      which submission of the same task within a run (a trainer's step; 0 in evaluation)
retry      how often an attempt was started again after an infrastructure failure
rollout    one attempt of one task by one model in one round; its dense number is its *key*
slot       the dense number of a (round, task) in the plan
group      the k rollouts of one slot x model
turn       one call of the model with the messages that are new since the last one
trajectory the turns of one rollout
score      what the verifier said of one rollout; null where it did not run to its end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, Any]
"""A chat message in the OpenAI form: role, content, and where they apply tool_calls, tool_call_id, name."""


class Status(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """The agent finished."""
    TRUNCATED = "truncated"
    """The agent met one of its own limits; the prefix is verified."""
    FAILED = "failed"
    """Infrastructure failed; there is no score."""
    CANCELLED = "cancelled"
    """The user, the trainer or a budget ended it; there is no score."""


class StopReason(StrEnum):
    """Why the agent stopped. All but FINISHED make the rollout `truncated`."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_OUTPUT = "max_output"
    AGENT_TIMEOUT = "agent_timeout"
    CONTEXT_OVERFLOW = "context_overflow"
    AGENT_EXIT = "agent_exit"
    OUT_OF_MEMORY = "out_of_memory"
    PROCESS_LIMIT = "process_limit"
    DISK_LIMIT = "disk_limit"


class Boundary(StrEnum):
    """The wall that a failure crossed."""

    TASK = "task"
    MODEL = "model"
    SANDBOX = "sandbox"
    SETUP = "setup"
    AGENT = "agent"
    VERIFIER = "verifier"
    HOST = "host"
    DEADLINE = "deadline"
    CANCEL = "cancel"


class Isolation(StrEnum):
    """Where a verifier ran, from the agent's point of view."""

    PURE = "pure"
    """In the engine, over the final answer alone: the agent has no way in."""
    FRESH = "fresh"
    SNAPSHOT = "snapshot"
    IN_PLACE = "in_place"
    """In the agent's own sandbox: an agent could have tampered with it."""


class KeySpace(NamedTuple):
    """Dense numbering of the rollouts of a run with `m` models and `k` attempts."""

    m: int
    k: int

    @property
    def per_slot(self) -> int:
        return self.m * self.k

    def key(self, slot: int, model: int, attempt: int) -> int:
        return (slot * self.m + model) * self.k + attempt

    def slot(self, key: int) -> int:
        return key // self.per_slot

    def model(self, key: int) -> int:
        return key // self.k % self.m

    def attempt(self, key: int) -> int:
        return key % self.k

    def group(self, key: int) -> int:
        """The dense number of the key's group: slot * m + model."""
        return key // self.k

    def slot_keys(self, slot: int) -> range:
        return range(slot * self.per_slot, (slot + 1) * self.per_slot)

    def group_keys(self, group: int) -> range:
        return range(group * self.k, (group + 1) * self.k)


class RolloutSpec(NamedTuple):
    """What a host needs to know to run one rollout; the task's body travels apart, by digest."""

    key: int
    round: int
    task_id: str
    digest: str
    model: str
    attempt: int
    retry: int
    generation: int
    queued_at: float
    """Wall clock, seconds since 1970, when the rollout was planned."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no score: which wall was crossed, by what, and whether another try may help."""

    boundary: Boundary
    type: str
    message: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them, and their price where the model has one."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that a model may call: its JSON schema is `parameters`."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None leaves the choice to the server."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request body, sent as they are."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """Which rollout a model call belongs to; scripted and replay models answer from it."""

    seed: int
    round: int
    task_id: str
    model: str
    attempt: int
    turn: int = 0
    solution: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a model, with token data exactly as the server sent it."""

    message: Message
    finish_reason: str
    usage: Usage = Usage()
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    weight_version: str | None = None
    model_s: float = 0.0
    """Seconds from the request to the whole answer, retries of the client included."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer: text that is new, or at the end the whole completion."""

    content: str = ""
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a trajectory. `messages` holds only what is new since the turn before."""

    index: int
    messages: list[Message]
    completion: Completion
    role: str = "agent"
    env_s: float = 0.0
    """Seconds that the environment (tools) took before this call."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What an agent did: its turns, and its final answer (None: it gave none)."""

    turns: tuple[Turn, ...] = ()
    final_answer: str | None = None

    @property
    def messages(self) -> list[Message]:
        return [message for turn in self.turns if turn.role == "agent" for message in turn.messages]


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's finding. `value` is finite; `passed` None means value >= the run's pass threshold."""

    value: float
    passed: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command in a sandbox ended. A non-zero exit is a result, not an error.

    `exit_code` is negative for a signal (-9: killed). Each stream keeps its tail, and says if it lost its head.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    oom: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(slots=True)
class RolloutRecord:
    """One row of the commit log: what is known of one rollout when it has ended. See docs/schema.md."""

    key: int
    round: int
    task_id: str
    model: str
    attempt: int
    retries: int = 0
    generation: int = 0
    status: str = Status.FAILED.value
    stop_reason: str | None = None
    score: float | None = None
    passed: bool | None = None
    score_components: dict[str, float] = field(default_factory=dict)
    failure_boundary: str | None = None
    failure_type: str | None = None
    failure_message: str | None = None
    retryable: bool | None = None
    verifier_isolation: str | None = None
    limits_enforced: str | None = None
    num_turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    final_answer: str | None = None
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    queue_s: float = 0.0
    start_s: float = 0.0
    agent_s: float = 0.0
    verify_s: float = 0.0
    close_s: float = 0.0
    host_id: str = ""
    node_id: str = ""
    sandbox: str = "none"
    weight_version_start: str | None = None
    weight_version_end: str | None = None
    trace_file: str | None = None
    trace_offset: int | None = None
    trace_sha256: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def fail(self, failure: Failure) -> None:
        """Records an infrastructure failure: no score, whatever was known before."""
        self.status = Status.FAILED.value
        self.score, self.passed, self.score_components = None, None, {}
        self.note(failure)

    def cancel(self, failure: Failure | None = None) -> None:
        """The user, the trainer or a budget ended the rollout: no score."""
        self.status = Status.CANCELLED.value
        self.score, self.passed, self.score_components = None, None, {}
        if failure is not None:
            self.note(failure)

    def note(self, failure: Failure) -> None:
        """Names what went wrong without deciding the status (a verifier's error leaves the agent's ending)."""
        self.failure_boundary = failure.boundary.value
        self.failure_type = failure.type
        self.failure_message = failure.message
        self.retryable = failure.retryable


def new_record(spec: RolloutSpec, now: float) -> RolloutRecord:
    """The row of a rollout that starts, or ends unstarted, at `now` (seconds since 1970)."""
    return RolloutRecord(
        key=spec.key,
        round=spec.round,
        task_id=spec.task_id,
        model=spec.model,
        attempt=spec.attempt,
        retries=spec.retry,
        generation=spec.generation,
        queued_at=spec.queued_at,
        started_at=now,
        ended_at=now,
        queue_s=max(now - spec.queued_at, 0.0),
    )
