"""A command in this process: what a fresh interpreter costs is spared where nothing of a process matters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout_engine.cli import main
from tests.cli.rollout import Done


class Inside:
    """`inside("show", "a")` runs `rollout show a` in a folder, and returns what it printed."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch
        self.go(folder)

    def go(self, folder: Path) -> None:
        """Changes to another folder."""
        self.folder = folder
        self._patch.chdir(folder)

    def __call__(self, *arguments: str | Path) -> Done:
        self._patch.setattr(sys, "argv", ["rollout", *map(str, arguments)])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capture.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out, err)
