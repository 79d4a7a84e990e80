"""The contract of a wire format: an agent's request -> `Asked`, and an answer -> what that agent expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollout_engine.types import Completion, Delta, Message, Sampling, ToolSpec

CONTEXT_OVERFLOW = "context_length_exceeded"
"""The code of an error that says that a prompt does not fit: agents shorten their history when they see it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, understood. Fields that no other format knows are left out."""

    model: str
    messages: list[Message]
    sampling: Sampling = field(default_factory=Sampling)
    """`extra` holds tool_choice, parallel_tool_calls, response_format, reasoning_effort and top_k in chat's form."""
    tools: tuple[ToolSpec, ...] = ()
    stream: bool = False
    include_usage: bool = True
    """chat: whether the agent wants the usage as a chunk of its own."""
    free_text: frozenset[str] = frozenset()
    """responses: tools whose input is a text; the engine knows it as the argument `input`."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the run fixes, whatever the agent asks for. None: the agent's own."""

    model: str | None = None
    """The model's name at its server."""
    sampling: Sampling = field(default_factory=Sampling)
    """What is set here replaces the agent's."""
    system: str | None = None
    """The system text."""
    tools: tuple[ToolSpec, ...] | None = None


class Writer(Protocol):
    """One streamed answer as server-sent events, in the format's own order; always whole events."""

    ping: bytes
    """What keeps a stream alive while the model thinks; may come anywhere between events."""

    def begin(self) -> bytes:
        """What comes before the first piece."""
        ...

    def write(self, delta: Delta) -> bytes:
        """One piece; may be empty."""
        ...

    def end(self, completion: Completion) -> bytes:
        """All that the pieces left out, and the format's own end."""
        ...

    def error(self, status: int, message: str, code: str) -> bytes:
        """The end of a stream that failed."""
        ...


class Assembler(Protocol):
    """Puts the events of one streamed answer together."""

    @property
    def finished(self) -> bool:
        """The server said why it stopped."""
        ...

    @property
    def ended(self) -> bool:
        """Nothing comes after this."""
        ...

    def add(self, event: Any) -> Delta:
        """Takes one event in; what is new. Raises ModelBadResponse."""
        ...

    def completion(self, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The whole answer. Raises ModelError."""
        ...


class Format(Protocol):
    """One wire format, in both directions: for agents that ask us, and for servers that we ask."""

    name: str

    # -- towards agents

    def parse(self, body: Mapping[str, Any], model: str = "", stream: bool = False) -> Asked:
        """A request. `model` and `stream` are the path's, where the format has them there. Raises Malformed."""
        ...

    def overridden(self, body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
        """The body as the run wants it sent on: a new one where anything changes, else the same object."""
        ...

    def response(self, completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
        """The body of an answer that is not streamed. `number` makes its ids; `created` is in seconds since 1970."""
        ...

    def writer(self, asked: Asked, number: int, created: int) -> Writer:
        """A streamed answer."""
        ...

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        """The body of an error."""
        ...

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        """The list of models."""
        ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The tokens of a prompt."""
        ...

    # -- towards servers

    def request(
        self, model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
    ) -> dict[str, Any]:
        """A request to a server: the inverse of `parse`."""
        ...

    def completion(self, data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The answer in a body: the inverse of `response`. Raises ModelError."""
        ...

    def assembler(self) -> Assembler:
        """The inverse of `writer`."""
        ...


def data_event(data: str) -> bytes:
    """An event without a name."""
    return b"data: " + data.encode() + b"\n\n"


def named_event(name: str, data: str) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + data.encode() + b"\n\n"


def changed(body: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the changes; the same object where they change nothing, so that it can pass as it came."""
    return {**body, **changes} if any(body.get(name) != value for name, value in changes.items()) else body


def merged(own: Sampling, fixed: Sampling) -> Sampling:
    """An agent's sampling parameters with the run's in place of them."""
    return Sampling(
        temperature=own.temperature if fixed.temperature is None else fixed.temperature,
        top_p=own.top_p if fixed.top_p is None else fixed.top_p,
        max_tokens=own.max_tokens if fixed.max_tokens is None else fixed.max_tokens,
        seed=own.seed if fixed.seed is None else fixed.seed,
        stop=fixed.stop or own.stop,
        logprobs=own.logprobs or fixed.logprobs,
        extra={**own.extra, **fixed.extra},
    )


def with_system(messages: list[Message], system: str) -> list[Message]:
    """The messages with this system text in place of the leading one."""
    at = 0
    while at < len(messages) and messages[at].get("role") in ("system", "developer"):
        at += 1
    return [{"role": "system", "content": system}, *messages[at:]]


def asked_with(asked: Asked, fixed: Overrides) -> Asked:
    """A request with the run's overrides, for a server that speaks another format."""
    return replace(
        asked,
        messages=asked.messages if fixed.system is None else with_system(asked.messages, fixed.system),
        sampling=merged(asked.sampling, fixed.sampling),
        tools=asked.tools if fixed.tools is None else fixed.tools,
    )
