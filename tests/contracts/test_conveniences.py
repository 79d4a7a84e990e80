"""What every sandbox makes easy: bundles, whole downloads, jobs that are waited for, ends that are told apart.

One test: .venv/bin/pytest tests/contracts/test_conveniences.py -k bundle
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from rollout_engine.errors import BadBundle, ExecTimeout, SandboxError, TooLarge
from rollout_engine.sandboxes.base import JobStatus, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.bundle import upload_bundle
from rollout_engine.sandboxes.polling import MAX_FAULTS, Patience, finished
from tests.contracts.test_sandbox import LONG_S, mark, nothing_runs, text
from tests.sandboxes.busy import cut_off

__all__ = ["mark"]

HOG = "head -c 400000000 /dev/zero | tail >/dev/null"
"""Holds all of it in memory, as there is no line in it."""


def bundle(path: Path, names: dict[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in names.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo("link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            tar.addfile(entry)
    return path


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class TestBundle:
    async def test_a_bundle_adds_to_what_is_there(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await sandbox.write_file("into/old", b"old")
        made = bundle(tmp_path / "b.tgz", {"bin/run": b"#!/bin/sh\necho ran\n", "data": b"x" * 300_000}, "bin/run")
        await upload_bundle(sandbox, made, "into")
        assert await text(sandbox, "into/link; cat into/old; wc -c < into/data; ls into") == (
            "ran\nold300000\nbin\ndata\nlink\nold\n"
        )

    async def test_one_that_leads_out_or_is_too_large_changes_nothing(self, sandbox: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(BadBundle):
            await upload_bundle(sandbox, bundle(tmp_path / "out.tgz", {"a": b"x"}, "/etc/passwd"), ".")
        with pytest.raises(TooLarge):
            await upload_bundle(sandbox, bundle(tmp_path / "big.tgz", {"a": b"x" * 1001}), ".", max_bytes=1000)
        with pytest.raises(TooLarge):
            await upload_bundle(sandbox, bundle(tmp_path / "many.tgz", {"a": b"", "b": b""}), ".", max_files=1)
        assert await text(sandbox, "ls") == ""


class TestDownload:
    @pytest.fixture
    async def filled(self, sandbox: Sandbox) -> Sandbox:
        await text(sandbox, "mkdir -p d/sub; for n in 1 2 3; do printf 0123456789 > d/sub/$n; done")
        return sandbox

    @pytest.fixture
    def host(self, tmp_path: Path) -> Path:
        (tmp_path / "host").mkdir()
        return tmp_path / "host"

    async def test_as_much_as_is_allowed_comes(self, filled: Sandbox, host: Path) -> None:
        await filled.download("d", host / "copy", max_bytes=30, max_files=4)
        assert listed(host / "copy") == ["sub", "sub/1", "sub/2", "sub/3"]
        await filled.download("d/sub/1", host / "one", max_bytes=10, max_files=0)
        assert listed(host) == ["copy", "copy/sub", "copy/sub/1", "copy/sub/2", "copy/sub/3", "one"]

    @pytest.mark.parametrize("limits", [{"max_bytes": 29}, {"max_files": 3}], ids=["bytes", "files"])
    async def test_above_a_limit_whatever_was_there_stays_as_it_was(
        self, filled: Sandbox, host: Path, limits: dict[str, int]
    ) -> None:
        target = host / "target"
        (target / "sub").mkdir(parents=True)
        (target / "sub" / "1").write_bytes(b"mine")
        for _ in range(2):
            with pytest.raises(TooLarge):
                await filled.download("d", target, **limits)  # type: ignore[arg-type]
        assert listed(target) == ["sub", "sub/1"]
        assert (target / "sub" / "1").read_bytes() == b"mine"
        assert listed(host) == ["target", "target/sub", "target/sub/1"]
        await filled.download("d", target)
        assert listed(target) == ["sub", "sub/1", "sub/2", "sub/3"]
        assert (target / "sub" / "1").read_bytes() == b"0123456789"

    async def test_names_of_one_file_count_as_the_files_that_they_become(self, filled: Sandbox, host: Path) -> None:
        await text(filled, "ln d/sub/1 d/sub/4")
        with pytest.raises(TooLarge):
            await filled.download("d", host / "copy", max_bytes=39)
        assert listed(host) == []


class Unsteady:
    """A sandbox whose answers fail a few times in a row, now and then."""

    def __init__(self, sandbox: Sandbox, faults: int) -> None:
        self._sandbox, self._faults, self.left = sandbox, faults, faults

    async def poll(self, job: str, *, wait_s: float = 0.0) -> JobStatus:
        if self.left:
            self.left -= 1
            raise SandboxError("no answer")
        self.left = self._faults
        return await self._sandbox.poll(job, wait_s=wait_s)

    async def stop(self, job: str) -> None:
        await self._sandbox.stop(job)


class TestJobs:
    async def test_a_job_is_waited_for_through_faults_that_pass(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["sh", "-c", "echo out; while [ ! -e go ]; do sleep 0.02; done; exit 3"])
        waiting = asyncio.create_task(finished(Unsteady(sandbox, MAX_FAULTS), job))  # type: ignore[arg-type]
        assert (await sandbox.poll(job)).exit_code is None
        await sandbox.write_file("go", b"")
        status = await asyncio.wait_for(waiting, 60)
        assert (status.exit_code, status.stdout) == (3, b"out\n")

    async def test_faults_that_stay_are_raised(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["true"])
        with pytest.raises(SandboxError, match="no answer"):
            await finished(Unsteady(sandbox, MAX_FAULTS + 1), job)  # type: ignore[arg-type]

    async def test_one_that_takes_too_long_is_stopped_and_its_output_kept(self, sandbox: Sandbox, mark: str) -> None:
        job = await sandbox.start(["sh", "-c", f"echo up > up; echo out; sleep {mark}"])
        while not (await sandbox.poll(job)).stdout:
            await asyncio.sleep(0.01)
        with pytest.raises(ExecTimeout) as caught:
            await finished(sandbox, job, timeout_s=0.1)
        assert caught.value.partial.stdout == b"out\n"
        await nothing_runs(mark)

    async def test_a_sandbox_that_is_gone_is_told_at_once(self, provider: SandboxProvider) -> None:
        opened = await provider.open(SandboxSpec())
        job = await opened.start(["sleep", str(LONG_S)])
        await opened.close()
        patience = Patience()
        with pytest.raises(SandboxError):
            await patience.ask(lambda: opened.poll(job))


async def test_out_of_memory_and_out_of_time_are_told_apart_and_together(provider: SandboxProvider) -> None:
    opened = await provider.open(SandboxSpec(memory_bytes=96 * 2**20))
    try:
        if "memory:cgroup" not in opened.limits_enforced:
            pytest.skip("nothing here kills for memory")
        hungry = await opened.exec(["sh", "-c", HOG], timeout_s=LONG_S)
        assert hungry.oom
        with pytest.raises(ExecTimeout) as slow:
            await opened.exec(["sleep", str(LONG_S)], timeout_s=0.3)
        assert not slow.value.partial.oom
        both = await cut_off(
            opened, ["sh", "-c", f"{HOG}; echo killed; sleep {LONG_S}"], lambda found: bool(found.stdout)
        )
        assert (both.stdout, both.oom) == (b"killed\n", True)
    finally:
        await opened.close()
