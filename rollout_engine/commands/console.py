"""Where output goes: tables and JSON to stdout, all that is said besides to stderr, and errors in one form."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from typing import IO, TYPE_CHECKING, Any

from rollout_engine.commands.text import safe
from rollout_engine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of every command."""

PLAIN_WIDTH = 160
"""Columns of a table that goes to a file or a pipe: nobody wants it folded there."""


def make_console(file: IO[str] | None = None) -> Console:
    """A rich console on `file` (None: stdout) that neither wraps nor colours what is not for a terminal."""
    from rich.console import Console

    file = sys.stdout if file is None else file
    terminal = file.isatty()
    return Console(
        file=file,
        width=None if terminal else PLAIN_WIDTH,
        markup=False,  # a task id may look like it
        highlight=False,
        emoji=False,
        soft_wrap=False,
        no_color=None if terminal else True,
    )


def print_json(document: Any) -> None:
    """One JSON document on stdout. What is not finite becomes null: JSON has no NaN."""
    sys.stdout.write(json.dumps(_finite(document), indent=2, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def say(message: str) -> None:
    """A line for a person, on stderr. One write, so that lines of several threads do not mix."""
    try:
        sys.stderr.write(safe(message) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        silence(sys.stderr)


def say_error(error: BaseException) -> None:
    """`error: where: what`, and under it what to do."""
    if isinstance(error, InputError):
        where = f"{error.where}: " if error.where else ""
        fix = f"\n  {error.fix}" if error.fix else ""
        say(f"error: {where}{error.message}{fix}")
    else:
        say(f"error: {error}")


def accept_any_text() -> None:
    """What a stream cannot encode (a lone surrogate of a model, any `✓` in an old locale) is escaped, not raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: IO[str]) -> None:
    """Nobody reads this stream any more: what is still written to it goes nowhere, instead of to a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
