"""What every sandbox must do, whichever backend it comes from."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_engine.errors import ExecTimeout, SandboxDied, SandboxStartError, SetupError
from rollout_engine.sandboxes.base import (
    EVERYTHING,
    MAX_OUTPUT_BYTES,
    SNAPSHOT,
    Recipe,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from rollout_engine.types import ExecResult
from tests.sandboxes.busy import cut_off

Factory = Callable[[Path], SandboxProvider]

LONG_S = 300
"""A command that runs this long ends only because somebody ended it."""
SOON_S = LONG_S / 5
"""What comes within this time, on however busy a machine, did not wait for such a command."""


async def sh(sandbox: Sandbox, script: str, **options: object) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], **options)  # type: ignore[arg-type]


async def text(sandbox: Sandbox, script: str, **options: object) -> str:
    result = await sh(sandbox, script, **options)
    assert result.ok, result
    return result.stdout.decode()


async def until(holds: Callable[[], Awaitable[bool]], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not await holds():
        assert time.monotonic() < end, f"still not: {what}"
        await asyncio.sleep(0.01)


def running(mark: str) -> list[str]:
    """Command lines on the host that contain `mark`: boxes have their own pids, the host sees them all."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


async def something_runs(mark: str) -> None:
    """A process between fork and exec, or in its exec, may not show its command line yet."""

    async def there() -> bool:
        return bool(running(mark))

    await until(there, f"a process with {mark}")


async def nothing_runs(mark: str) -> None:
    async def gone() -> bool:
        return not running(mark)

    await until(gone, f"no process with {mark}")


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    """An odd sleep time, by which a test finds its own processes."""
    return f"{LONG_S}.{abs(hash((request.node.nodeid, os.getpid()))) % 10**9:09d}"


