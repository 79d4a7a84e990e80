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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
"""A chat message in the OpenAI form: role, content, and where they apply tool_calls, tool_call_id, name.

`content` is a text, or a list of parts: {"type": "text", "text"} and {"type": "image_url", "image_url": {"url"}}
(http, https or data). What a model thought is `reasoning_content`, a text, where that is all of it; signatures and
encrypted thoughts of the other wire formats are in `reasoning_blocks` (formats/parts.py), and then only there.
"""

NO_SANDBOX = "none"
"""The `sandbox` of a row that had none."""


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
    """Prompt tokens that were read from the server's cache."""
    cache_write_tokens: int = 0
    """Prompt tokens that were written to it, where the server counts them."""
    reasoning_tokens: int = 0
    """Completion tokens that were thought and not said, where the server counts them."""


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


class CallGate(Protocol):
    """How a client tells its host what became of each try of a call, and pauses without holding others up."""

    def answered(self) -> None:
        """This try got an answer."""
        ...

    def failed(self) -> None:
        """This try got neither: an error that says nothing of how much the server takes."""
        ...

    def refused(self, pause_s: float | None) -> None:
        """This try got a 429, and the pause that it asked for: the whole cluster's calls keep to that."""
        ...

    async def pause(self, seconds: float) -> None:
        """Returns when the next try may begin, after so many seconds at least."""
        ...


class CallContext(NamedTuple):
    """Which rollout a model call belongs to; scripted and replay models answer from it."""

    seed: int
    round: int
    task_id: str
    model: str
    attempt: int
    turn: int = 0
    solution: str | None = None
    """The task's solution where it is a final answer."""
    script: str | None = None
    """The task's solution where it is a shell script."""
    gate: CallGate | None = None
    """Where each try is told; None: nobody asks. Stays on its host."""


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
    stop_sequence: str | None = None
    """The stop text that ended the answer, where the server says which."""


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of a streamed tool call. The first piece of a call names it; arguments add up to JSON."""

    index: int
    """Which of the answer's calls, from 0."""
    arguments: str = ""
    id: str = ""
    name: str = ""
    extra: Mapping[str, Any] | None = None
    """What else belongs to the call (`extra_content`: a signature of the thought behind it)."""


class Delta(NamedTuple):
    """A piece of a streamed answer: what is new, or at the end the whole completion."""

    content: str = ""
    completion: Completion | None = None
    reasoning: str = ""
    tools: tuple[ToolPiece, ...] = ()
    block: Mapping[str, Any] | None = None
    """A reasoning block that is complete now, where it is more than its text (formats/parts.py)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a trajectory. `messages` holds only what is new since the turn before."""

    index: int
    messages: list[Message]
    completion: Completion
    role: str = "agent"
    """agent, or sub: a call by a helper of the agent, apart from its own conversation."""
    env_s: float = 0.0
    """Seconds that the environment (tools) took before this call."""
    parent: int | None = None
    """Index of the turn whose conversation this one goes on from; None: the turn before it of the same role."""
    kept: int | None = None
    """Messages of that conversation that this one keeps; None: all. Fewer: the agent rewrote its history."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What an agent did: its turns, and its final answer (None: it gave none)."""

    turns: tuple[Turn, ...] = ()
    final_answer: str | None = None

    @property
    def messages(self) -> list[Message]:
        """The agent's conversation as its last turn has it."""
        return conversation([turn for turn in self.turns if turn.role == "agent"])


def conversation(turns: Sequence[Turn]) -> list[Message]:
    """The messages of the last of these turns, which are of one role and in order, with all that went before."""
    if all(turn.kept is None and turn.parent is None for turn in turns):
        return [message for turn in turns for message in turn.messages]
    whole: dict[int, list[Message]] = {}
    said: list[Message] = []
    for turn in turns:
        before = said if turn.parent is None else whole.get(turn.parent, [])
        said = [*before[: turn.kept], *turn.messages]
        whole[turn.index] = said
    return said


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's finding. `value` is finite; `passed` None means value >= the run's pass threshold."""

    value: float
    passed: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    output: str = field(default="", compare=False)
    """What the verifier had to say beside it: its command's output, its code's, its judge's reply."""


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
    """The kernel killed for memory in the sandbox while it ran: the command itself, or what it had started."""
    duration_s: float = 0.0
    crowded: bool = False
    """It was never started: the sandbox is at its limit of processes."""

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
    verifier_output: str | None = None
    limits_enforced: str | None = None
    oom_kills: int | None = None
    num_turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    thrown_prompt_tokens: int = 0
    thrown_completion_tokens: int = 0
    thrown_cost_usd: float | None = None
    judge_calls: int = 0
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0
    judge_cost_usd: float | None = None
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
    sandbox: str = NO_SANDBOX
    weight_version_start: str | None = None
    weight_version_end: str | None = None
    agent_exit_code: int | None = None
    evidence: str | None = None
    trace_file: str | None = None
    trace_offset: int | None = None
    trace_sha256: str | None = None
    hook_errors: list[str] = field(default_factory=list)
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
