"""A model of known skill: gives or carries out the task's own solution with a given probability.

Its latency and its faults are known as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError, field_validator, model_validator

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, ModelMissingAnswer
from rollout_engine.models.acting import SHELL, act, can_act, shell_of
from rollout_engine.models.draws import exponential, lognormal, uniforms
from rollout_engine.models.local import Answer, Fault, Play
from rollout_engine.models.wire import encode
from rollout_engine.specs import Spec
from rollout_engine.types import CallContext, Message, Sampling, ToolSpec, Usage

WRONG = "I do not know the answer."
_OTHER_WRONG = ("no answer", "?")
_MAX_MS = 24 * 3600 * 1000.0
_MAX_COUNTED = 100_000
_PAD_TOKEN = 256
_LOGPROB = -0.25

Policy: TypeAlias = Callable[[CallContext, Sequence[Message], Sequence[ToolSpec], float], Message]
"""Decides what the model says: (context, messages, tools, a draw from [0, 1)) -> message. Knows no time or fault."""


class ScriptedOptions(Spec):
    """What `-m NAME=scripted:skill=0.7,latency_ms=50,...` takes. Probabilities are of one try of one call."""

    skill: float = Field(default=1.0, ge=0, le=1)
    """Probability of giving the task's own solution."""
    wrong: str = Field(default=WRONG, coerce_numbers_to_str=True)
    """The other answer; {task_id}, {attempt}, {turn} and {solution} are filled in."""
    latency_ms: float = Field(default=0.0, ge=0, le=_MAX_MS)
    """Mean time to an answer."""
    latency_dist: Literal["fixed", "exponential", "lognormal"] = "fixed"
    latency_sigma: float = Field(default=0.5, ge=0, le=5)
    """lognormal: the standard deviation of the logarithm."""
    p_429: float = Field(default=0.0, ge=0, le=1)
    retry_after_s: float = Field(default=1.0, ge=0, le=3600)
    """Retry-After of a 429."""
    p_500: float = Field(default=0.0, ge=0, le=1)
    p_cut: float = Field(default=0.0, ge=0, le=1)
    """The connection is cut in the middle of the answer."""
    p_hang: float = Field(default=0.0, ge=0, le=1)
    """No answer comes until the caller gives up."""
    p_garbage: float = Field(default=0.0, ge=0, le=1)
    """A 200 that is no completion."""
    p_empty: float = Field(default=0.0, ge=0, le=1)
    """An answer without text: a valid one, and a wrong one."""
    fail_first: int = Field(default=0, ge=0)
    """The first tries of each rollout's first call answer 500, whatever was drawn."""
    turns: int = Field(default=1, ge=1, le=1000)
    """Where the solution is a script and there is a shell: the calls that it takes, before the final text."""
    tokens: int | None = Field(default=None, gt=0, lt=2**31)
    """Completion tokens of an answer; default: by its length."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, value: Any) -> Any:
        assert not isinstance(value, bool), "a number or a text is wanted"  # True would pass for 1.0
        return value

    @model_validator(mode="after")
    def _sum(self) -> ScriptedOptions:
        total = self.p_429 + self.p_500 + self.p_cut + self.p_hang + self.p_garbage + self.p_empty
        if total > 1.0 + 1e-9:
            raise ValueError(f"the fault probabilities sum to {total:g}, which is more than 1")
        return self


def scripted_options(spec: ModelSpec) -> ScriptedOptions:
    """The checked options of a scripted model. Raises InputError that names the option."""
    try:
        return ScriptedOptions.model_validate(spec.options)
    except ValidationError as error:
        first = error.errors()[0]
    field = ".".join(("options", *map(str, first["loc"])))
    known = ", ".join(ScriptedOptions.model_fields)
    unknown = first["type"] == "extra_forbidden"
    raise InputError(
        "no such option" if unknown else f"{first['msg'].removeprefix('Value error, ')} (found {first['input']!r})",
        where=f"models.{spec.name}.{field}",
        fix=f"a scripted model takes: {known}",
    )


class ScriptedModel:
    """Answers from the context alone; only the count of failed tries is state of its own."""

    def __init__(self, options: ScriptedOptions, policy: Policy | None = None) -> None:
        self._options = options
        self._policy = policy if policy is not None else solution_policy(options.skill, options.wrong, options.turns)
        self._faults = _fault_table(options)
        self._faulty = bool(self._faults) or options.fail_first > 0
        # How often each call failed: the next try has a draw of its own. Bounded: calls that are given up stay in it.
        self._failed: OrderedDict[tuple[Any, ...], int] = OrderedDict()

    def play(
        self, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], context: CallContext
    ) -> Play:
        u_answer, u_latency = uniforms(context, "answer")
        fault = self._next_fault(context) if self._faulty else None
        message: Message = {"role": "assistant", "content": ""}
        if fault is None:
            message = self._policy(context, messages, tools, u_answer)
        answer = self._answer(message, messages, sampling)
        latency_s = self._latency_s(u_latency)
        return Play(answer, latency_s, fault if isinstance(fault, Fault) else None, self._options.retry_after_s)

    def _latency_s(self, u: float) -> float:
        options = self._options
        mean = options.latency_ms / 1000.0
        if options.latency_dist == "exponential":
            return exponential(u, mean)
        return lognormal(u, mean, options.latency_sigma) if options.latency_dist == "lognormal" else mean

    def _next_fault(self, context: CallContext) -> Fault | Literal["empty"] | None:
        """The fault of this try, drawn apart from the answer so that faults leave the pass rate as it is."""
        key = (context.seed, context.round, context.task_id, context.model, context.attempt, context.turn)
        tries = self._failed.pop(key, 0)
        fault = self._fault_of(context, tries)
        if isinstance(fault, Fault):
            self._failed[key] = tries + 1
            if len(self._failed) > _MAX_COUNTED:
                self._failed.popitem(last=False)
        return fault

    def _fault_of(self, context: CallContext, tries: int) -> Fault | Literal["empty"] | None:
        if context.turn == 0 and tries < self._options.fail_first:
            return Fault.SERVER_ERROR
        u, _ = uniforms(context, f"fault {tries}")
        return next((fault for bound, fault in self._faults if u < bound), None)

    def _answer(self, message: Message, messages: Sequence[Message], sampling: Sampling) -> Answer:
        text = _text(message)
        if sampling.logprobs:
            prompt_ids, ids = byte_tokens(messages), list(text.encode("utf-8", "replace"))
            if self._options.tokens is not None:
                ids = (ids + [_PAD_TOKEN] * (self._options.tokens - len(ids)))[: self._options.tokens]
            usage = Usage(len(prompt_ids), len(ids))
            return Answer(message, usage, _finish(message), prompt_ids, ids, [_LOGPROB] * len(ids))
        prompt_tokens = sum(len(str(part.get("content") or "")) for part in messages) // 4 + 1
        tokens = self._options.tokens or len(text) // 4 + 1
        return Answer(message, Usage(prompt_tokens, tokens), _finish(message))


def solution_policy(skill: float, wrong: str, turns: int = 1) -> Policy:
    """Gives the solution with probability `skill`, else a text that is not the solution.

    A solution that is a script is carried out in `turns` calls of the shell tool, where that is offered.
    """

    def policy(context: CallContext, messages: Sequence[Message], tools: Sequence[ToolSpec], u: float) -> Message:
        if can_act(context, tools):
            return act(context, messages, skill, turns, shell_of(tools))
        if u >= skill:
            return {"role": "assistant", "content": wrong_text(wrong, context)}
        if context.solution is None:
            raise ModelMissingAnswer(_missing(context))
        return {"role": "assistant", "content": context.solution}

    return policy


def _missing(context: CallContext) -> str:
    if context.script is not None:
        return f"the solution of task {context.task_id!r} is a script, and no tool {SHELL!r} was offered to run it with"
    return f"task {context.task_id!r} has no solution that a scripted model could give"


def wrong_text(template: str, context: CallContext) -> str:
    """The wrong answer; another one where it happens to be the solution."""
    text = template
    if "{" in template:
        fields = {"task_id": context.task_id, "attempt": context.attempt, "turn": context.turn}
        for name, value in {**fields, "solution": context.solution or ""}.items():
            text = text.replace(f"{{{name}}}", str(value))
    if context.solution is None or text.strip() != context.solution.strip():
        return text
    return next(other for other in _OTHER_WRONG if other != context.solution.strip())


def byte_tokens(messages: Sequence[Message]) -> list[int]:
    """The prompt as a byte-level tokenizer would see it: the next turn's begins with this one and its answer."""
    text = "".join(f"<{message.get('role')}>{_text(message)}" for message in messages)
    return list(f"{text}<assistant>".encode("utf-8", "replace"))


def _text(message: Message) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else encode(content) if content else ""
    return text + encode(calls) if calls else text


def _finish(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _fault_table(options: ScriptedOptions) -> list[tuple[float, Fault | Literal["empty"]]]:
    """(upper bound of the draw, fault), for the faults that can happen."""
    chances: tuple[tuple[float, Fault | Literal["empty"]], ...] = (
        (options.p_429, Fault.RATE_LIMITED),
        (options.p_500, Fault.SERVER_ERROR),
        (options.p_cut, Fault.CUT),
        (options.p_hang, Fault.HANG),
        (options.p_garbage, Fault.GARBAGE),
        (options.p_empty, "empty"),
    )
    table, bound = [], 0.0
    for chance, fault in chances:
        bound += chance
        if chance > 0.0:
            table.append((bound, fault))
    return table
