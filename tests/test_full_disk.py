"""A disk that is full, wherever it hits: nothing but what needs it fails, and the error names node, place and remedy.

make one T=tests/test_full_disk.py
"""

from __future__ import annotations

import logging
import os
import tarfile
import tempfile
from pathlib import Path

import pytest

import rollout_engine
from rollout_engine.agents.cli.install import Installer
from rollout_engine.agents.cli.program import Package
from rollout_engine.disk import node
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, NodeDiskFull, RunError
from rollout_engine.logfile import LogFile
from rollout_engine.loglines import About, JsonLines, Redactor
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.sandboxes.namespace import NamespaceProvider
from rollout_engine.store import read_rollouts
from tests.helpers import make_config, make_tasks, scripted
from tests.rig import bench, task_of
from tests.sandboxes.backends import absent, run_as
from tests.test_logs import lines

pytestmark = pytest.mark.root
FULL = "No space left on device"
TRUSTED = {"trusted": True}


def fill(disk: Path) -> Path:
    """Leaves no room on a disk; the file that took it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


@pytest.fixture
def full_tmp(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files go to a disk without room; what takes it is returned."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    return fill(small_disk)


def told(message: object, place: Path) -> None:
    """The message names node, place and remedy."""
    for text in (f"{place}", f" on {node()}", FULL, "make room there"):
        assert text in str(message), message


class TestSandboxes:
    async def test_a_local_sandbox_on_it_fails_for_the_node_and_not_for_its_agent(self, small_disk: Path) -> None:
        provider = LocalProvider(small_disk)
        box = await provider.open(SandboxSpec(trusted=True))
        filler = fill(small_disk)
        try:
            with pytest.raises(NodeDiskFull) as caught:
                await box.write_file("big", bytes(2**16))
            told(caught.value, small_disk)
            os.unlink(filler)
            await box.write_file("big", bytes(2**16))
        finally:
            await box.close()
            await provider.close()

    @pytest.mark.parametrize("kind", ["root", "user"])
    async def test_an_image_that_cannot_be_unpacked_there(self, small_disk: Path, tmp_path: Path, kind: str) -> None:
        (tmp_path / "big").write_bytes(os.urandom(6 * 2**20))
        with tarfile.open(tmp_path / "root.tar", "w") as tar:
            tar.add(tmp_path / "big", "big")
        os.chmod(small_disk, 0o755)
        provider = NamespaceProvider(run_as=run_as(kind), cache=small_disk / "roots")
        try:
            with pytest.raises(NodeDiskFull) as caught:
                await provider.open(SandboxSpec(tar=str(tmp_path / "root.tar")))
            told(caught.value, small_disk / "roots")
            assert not [name for name in os.listdir(small_disk / "roots") if not name.startswith("making.")]
            try:
                await (await provider.open(SandboxSpec())).close()  # sandboxes that need no image still work
            except rollout_engine.errors.SandboxUnavailable as error:
                absent(str(error))
        finally:
            await provider.close()

    async def test_an_agent_program_that_cannot_be_installed_there(self, small_disk: Path) -> None:
        installer = Installer(Package("pip", (str(small_disk / "none.whl"),), {}), str(small_disk / "agents"), 60)
        fill(small_disk)
        with pytest.raises(NodeDiskFull) as caught:
            await installer.directory()
        told(caught.value, small_disk / "agents")


class TestRollouts:
    async def test_one_whose_files_do_not_fit_is_tried_again_elsewhere(self, full_tmp: Path) -> None:
        task = task_of(environment=TRUSTED, files={"given.txt": "x" * 2**16})
        async with bench(make_config(sandbox="local")) as made:
            row = await made.run(task)
            assert (row.status, row.failure_boundary, row.failure_type) == ("failed", "sandbox", "NodeDiskFull")
            assert row.retryable
            told(row.failure_message, full_tmp.parent)
            os.unlink(full_tmp)
            assert (await made.run(task)).score == 1.0

    async def test_a_verdict_that_cannot_be_fetched_is_no_verdict(self, full_tmp: Path, tmp_path: Path) -> None:
        script = {"type": "script", "command": "echo 1 > $REWARD_DIR/reward.txt", "reward": "file", "reward_dir": "out"}
        task = task_of(environment=TRUSTED, verifier=script)
        async with bench(make_config(sandbox="local"), provider=LocalProvider(tmp_path)) as made:
            row = await made.run(task)
            assert (row.status, row.score, row.failure_type) == ("failed", None, "NodeDiskFull")
            told(row.failure_message, full_tmp.parent)
            os.unlink(full_tmp)
            assert (await made.run(task)).score == 1.0


class TestRunDirectory:
    async def test_a_run_ends_with_an_error_and_goes_on_once_there_is_room(self, small_disk: Path) -> None:
        config = make_config(scripted(tokens=2000, latency_ms=5), k=4, store={"max_unread_rows": 20}, host={"slots": 8})
        tasks = list(make_tasks(100))
        filler = None
        try:
            async with RolloutEngine(config=config, run_dir=small_disk / "run") as engine:
                async for _ in engine.rollouts(tasks):
                    filler = filler or fill(small_disk)
            raise AssertionError("the disk was never full")
        except RunError as error:
            said = str(error)
        for text in ("cannot write", str(small_disk / "run"), FULL, f"free space or repair the disk (on {node()})"):
            assert text in said
        assert filler is not None
        os.unlink(filler)
        async with RolloutEngine(config=config, run_dir=small_disk / "run", resume=True) as engine:
            await engine.finish(tasks)
        rows = read_rollouts(small_disk / "run", ["rollout_id", "score"]).to_pylist()
        assert len({row["rollout_id"] for row in rows}) == len(rows) == 400
        assert {row["score"] for row in rows} == {1.0}

    def test_a_run_that_nobody_keeps_needs_room_too(self, full_tmp: Path) -> None:
        with pytest.raises((InputError, RunError)) as caught:
            rollout_engine.run([task_of()], [scripted()], ray="off", sandbox="none")
        assert str(full_tmp.parent) in str(caught.value)
        assert FULL in str(caught.value)


def test_a_log_file_loses_lines_says_so_and_goes_on(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile(small_disk / "logs" / "x.jsonl", max_bytes=2**30, kept=1)
    file.setFormatter(JsonLines(About("run", 1), Redactor()))

    def say(text: str) -> None:
        file.handle(logging.LogRecord("x", logging.INFO, "", 0, text, (), None))
        file.flush()

    say("before")
    filler = fill(small_disk)
    for _ in range(100):
        say("x" * 500)
    filler.unlink()
    say("after")
    file.close()
    found = [line["message"] for line in lines(small_disk / "logs" / "x.jsonl")]
    assert (found[0], found[-2]) == ("before", "after")
    assert "lines were dropped: the disk refused them" in found[-1]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    told(said[0], small_disk / "logs" / "x.jsonl")
