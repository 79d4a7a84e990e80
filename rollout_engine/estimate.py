"""How many tokens a call will take, guessed before it is made: pure, and better with each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_engine.types import Message, Usage

TOKENS_PER_CHAR = 0.3
"""Of a prompt, before the first answer says how many it has."""
FIRST_ANSWER_TOKENS = 256
"""Of an answer, before the first one, where the call has no limit of its own."""
WEIGHT = 0.1
"""Of each new answer in the averages."""
MESSAGE_CHARS = 12
"""What a message's role and marks weigh beside its text."""


@dataclass(slots=True)
class TokenEstimate:
    """The prompt's characters times the usual tokens per character, and the usual length of an answer.

    An answer counts with no more than the call's own limit of tokens, and before the first one with all of that.
    """

    per_char: float | None = None
    answer: float | None = None

    def chars(self, messages: Sequence[Message]) -> int:
        """Characters of a prompt, tool calls and all parts of its contents included."""
        return sum(_chars(message) + MESSAGE_CHARS for message in messages)

    def tokens(self, chars: int, max_tokens: int | None) -> float:
        """Tokens of prompt and answer together."""
        per_char = TOKENS_PER_CHAR if self.per_char is None else self.per_char
        answer = self.answer
        if answer is None:
            answer = float(max_tokens if max_tokens is not None else FIRST_ANSWER_TOKENS)
        if max_tokens is not None:
            answer = min(answer, max_tokens)
        return per_char * chars + answer

    def learn(self, chars: int, usage: Usage) -> None:
        """Takes in what a server counted; one that does not count teaches nothing."""
        if usage.completion_tokens:
            self.answer = _mean(self.answer, usage.completion_tokens)
        if usage.prompt_tokens and chars:
            self.per_char = _mean(self.per_char, usage.prompt_tokens / chars)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_chars(part) for part in value.values())
    return sum(_chars(part) for part in value) if isinstance(value, list | tuple) else 0
