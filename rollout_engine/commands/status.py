"""`rollout status` and `rollout top`: how a run stands, once or again and again, from any terminal that sees it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollout_engine.commands.console import OK, SOME_FAILED, make_console, print_json
from rollout_engine.commands.picture import draw, line_of
from rollout_engine.commands.standing import GONE, Standing, read_standing
from rollout_engine.commands.text import safe

PLAIN_S = 5.0
"""Lines of `rollout top` in a pipe are at least this far apart."""


def status(path: Path, *, as_json: bool) -> int:
    """Prints the picture. 1 where the driver is gone or the run has failed. Raises InputError where this is no run."""
    standing = read_standing(path)
    if as_json:
        print_json(standing.to_dict())
    else:
        console = make_console()
        for part in draw(standing):
            console.print(part)
    return code_of(standing)


def top(path: Path, *, every_s: float) -> int:
    """Shows the picture until the run has ended, its driver is gone, or Ctrl-C."""
    try:
        return _live(path, every_s) if sys.stdout.isatty() else _plain(path, every_s)
    except KeyboardInterrupt:  # the way to leave it: nothing was interrupted
        return OK


def code_of(standing: Standing) -> int:
    return SOME_FAILED if standing.state in (GONE, "failed") else OK


def _plain(path: Path, every_s: float) -> int:
    """A line when something has changed, for logs."""
    shown, next_line = "", 0.0
    while True:
        standing = read_standing(path)
        line = line_of(standing)
        if not standing.alive or (line != shown and time.monotonic() >= next_line):
            shown, next_line = line, time.monotonic() + PLAIN_S
            print(safe(line), flush=True)
        if not standing.alive:
            if remark := standing.remark():
                print(safe(remark), flush=True)
            return code_of(standing)
        time.sleep(every_s)


def _live(path: Path, every_s: float) -> int:
    from rich.console import Group
    from rich.live import Live

    console = make_console()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        standing = read_standing(path)
        while standing.alive:
            live.update(Group(*draw(standing)), refresh=True)
            time.sleep(every_s)
            standing = read_standing(path)
    for part in draw(standing):  # the last picture stays on the screen
        console.print(part)
    return code_of(standing)