class TestExec:
    async def test_output_and_success(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, "echo out; echo err >&2")
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"out\n", b"err\n")
        assert result.ok
        assert not result.truncated
        assert 0 < result.duration_s < SOON_S

    async def test_a_non_zero_exit_is_a_result(self, sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "exit 3")).exit_code == 3
        assert (await sh(sandbox, "exit 255")).exit_code == 255

    @pytest.mark.parametrize("number", [9, 11, 15])
    async def test_a_signal_is_a_negative_code(self, sandbox: Sandbox, number: int) -> None:
        assert (await sh(sandbox, f"kill -{number} $$")).exit_code == -number

    @pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "./no-such-program"])
    async def test_a_missing_program_is_127(self, sandbox: Sandbox, program: str) -> None:
        result = await sandbox.exec([program, "x"])
        assert result.exit_code == 127
        assert program.encode() in result.stderr

    async def test_a_program_that_may_not_run_is_126(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("plain.txt", b"no program", mode=0o644)
        assert (await sandbox.exec(["./plain.txt"])).exit_code == 126

    async def test_an_empty_command_is_the_callers_mistake(self, sandbox: Sandbox) -> None:
        with pytest.raises(ValueError, match="program"):
            await sandbox.exec([])

    async def test_arguments_arrive_as_they_are(self, sandbox: Sandbox) -> None:
        odd = ["a b", "$HOME", "'", '"', "\n", "", "ü", "-n"]
        result = await sandbox.exec(["printf", "[%s]", *odd])
        assert result.stdout.decode() == "".join(f"[{item}]" for item in odd)

    @pytest.mark.parametrize("argument", ["null \0 byte", "x" * 3_000_000])
    async def test_an_argument_that_no_program_can_get_is_a_result(self, sandbox: Sandbox, argument: str) -> None:
        result = await sandbox.exec(["echo", argument])
        assert result.exit_code == 126
        assert result.stderr

    async def test_stdin_arrives_whole_and_ends(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 20_000
        result = await sandbox.exec(["cat"], stdin=data)
        assert result.stdout == data

    async def test_no_stdin_is_an_empty_one(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["cat"], timeout_s=20)).stdout == b""
        assert (await sandbox.exec(["cat"], stdin=b"", timeout_s=20)).stdout == b""

    async def test_stdin_that_nobody_reads_harms_nothing(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["true"], stdin=b"x" * 2_000_000, timeout_s=20)
        assert result.exit_code == 0

    async def test_output_is_bytes(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["printf", r"\377\000\001"])
        assert result.stdout == b"\xff\x00\x01"

    async def test_a_stream_keeps_its_tail(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, f"head -c {MAX_OUTPUT_BYTES + 5_000_000} /dev/zero; printf end; echo small >&2")
        assert result.truncated
        assert len(result.stdout) == MAX_OUTPUT_BYTES
        assert result.stdout.endswith(b"\0end")
        assert result.stderr == b"small\n"

    async def test_output_of_exactly_the_cap_is_whole(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, f"head -c {MAX_OUTPUT_BYTES} /dev/zero")
        assert not result.truncated
        assert len(result.stdout) == MAX_OUTPUT_BYTES

    async def test_all_output_written_before_the_exit_is_there(self, sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(sh(sandbox, "seq 5000; seq 5000 >&2") for _ in range(20)))
        expected = "".join(f"{number}\n" for number in range(1, 5001)).encode()
        assert all(result.stdout == expected and result.stderr == expected for result in results)

    async def test_commands_run_side_by_side(self, sandbox: Sandbox) -> None:
        meet = "touch here.$0; until [ $(ls here.* | wc -l) = 8 ]; do sleep 0.02; done"
        met = await asyncio.gather(
            *(sandbox.exec(["sh", "-c", meet, str(number)], timeout_s=SOON_S) for number in range(8))
        )
        assert all(each.ok for each in met), met

    @pytest.mark.slow
    async def test_the_event_loop_goes_on_meanwhile(self, sandbox: Sandbox) -> None:
        async def longest_turn() -> float:
            longest, last, stop = 0.0, time.thread_time(), asyncio.Event()

            async def beat() -> None:
                nonlocal longest, last
                while not stop.is_set():
                    await asyncio.sleep(0)
                    longest, last = max(longest, time.thread_time() - last), time.thread_time()

            heart = asyncio.create_task(beat())
            await sh(sandbox, "head -c 30000000 /dev/zero")
            await sandbox.write_file("big", b"x" * 20_000_000)
            await sandbox.read_file("big")
            stop.set()
            await heart
            return longest

        gc.freeze()  # a collection of all that the tests before have left is none of the sandbox's
        try:
            turns = [await longest_turn()]
            while turns[-1] >= 0.05 and len(turns) < 3:  # where cores are shared, CPU time grows at times, too
                turns.append(await longest_turn())
        finally:
            gc.unfreeze()
        assert turns[-1] < 0.05, turns


class TestPlaceAndEnvironment:
    async def test_commands_start_in_the_workdir(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("here.txt", b"x")
        assert await text(sandbox, "cat here.txt") == "x"

    async def test_cwd_may_be_relative_or_below_the_workdir(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("a/b/file", b"deep")
        assert await text(sandbox, "cat file", cwd="a/b") == "deep"
        assert await text(sandbox, "cat b/file", cwd="/workspace/a") == "deep"
        assert await text(sandbox, "cat a/b/file", cwd="/workspace") == "deep"

    async def test_a_missing_cwd_is_a_result(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, "true", cwd="no/such/place")
        assert result.exit_code in (126, 127)
        assert b"no/such/place" in result.stderr

    async def test_the_specs_environment_and_the_calls_own(self, sandbox: Sandbox) -> None:
        assert await text(sandbox, "echo $FROM_SPEC") == "spec\n"
        assert await text(sandbox, "echo $FROM_SPEC $MORE", env={"FROM_SPEC": "call", "MORE": "x y"}) == "call x y\n"
        assert await text(sandbox, "echo $FROM_SPEC$MORE") == "spec\n"

    async def test_home_is_a_writable_directory(self, sandbox: Sandbox) -> None:
        await text(sandbox, 'cd "$HOME" && touch file')

    async def test_the_hosts_secrets_are_not_there(
        self, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
        opened = await provider.open(SandboxSpec())
        try:
            assert "very-secret" not in await text(opened, "env; cat /proc/self/environ")
        finally:
            await opened.close()

    async def test_two_sandboxes_do_not_see_each_others_files(self, provider: SandboxProvider) -> None:
        first, second = await provider.open(SandboxSpec()), await provider.open(SandboxSpec())
        await first.write_file("/workspace/mine", b"1")
        with pytest.raises(FileNotFoundError):
            await second.read_file("/workspace/mine")
        await first.close()
        await second.write_file("mine", b"2")
        assert await second.read_file("mine") == b"2"
        await second.close()

    async def test_another_workdir(self, provider: SandboxProvider) -> None:
        opened = await provider.open(SandboxSpec(workdir="/srv/task"))
        try:
            await opened.write_file("/srv/task/a/file", b"x")
            assert await opened.read_file("a/file") == b"x"
            assert await text(opened, "cat a/file") == "x"
        finally:
            await opened.close()


class TestTimeout:
    async def test_a_timeout_raises_with_the_output_so_far(self, sandbox: Sandbox, mark: str) -> None:
        script = f"echo before; echo error >&2; sleep {mark}; echo after"
        partial = await cut_off(sandbox, ["sh", "-c", script], lambda found: bool(found.stderr))
        assert (partial.stdout, partial.stderr) == (b"before\n", b"error\n")
        await nothing_runs(mark)

    async def test_a_timeout_kills_the_whole_group(self, sandbox: Sandbox, mark: str) -> None:
        with pytest.raises(ExecTimeout):
            await sh(sandbox, f"trap '' TERM; sleep {mark} & sh -c 'sleep {mark}; true' & wait", timeout_s=0.3)
        await nothing_runs(mark)

    async def test_the_sandbox_lives_on_after_a_timeout(self, sandbox: Sandbox) -> None:
        with pytest.raises(ExecTimeout):
            await sandbox.exec(["sleep", str(LONG_S)], timeout_s=0.2)
        assert await text(sandbox, "echo still here") == "still here\n"

    async def test_a_command_in_time_is_not_touched(self, sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "sleep 0.05; exit 7", timeout_s=30)).exit_code == 7

    async def test_a_flood_does_not_hold_up_the_timeout(self, sandbox: Sandbox) -> None:
        started = time.monotonic()
        partial = await cut_off(sandbox, ["yes"], lambda found: bool(found.stdout))
        assert time.monotonic() - started < SOON_S
        assert partial.stdout.endswith(b"y\n")


class TestChildren:
    async def test_a_background_child_does_not_delay_the_result(self, sandbox: Sandbox, mark: str) -> None:
        started = time.monotonic()
        result = await sh(sandbox, f"sleep {mark} & echo done")
        assert time.monotonic() - started < SOON_S
        assert result.stdout == b"done\n"
        await something_runs(mark)

    async def test_what_a_background_child_still_writes_is_dropped_and_does_it_no_harm(self, sandbox: Sandbox) -> None:
        script = "(while [ ! -e go ]; do sleep 0.02; done; for i in 1 2 3; do echo noise; done; echo ok > after) &"
        assert (await sh(sandbox, f"{script} echo first")).stdout == b"first\n"
        await sandbox.write_file("go", b"")

        async def wrote() -> bool:
            return (await sh(sandbox, "cat after 2>/dev/null")).stdout == b"ok\n"

        await until(wrote, "the child wrote its file after its output had nobody left to read it")

    async def test_close_ends_children_that_outlived_their_parent(self, provider: SandboxProvider, mark: str) -> None:
        opened = await provider.open(SandboxSpec())
        await sh(opened, f"sleep {mark} >/dev/null 2>&1 &")
        await sh(opened, f"setsid sleep {mark} >/dev/null 2>&1 &")
        await sh(opened, f"(setsid sh -c 'sleep {mark} & sleep {mark}; true' &) >/dev/null 2>&1")

        async def all_up() -> bool:
            return len([line for line in running(mark) if line.startswith("sleep")]) == 4

        await until(all_up, "four children")
        await opened.close()
        await nothing_runs(mark)


class TestFiles:
    async def test_what_is_written_is_read(self, sandbox: Sandbox) -> None:
        data = os.urandom(1_000_000)
        await sandbox.write_file("file.bin", data)
        assert await sandbox.read_file("file.bin") == data
        await sandbox.write_file("file.bin", b"")
        assert await sandbox.read_file("file.bin") == b""

    async def test_a_write_makes_parents(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("a/b/c/file", b"x")
        assert await sandbox.read_file("/workspace/a/b/c/file") == b"x"

    async def test_commands_and_files_see_the_same(self, sandbox: Sandbox) -> None:
        await text(sandbox, "mkdir -p made && printf 'by command' > made/file")
        assert await sandbox.read_file("made/file") == b"by command"

    @pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
    async def test_modes_are_exact(self, sandbox: Sandbox, mode: int) -> None:
        await sandbox.write_file("file", b"#!/bin/sh\necho ran\n", mode=mode)
        assert await text(sandbox, "stat -c %a file") == f"{mode:o}\n"
        if mode & 0o100:
            assert (await sandbox.exec(["./file"])).stdout == b"ran\n"
            assert (await sandbox.exec(["/workspace/file"])).stdout == b"ran\n"

    @pytest.mark.parametrize("path", ["missing", "missing/file", "file/below", "x" * 5000, "null\0byte"])
    async def test_a_missing_file(self, sandbox: Sandbox, path: str) -> None:
        await sandbox.write_file("file", b"")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file(path)

    async def test_a_directory_is_no_file(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("folder/file", b"")
        with pytest.raises(IsADirectoryError) as read:
            await sandbox.read_file("folder")
        with pytest.raises(IsADirectoryError) as written:
            await sandbox.write_file("folder", b"x")
        for error in (read.value, written.value):
            assert str(error).count("Errno") <= 1, "it says twice what was wrong"

    async def test_a_file_above_the_limit_is_refused(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("file", b"x" * 1000)
        assert len(await sandbox.read_file("file", max_bytes=1000)) == 1000
        with pytest.raises(ValueError, match="999"):
            await sandbox.read_file("file", max_bytes=999)

    async def test_a_huge_sparse_file_is_refused_at_once(self, sandbox: Sandbox) -> None:
        await text(sandbox, "truncate -s 1T huge || truncate -s 300M huge")
        with pytest.raises(ValueError, match="bytes"):
            await sandbox.read_file("huge")

    async def test_reading_what_never_ends_ends(self, sandbox: Sandbox) -> None:
        await text(sandbox, "mkfifo pipe; ln -s /dev/zero endless")
        for path in ("pipe", "endless"):
            with pytest.raises((PermissionError, ValueError, FileNotFoundError)):
                await asyncio.wait_for(sandbox.read_file(path, max_bytes=1000), SOON_S)

    async def test_a_link_inside_the_sandbox_is_read_through(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("real/file", b"x")
        await text(sandbox, "ln -s real link && ln -s link/file alias")
        assert await sandbox.read_file("alias") == b"x"

    async def test_a_circle_of_links_is_no_file(self, sandbox: Sandbox) -> None:
        await text(sandbox, "ln -s b a; ln -s a b")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("a")


class TestTransfer:
    async def test_upload_a_file(self, sandbox: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "run.sh"
        source.write_bytes(b"#!/bin/sh\necho hello\n")
        source.chmod(0o755)
        await sandbox.upload(source, "bin/hello")
        assert (await sandbox.exec(["bin/hello"])).stdout == b"hello\n"

    async def test_upload_a_directory_adds_to_one_that_is_there(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "tree" / "sub").mkdir(parents=True)
        (tmp_path / "tree" / "sub" / "new").write_bytes(b"new")
        (tmp_path / "tree" / "link").symlink_to("sub/new")
        await sandbox.write_file("tree/sub/old", b"old")
        await sandbox.upload(tmp_path / "tree", "tree")
        assert (
            await text(sandbox, "cat tree/sub/new tree/sub/old tree/link; readlink tree/link") == "newoldnewsub/new\n"
        )

    async def test_upload_of_nothing(self, sandbox: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            await sandbox.upload(tmp_path / "missing", "x")

    async def test_download_a_file(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await sandbox.write_file("a/file", b"data", mode=0o755)
        await sandbox.download("a/file", tmp_path / "deep" / "copy")
        assert (tmp_path / "deep" / "copy").read_bytes() == b"data"
        assert (tmp_path / "deep" / "copy").stat().st_mode & 0o100

    async def test_download_a_directory(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await text(sandbox, "mkdir -p d/e/f d/empty; printf 1 > d/one; printf 2 > d/e/f/two")
        await sandbox.download("d", tmp_path / "copy")
        copied = sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*"))
        assert copied == ["e", "e/f", "e/f/two", "empty", "one"]
        assert (tmp_path / "copy/e/f/two").read_bytes() == b"2"

    async def test_download_follows_no_link_and_opens_no_pipe(self, sandbox: Sandbox, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"host secret")
        await text(
            sandbox, f"mkdir d; ln -s {secret} d/link; ln -s {tmp_path} d/folder; mkfifo d/pipe; echo x > d/file"
        )
        await sandbox.download("d", tmp_path / "copy")
        assert [path.name for path in (tmp_path / "copy").iterdir()] == ["file"]
        with pytest.raises((PermissionError, FileNotFoundError)):
            await sandbox.download("d/link", tmp_path / "copy2")
        assert not (tmp_path / "copy2").exists()

    async def test_a_download_above_the_limit_leaves_nothing(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await text(sandbox, "mkdir d; head -c 600 /dev/zero > d/a; head -c 600 /dev/zero > d/b")
        await sandbox.download("d", tmp_path / "enough", max_bytes=1200)
        for path in ("d", "d/a"):
            with pytest.raises(ValueError, match="bytes"):
                await sandbox.download(path, tmp_path / "copy", max_bytes=599)
            assert not (tmp_path / "copy").exists()

    async def test_download_of_nothing(self, sandbox: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            await sandbox.download("missing", tmp_path / "copy")


class TestJobs:
    async def ended(self, sandbox: Sandbox, job: str) -> int:
        async def over() -> bool:
            return (await sandbox.poll(job)).exit_code is not None

        await until(over, f"{job} has ended")
        code = (await sandbox.poll(job)).exit_code
        assert code is not None
        return code

    async def test_a_job_runs_beside_commands(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["sh", "-c", "echo up; while [ ! -e stop ]; do sleep 0.02; done; echo down; exit 5"])

        async def up() -> bool:
            return (await sandbox.poll(job)).stdout == b"up\n"

        await until(up, "the job has said that it is up")
        assert (await sandbox.poll(job)).exit_code is None
        await sandbox.exec(["touch", "stop"])
        assert await self.ended(sandbox, job) == 5
        assert (await sandbox.poll(job)).stdout == b"up\ndown\n"

    async def test_a_poll_that_waits_is_answered_at_the_jobs_end(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["sh", "-c", "while [ ! -e stop ]; do sleep 0.02; done; exit 5"])
        assert (await sandbox.poll(job, wait_s=0.01)).exit_code is None
        waiting = asyncio.create_task(sandbox.poll(job, wait_s=LONG_S))
        await sandbox.exec(["touch", "stop"])
        async with asyncio.timeout(SOON_S):
            assert (await waiting).exit_code == 5

    async def test_stop_kills_the_group(self, sandbox: Sandbox, mark: str) -> None:
        job = await sandbox.start(["sh", "-c", f"trap '' TERM; sleep {mark} & sleep {mark} & wait"])
        other = await sandbox.start(["sleep", str(LONG_S)])
        await sandbox.stop(job)
        assert await self.ended(sandbox, job) == -9
        await nothing_runs(mark)
        assert (await sandbox.poll(other)).exit_code is None
        await sandbox.stop(job)

    async def test_stop_reaches_children_of_a_job_that_has_ended(self, sandbox: Sandbox, mark: str) -> None:
        job = await sandbox.start(["sh", "-c", f"sleep {mark} & exit 0"])
        assert await self.ended(sandbox, job) == 0
        await sandbox.stop(job)
        await nothing_runs(mark)

    async def test_a_jobs_place_and_environment(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("sub/file", b"x")
        job = await sandbox.start(["sh", "-c", "cat file; echo $A; echo e >&2"], cwd="sub", env={"A": "b"})
        assert await self.ended(sandbox, job) == 0
        status = await sandbox.poll(job)
        assert (status.stdout, status.stderr) == (b"xb\n", b"e\n")

    async def test_a_job_of_a_missing_program_has_ended_with_127(self, sandbox: Sandbox) -> None:
        assert await self.ended(sandbox, await sandbox.start(["no-such-program"])) == 127

    async def test_an_unknown_job(self, sandbox: Sandbox) -> None:
        with pytest.raises(KeyError):
            await sandbox.poll("nobody")
        with pytest.raises(KeyError):
            await sandbox.stop("nobody")

    async def test_close_ends_jobs(self, provider: SandboxProvider, mark: str) -> None:
        opened = await provider.open(SandboxSpec())
        await opened.start(["sh", "-c", f"sleep {mark} & sleep {mark}"])
        await opened.close()
        await nothing_runs(mark)


class TestPrepare:
    async def test_files_and_commands_are_there_for_every_sandbox(self, provider: SandboxProvider) -> None:
        recipe = Recipe({"data/in": b"input", "run": b"#!/bin/sh\necho ran\n"}, ("mkdir made", "cp data/in made/copy"))
        spec = await provider.prepare(SandboxSpec(), recipe)
        first, second = await provider.open(spec), await provider.open(spec)
        assert await text(first, "cat data/in made/copy; ./run; rm data/in; echo mine > made/copy") == "inputinputran\n"
        assert await text(second, "cat data/in made/copy") == "inputinput"
        await asyncio.gather(first.close(), second.close())

    async def test_it_happens_once_for_all_who_ask(self, provider: SandboxProvider, tmp_path: Path) -> None:
        recipe = Recipe({}, ("head -c 8 /dev/urandom > id; sleep 0.1",))
        specs = await asyncio.gather(*(provider.prepare(SandboxSpec(label=str(n)), recipe) for n in range(5)))
        specs.append(await provider.prepare(SandboxSpec(), recipe))
        opened = [await provider.open(spec) for spec in specs]
        assert len({await each.read_file("id") for each in opened}) == 1
        await asyncio.gather(*(each.close() for each in opened))

    async def test_a_command_that_fails_says_why_and_is_tried_again_by_the_next(
        self, provider: SandboxProvider
    ) -> None:
        for _ in range(2):
            with pytest.raises(SetupError, match=r"(?s)exited with 3: why"):
                await provider.prepare(SandboxSpec(), Recipe({}, ("echo why >&2; exit 3",)))

    async def test_a_command_that_does_not_end_is_a_setup_error(self, provider: SandboxProvider, mark: str) -> None:
        with pytest.raises(SetupError, match="sleep"):
            await provider.prepare(SandboxSpec(), Recipe({}, (f"sleep {mark}",), timeout_s=0.3))
        await nothing_runs(mark)

    async def test_cancelled_it_leaves_nothing_running_but_goes_on_for_others(
        self, provider: SandboxProvider, mark: str
    ) -> None:
        recipe = Recipe({}, (f"touch made; sleep {mark}",))
        waiting = [asyncio.create_task(provider.prepare(SandboxSpec(), recipe)) for _ in range(2)]

        await something_runs(mark)
        for task, then in zip(waiting, (something_runs, nothing_runs), strict=True):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await then(mark)

    async def test_a_prepared_spec_can_be_prepared_further(self, provider: SandboxProvider) -> None:
        below = await provider.prepare(SandboxSpec(), Recipe({"a": b"1", "b": b"1"}))
        above = await provider.prepare(below, Recipe({"b": b"2"}, ("rm a",)))
        opened = await provider.open(above)
        assert await text(opened, "ls; cat b") == "b\n2"
        await opened.close()


class TestExport:
    async def handed_over(self, provider: SandboxProvider, script: str, *paths: str) -> Sandbox:
        """A sandbox that sees what another's script left at some paths, over what both were prepared with."""
        spec = await provider.prepare(SandboxSpec(), Recipe({"keep": b"k", "gone": b"g", "d/old": b"o", "e/old": b"o"}))
        agent = await provider.open(spec)
        await text(agent, script)
        layer = await agent.export(list(paths))
        opened = await provider.open(replace(spec, layers=(*spec.layers, layer)))
        with pytest.raises(SandboxDied):
            await agent.exec(["true"])
        return opened

    @pytest.mark.parametrize("path", [".", "/workspace", EVERYTHING, SNAPSHOT])
    async def test_a_workspace_comes_as_it_was_left(self, provider: SandboxProvider, path: str) -> None:
        script = (
            "rm gone; rm -r d; mkdir d; echo new > d/new; ln -s /etc/hostname link; ln -s nowhere broken; chmod 700 e"
        )
        opened = await self.handed_over(provider, script, path)
        assert await text(opened, "ls . d e; stat -c %a e; readlink link broken") == (
            ".:\nbroken\nd\ne\nkeep\nlink\n\nd:\nnew\n\ne:\nold\n700\n/etc/hostname\nnowhere\n"
        )
        assert await text(opened, "echo mine > keep; rm e/old; cat keep") == "mine\n"

    async def test_only_what_was_named_comes(self, provider: SandboxProvider) -> None:
        script = "echo 1 > out; mkdir -p p/q; echo 2 > p/q/r; echo 3 > p/other; echo changed > keep; rm d/old gone"
        opened = await self.handed_over(provider, script, "out", "p/q", "d", "gone", "never/made", "e")
        assert await text(opened, "cat out p/q/r keep; ls; ls d e p") == (
            "1\n2\nkd\ne\nkeep\nout\np\nd:\n\ne:\nold\n\np:\nq\n"
        )

    async def test_a_link_in_the_place_of_a_directory_leads_nowhere_else(self, provider: SandboxProvider) -> None:
        opened = await self.handed_over(provider, "rm -r d; ln -s /etc d; rm -r e; ln -s keep e", "d", "e/old")
        assert (await sh(opened, "ls -A d/ | head -1; [ ! -e e/old ]")).ok

    async def test_special_files_harm_nobody(self, provider: SandboxProvider) -> None:
        opened = await self.handed_over(provider, "mkfifo pipe d/pipe; rm keep; mkfifo keep", ".")
        with pytest.raises((PermissionError, FileNotFoundError)):
            await asyncio.wait_for(opened.read_file("pipe"), SOON_S)
        assert await text(opened, "cat e/old") == "o"

    async def test_it_outlives_one_use_until_it_is_released(self, provider: SandboxProvider) -> None:
        agent = await provider.open(SandboxSpec())
        await agent.write_file("answer", b"42")
        spec = SandboxSpec(layers=(await agent.export(["."]),))
        for _ in range(2):
            opened = await provider.open(spec)
            assert await opened.read_file("answer") == b"42"
            await opened.write_file("answer", b"changed")
            await opened.close()
        held = await provider.open(spec)
        await provider.release(spec.layers[0])
        await provider.release(spec.layers[0])
        assert await held.read_file("answer") == b"42"
        await held.close()
        with pytest.raises(SandboxStartError, match="gone"):
            await provider.open(spec)

    async def test_what_runs_ends_before(self, provider: SandboxProvider, mark: str) -> None:
        agent = await provider.open(SandboxSpec())
        await sh(agent, f"setsid sh -c 'sleep {mark}; echo late > late' >/dev/null 2>&1 &")
        await agent.export(["."])
        await nothing_runs(mark)

    async def test_it_is_bounded_by_the_disk_limit(self, provider: SandboxProvider) -> None:
        agent = await provider.open(SandboxSpec(disk_bytes=2**20))
        await sh(agent, "head -c 3000000 /dev/zero > big")
        with contextlib.suppress(ValueError):  # where the disk itself is held, it fits
            layer = await agent.export(["."])
            opened = await provider.open(SandboxSpec(layers=(layer,)))
            assert int(await text(opened, "stat -c %s big")) <= 2**20
            await opened.close()
        await agent.close()


class TestQuiesce:
    async def test_all_but_the_named_jobs_end(self, sandbox: Sandbox, mark: str) -> None:
        kept = await sandbox.start(["sh", "-c", f"sleep {mark}1 & (setsid sleep {mark}2 &) ; sleep {mark}3"])
        other = await sandbox.start(["sh", "-c", f"trap '' TERM; sleep {mark}4; true"])
        await sh(sandbox, f"sleep {mark}5 >/dev/null 2>&1 &")
        await sh(sandbox, f"(setsid sh -c 'sleep {mark}6 & sleep {mark}7; true' &) >/dev/null 2>&1")

        async def all_up() -> bool:
            return len([line for line in running(mark) if line.startswith("sleep")]) == 7

        await until(all_up, "seven sleeps")
        await sandbox.quiesce([kept])
        for number in (4, 5, 6, 7):
            await nothing_runs(f"{mark}{number}")
        assert running(f"{mark}1")
        assert running(f"{mark}3")
        assert (await sandbox.poll(kept)).exit_code is None
        assert await text(sandbox, "echo still here") == "still here\n"
        await sandbox.quiesce()
        await nothing_runs(mark)

        async def over() -> bool:
            return (await sandbox.poll(other)).exit_code is not None and (
                await sandbox.poll(kept)
            ).exit_code is not None

        await until(over, "both jobs are known to have ended")

    async def test_one_that_forks_all_the_time_ends_too(self, sandbox: Sandbox, mark: str) -> None:
        await sh(sandbox, f"f() {{ (setsid sleep {mark} &) ; }}; (while :; do f; done) >/dev/null 2>&1 &")

        async def forks() -> bool:
            return any(line.startswith("sleep") for line in running(mark))

        await until(forks, "it forks")
        await sandbox.quiesce()
        await nothing_runs(mark)

    async def test_an_unknown_job(self, sandbox: Sandbox) -> None:
        with pytest.raises(KeyError):
            await sandbox.quiesce(["nobody"])


class TestEnd:
    async def test_close_is_idempotent_and_final(self, provider: SandboxProvider, tmp_path: Path) -> None:
        opened = await provider.open(SandboxSpec())
        await opened.write_file("file", b"x")
        await asyncio.gather(opened.close(), opened.close())
        await opened.close()
        for call in (
            opened.exec(["true"]),
            opened.read_file("file"),
            opened.write_file("file", b""),
            opened.upload(tmp_path, "x"),
            opened.download("file", tmp_path / "x"),
            opened.start(["true"]),
            opened.poll("job-1"),
        ):
            with pytest.raises(SandboxDied):
                await call

    async def test_close_interrupts_what_runs(self, provider: SandboxProvider, mark: str) -> None:
        opened = await provider.open(SandboxSpec())
        command = asyncio.create_task(sh(opened, f"echo up > up; trap '' TERM; sleep {mark}"))

        await something_runs(mark)
        started = time.monotonic()
        await opened.close()
        assert time.monotonic() - started < SOON_S
        with pytest.raises(SandboxDied):
            await command
        await nothing_runs(mark)

    async def test_closing_the_provider_closes_its_sandboxes(self, factory: Factory, tmp_path: Path, mark: str) -> None:
        made = factory(tmp_path)
        opened = [await made.open(SandboxSpec()) for _ in range(3)]
        for each in opened:
            await each.start(["sleep", mark])
        await made.close()
        await nothing_runs(mark)
        with pytest.raises(SandboxDied):
            await opened[0].exec(["true"])
        await made.close()

    async def test_directories_that_forbid_their_removal_go_too(self, provider: SandboxProvider) -> None:
        opened = await provider.open(SandboxSpec())
        await text(opened, "mkdir -p a/b/c; touch a/b/c/file; chmod 000 a/b/c a/b a")
        await opened.close()

    @pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.05])
    async def test_cancelling_a_command_leaves_no_process(self, sandbox: Sandbox, mark: str, delay_s: float) -> None:
        command = asyncio.create_task(sh(sandbox, f"sleep {mark} & sleep {mark}", stdin=b"x" * 200_000))
        await asyncio.sleep(delay_s)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await nothing_runs(mark)
        assert await text(sandbox, "echo fine") == "fine\n"

    @pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.02])
    async def test_cancelling_an_opening_leaves_nothing_that_close_misses(
        self, provider: SandboxProvider, delay_s: float
    ) -> None:
        opening = asyncio.create_task(provider.open(SandboxSpec()))
        await asyncio.sleep(delay_s)
        if opening.cancel():
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:
            await (await opening).close()

    async def test_cancelling_file_work_does_not_disturb_the_close(self, provider: SandboxProvider) -> None:
        opened = await provider.open(SandboxSpec())
        writing = asyncio.create_task(opened.write_file("big", b"x" * 50_000_000))
        await asyncio.sleep(0.001)
        if writing.cancel():  # it may have ended while this process had no core
            with pytest.raises(asyncio.CancelledError):
                await writing
        await opened.close()

    async def test_cancelling_a_close_does_not_stop_it(self, provider: SandboxProvider, mark: str) -> None:
        opened = await provider.open(SandboxSpec())
        await opened.start(["sleep", mark])
        closing = asyncio.create_task(opened.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await opened.close()
        await nothing_runs(mark)
