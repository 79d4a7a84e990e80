"""Shows where a run stands while it goes on: a live block on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rollout_engine.commands import text
from rollout_engine.commands.console import make_console, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rollout_engine.progress import Progress

LIVE_S = 0.25
PLAIN_S = 5.0


class Display(Protocol):
    """What a run tells a person. `show` is called often; the display decides what of it is seen."""

    def note(self, message: str) -> None:
        """Something that stays on the screen."""
        ...

    def state(self, what: str) -> None:
        """What the run is doing now: running, draining, ..."""
        ...

    def show(self, progress: Progress, now: float) -> None: ...

    def close(self) -> None:
        """Leaves the screen as it should stay. May be called twice."""
        ...


def make_display(title: str, quiet: bool, live: bool = True) -> Display:
    """The display that fits stderr; not `live`: stderr will soon be a file."""
    if quiet:
        return QuietDisplay()
    return LiveDisplay(title) if live and sys.stderr.isatty() else PlainDisplay(title)


class QuietDisplay:
    """Says nothing but notes: they may be why a run does not go on."""

    def note(self, message: str) -> None:
        say(message)

    def state(self, what: str) -> None:
        return None

    def show(self, progress: Progress, now: float) -> None:
        return None

    def close(self) -> None:
        return None


class PlainDisplay:
    """A line when something runs, and then every few seconds, for logs."""

    def __init__(self, title: str) -> None:
        self._next = 0.0
        self._shown: tuple[int, int | None] = (0, 0)
        say(title)

    def note(self, message: str) -> None:
        say(message)

    def state(self, what: str) -> None:
        say(f"{what} …")

    def show(self, progress: Progress, now: float) -> None:
        counts = (progress.done, progress.running)
        if now >= self._next and counts != self._shown:
            self._next, self._shown = now + PLAIN_S, counts
            say(plain_line(progress))

    def close(self) -> None:
        return None


def plain_line(progress: Progress) -> str:
    """Everything that the live block shows, on one line."""
    parts = [
        f"{text.clock(progress.now - progress.started):>6}",
        _share_done(progress),
        *_running(progress),
        *_troubles(progress),
        *_amounts(progress),
    ]
    if progress.eta_s is not None:
        parts.append(f"ETA {text.clock(progress.eta_s)}")
    return "  ".join(parts)


def _running(progress: Progress) -> list[str]:
    return [] if progress.running is None else [f"{text.whole(progress.running)} running"]


def _share_done(progress: Progress) -> str:
    done = progress.before + progress.done
    if not progress.total:
        return f"{text.whole(done)} done"
    return f"{text.part(done, progress.total)} done ({text.percent(done / progress.total)})"


def _troubles(progress: Progress) -> list[str]:
    """What did not end with a score, by kind; nothing where all is well."""
    parts = []
    if progress.failed_count:
        parts.append(f"{text.whole(progress.failed_count)} failed ({text.kinds(progress.failed)})")
    if progress.verifier_errors:
        parts.append(text.plural(progress.verifier_errors, "verifier error"))
    if progress.cancelled:
        parts.append(f"{text.whole(progress.cancelled)} cancelled")
    if progress.retries:
        parts.append(text.plural(progress.retries, "retry"))
    return parts


def _amounts(progress: Progress) -> list[str]:
    parts = [f"{text.short(progress.rate)} rollouts/s"]
    if progress.prompt_tokens or progress.completion_tokens:
        parts.append(f"{text.short(progress.prompt_tokens)} + {text.short(progress.completion_tokens)} tokens")
    if progress.cost_usd:
        parts.append(text.money(progress.cost_usd))
    return parts


class LiveDisplay:
    """A block of a few lines that is drawn again and again; notes scroll past above it."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        from rich.live import Live

        self._console = console or make_console(sys.stderr)
        self._title, self._state = title, "starting"
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._progress: Progress | None = None
        self._live.start()
        self._draw()

    def note(self, message: str) -> None:
        from rich.text import Text

        self._console.print(Text(text.safe(message), style="red" if message.startswith("error") else "yellow"))

    def state(self, what: str) -> None:
        self._state = what
        self._draw()

    def show(self, progress: Progress, now: float) -> None:
        self._progress = progress
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(live_block(self._title, self._state, self._progress), refresh=True)


def live_block(title: str, state: str, progress: Progress | None) -> RenderableType:
    """The title, the bar, and under it what runs, what went wrong, and what it costs."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble((title, "bold"), ("  " + state, "cyan"))
    if progress is None:
        return head
    lines: list[RenderableType] = [head, _bar(progress)]
    hosts = [text.plural(progress.hosts, "host")] if progress.hosts != 1 else []
    working = [*_running(progress), f"{text.whole(progress.pending)} waiting", *hosts]
    lines.append(Text(" " + " · ".join([*working, *_amounts(progress)]), style="dim"))
    if troubles := _troubles(progress):
        lines.append(Text(" " + " · ".join(troubles), style="red" if progress.failed_count else "yellow"))
    return Group(*lines)


def _bar(progress: Progress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done = progress.before + progress.done
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    times = f"{text.clock(progress.now - progress.started)} · ETA {text.clock(progress.eta_s)}"
    row.add_row(
        ProgressBar(total=progress.total or 1, completed=done, complete_style="green"),
        Text(f"{_share_done(progress)}  {times}"),
    )
    return row


class NoteHandler(logging.Handler):
    """Carries warnings of the engine, and of what it uses, to the display; each text once."""

    def __init__(self, display: Display, seen: Iterable[str] = ()) -> None:
        super().__init__(logging.WARNING)
        self._display, self._seen = display, set(seen)

    def emit(self, record: logging.LogRecord) -> None:
        self.once(record.getMessage(), "error" if record.levelno >= logging.ERROR else "note")

    def has_said(self, text: str) -> bool:
        """Whether a note held this text: an error that ends a run is logged before it is raised."""
        return any(text in message for message in self._seen)

    def once(self, message: str, kind: str = "note") -> None:
        """A note, unless it was said before. Bounded: a run that goes wrong a million times says so in its counts."""
        if message not in self._seen and len(self._seen) < 1000:
            self._seen.add(message)
            self._display.note(f"{kind}: {message}")
