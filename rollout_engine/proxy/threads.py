"""Which turn a call goes on from: an agent's conversations as a tree of deltas, also when it rewrites its history."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_engine.proxy.normal import normal, same
from rollout_engine.types import Completion, Message, Turn

MAX_THREADS = 32
"""Conversations of one role that a later call can go on from; the one that was used longest ago is forgotten."""


@dataclass(slots=True)
class _Thread:
    """A conversation so far: as it is stored, and as the agent last sent it."""

    stored: list[Message]
    sent: list[Message]
    turn: int


class Threads:
    """The conversations of one role in one rollout."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._threads: list[_Thread] = []  # the one used last is last

    def turn(self, index: int, messages: list[Message], completion: Completion, env_s: float) -> Turn:
        """The turn of a call that is answered. `messages` is the whole prompt; only what is new is stored."""
        thread, kept = self._longest(messages)
        new = [normal(message) for message in messages[kept:]]
        answer = normal(completion.message)
        last = self._threads[-1] if self._threads else None
        parent = None if thread is None or thread is last else thread.turn
        whole = thread is not None and kept == len(thread.stored)
        stored = [*(thread.stored[:kept] if thread is not None else ()), *new, answer]
        self._go_on(thread if whole else None, _Thread(stored, [*messages, completion.message], index))
        # The very first turn has nothing to keep; a fresh conversation later on says that it keeps nothing.
        marked = None if whole or last is None else kept
        return Turn(index, [*new, answer], completion, self._role, env_s, parent, marked)

    def _longest(self, messages: list[Message]) -> tuple[_Thread | None, int]:
        """The thread that shares most with a prompt, and how many messages that are."""
        best: tuple[_Thread | None, int] = (None, 0)
        for thread in reversed(self._threads):
            shared = _shared(thread, messages)
            if shared > best[1]:
                best = (thread, shared)
            if shared == len(thread.stored):
                break
        return best

    def _go_on(self, old: _Thread | None, new: _Thread) -> None:
        if old is not None:
            self._threads.remove(old)
        self._threads.append(new)
        del self._threads[:-MAX_THREADS]


def _shared(thread: _Thread, messages: list[Message]) -> int:
    """How many messages at the beginning are the same."""
    at = 0
    for sent, stored, message in zip(thread.sent, thread.stored, messages, strict=False):
        # Agents send the same objects again and again: equality is quick, and the normal form is not needed.
        if sent != message and not same(stored, normal(message)):
            break
        at += 1
    return at
