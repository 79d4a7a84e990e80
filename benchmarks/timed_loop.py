"""An event loop that knows the longest callback that it ran, in CPU time of its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


class TimedLoop(asyncio.SelectorEventLoop):
    """Knows the longest callback that it ran, in seconds of its thread's CPU time."""

    longest_s = 0.0
    longest = ""

    def _timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            began = time.thread_time()
            try:
                callback(*arguments)
            finally:
                took = time.thread_time() - began
                if took > self.longest_s:
                    self.longest_s, self.longest = took, repr(getattr(callback, "__self__", callback))

        return run

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._timed(callback), *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon_threadsafe(self._timed(callback), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._timed(callback), *args, context=context)

    def _add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        return super()._add_reader(fd, self._timed(callback), *args)  # type: ignore[misc]

    def _add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:
        return super()._add_writer(fd, self._timed(callback), *args)  # type: ignore[misc]
