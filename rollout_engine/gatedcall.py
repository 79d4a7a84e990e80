"""One model call at the gate of its host's budgets: it waits there, begins, pauses between tries, and is counted."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollout_engine.errors import ModelRateLimited
from rollout_engine.estimate import TokenEstimate
from rollout_engine.permits import Permits
from rollout_engine.types import Completion


class Clock(Protocol):
    """Whoever's time stands still while a call waits at the gate."""

    def stop(self) -> None: ...

    def go_on(self) -> None: ...


class GatedCall:
    """From `begin` or `enter` to `leave` the call holds a permit, but for its pauses. A client sees it as `CallGate`.

    `chars`: of the prompt; they matter only where the model has a budget of tokens.
    """

    __slots__ = ("_began", "_chars", "_clock", "_estimate", "_holds", "_permits", "_tokens", "_told")

    def __init__(
        self,
        permits: Permits,
        estimate: TokenEstimate,
        clock: Clock,
        chars: int,
        max_tokens: int | None,
    ) -> None:
        self._permits, self._estimate, self._clock = permits, estimate, clock
        self._chars = chars
        self._tokens = estimate.tokens(chars, max_tokens) if permits.counts_tokens else 0.0
        self._holds = self._told = False
        self._began = 0.0

    def begin(self) -> bool:
        """Whether the call may begin at once; if so, it has."""
        if not self._permits.enter(self._tokens):
            return False
        self._has_begun()
        return True

    async def enter(self, *, first: bool = False) -> None:
        """Returns once the call may begin."""
        if self.begin():
            return
        self._clock.stop()
        try:
            await self._permits.acquire(self._tokens, first=first)
        finally:
            self._clock.go_on()
        self._has_begun()

    def _has_begun(self) -> None:
        self._holds, self._told = True, False
        self._began = asyncio.get_running_loop().time()

    def leave(self, error: BaseException | None = None) -> None:
        """The call is over: with this error, or without one."""
        if not self._holds:
            return
        if not self._told and isinstance(error, ModelRateLimited):
            self.refused(error.retry_after_s)
        elif not self._told and error is None:
            self.answered()
        self._holds = False
        self._permits.release()

    def used(self, completion: Completion) -> None:
        """The tokens that the answer took."""
        usage = completion.usage
        self._permits.settle(self._tokens, usage.prompt_tokens + usage.completion_tokens)
        if self._permits.counts_tokens:
            self._estimate.learn(self._chars, usage)

    # -- for clients --------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """This try got an answer."""
        self._told = True
        self._permits.answered(asyncio.get_running_loop().time() - self._began)

    def failed(self) -> None:
        """This try got an error that is no 429: it says nothing of how much the server takes."""
        self._told = True

    def refused(self, pause_s: float | None) -> None:
        """This try got a 429, which asked for a pause: all calls to the model keep to it."""
        self._told = True
        self._permits.refused(pause_s, self._tokens)

    async def pause(self, seconds: float) -> None:
        """Gives the permit back, waits so long and for another permit, in front of the calls that are to begin."""
        self._holds = False
        self._permits.release()
        if seconds > 0:
            self._clock.stop()
            try:
                await asyncio.sleep(seconds)
            finally:
                self._clock.go_on()
        await self.enter(first=True)


class NoClock:
    """For calls whose waits nobody counts."""

    def stop(self) -> None:
        return None

    def go_on(self) -> None:
        return None
