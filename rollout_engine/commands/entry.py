"""Runs one command of the command line: its errors in one form, its exit code, and streams that nobody reads."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer

from rollout_engine.commands.console import (
    BAD_INPUT,
    INTERRUPTED,
    OK,
    SOME_FAILED,
    accept_any_text,
    say,
    say_error,
    silence,
)
from rollout_engine.errors import InputError, RunError


def enter(app: typer.Typer) -> NoReturn:
    """Runs the command that was typed, and ends the process with its exit code."""
    accept_any_text()
    try:
        code = _run_command(app)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        silence(sys.stdout)
        code = SOME_FAILED
    sys.exit(code)


def _run_command(app: typer.Typer) -> int:
    usage_error: Any = typer.BadParameter.__bases__[0]  # typer gives the root of its usage errors no public name
    try:
        code = app(standalone_mode=False, prog_name="rollout")
        sys.stdout.flush()
    except InputError as error:
        say_error(error)
        return BAD_INPUT
    except RunError as error:
        say_error(error)
        return SOME_FAILED
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED
    except usage_error as error:
        return _say_usage(error)
    return code if isinstance(code, int) else OK


def _say_usage(error: Exception) -> int:
    """A wrong flag, in the form of every other error; no arguments at all: the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message)
        return OK
    path = context.command_path if context is not None else "rollout"
    say(f"error: {message}\n  see {path} --help")
    return BAD_INPUT
