"""What a run shows of itself while it goes on, and tables on narrow terminals.

One test: .venv/bin/pytest tests/cli/test_display.py -k narrow
"""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from rollout_engine.commands.display import LiveDisplay, NoteHandler, PlainDisplay, live_block, plain_line
from rollout_engine.commands.report import read_report
from rollout_engine.commands.tables import print_report
from rollout_engine.progress import Progress
from tests.cli.rollout import Done


def progress() -> Progress:
    """A run in the middle: resumed, with failures, over two hosts."""
    found = Progress(
        total=1000, before=100, done=500, running=64, pending=200, valid=480, verifier_errors=3, retries=12,
        prompt_tokens=1_200_000, completion_tokens=310_000, cost_usd=3.21, started=10.0, now=60.0, hosts=2,
    )  # fmt: skip
    found.failed.update({"model:ModelRateLimited": 15, "sandbox:SandboxStartError": 2})
    return found


def drawn(console_width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=console_width, force_terminal=True, color_system=None), out


EVERYTHING = (
    "600/1,000 done (60 %)", "64 running", "17 failed", "model:ModelRateLimited 15", "3 verifier errors",
    "12 retries", "10 rollouts/s", "1.2M + 310k tokens", "$3.21", "ETA 0:40",
)  # fmt: skip


def test_the_live_block_and_the_plain_line_say_the_same() -> None:
    console, out = drawn(200)
    console.print(live_block("runs/a", "running", progress()))
    line = plain_line(progress())
    for text in EVERYTHING:
        assert text in out.getvalue()
        assert text in line
    assert "\n" not in line


def test_notes_stay_on_the_screen_once_and_the_block_goes_away() -> None:
    console, out = drawn()
    display = LiveDisplay("runs/a", console)
    notes = NoteHandler(display)
    logger = logging.getLogger("tests.cli.display")
    logger.propagate = False
    logger.addHandler(notes)
    for _ in range(3):
        logger.warning("model %s is paused", "weak")
        notes.once("model weak is paused")
        display.show(progress(), 0.0)
    logger.info("nobody needs to know")
    display.close()
    shown = out.getvalue()
    assert shown.count("note: model weak is paused") == 1
    assert "nobody" not in shown
    assert notes.has_said("weak is paused")
    assert shown.rstrip().endswith("\x1b[2K")


def test_plain_lines_come_when_something_has_changed_and_not_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    display, found = PlainDisplay("runs/a"), progress()
    for now in (0.0, 0.25, 4.0, 5.0, 5.25):
        found.done += 1
        display.show(found, now)
    assert len(capsys.readouterr().err.splitlines()) == 1 + 2
    display.show(Progress(), 100.0)
    display.show(Progress(), 200.0)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_on_a_narrow_terminal_no_number_is_cut(finished: tuple[Path, Done]) -> None:
    console, out = drawn(80)
    print_report(console, read_report(finished[0] / "a"))
    shown = out.getvalue()
    assert "…" not in shown
    assert "strong   24/24" in shown
    assert max(map(len, shown.splitlines())) <= 80
