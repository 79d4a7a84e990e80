"""Scripts: exit codes, result files, isolations, and what no agent's preparation changes.

make one T=tests/verifiers/test_script.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.errors import InputError, SandboxUnavailable, VerifierBadReturn, VerifierError, VerifierTimeout
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Score, Trajectory
from rollout_engine.verifiers import make_verifier
from tests.sandboxes.busy import GROWING_S


@pytest.fixture
async def box(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    opened = await provider.open(SandboxSpec())
    yield opened
    await opened.close()


async def verdict(box: Sandbox, command: str, timeout_s: float = 60.0, **fields: Any) -> Score:
    spec = {"type": "script", "command": command, **fields}
    task = Task(task_id="t", prompt="do it", verifier=spec)
    return await make_verifier(spec, timeout_s=timeout_s).verify(task, Trajectory(), box)


class TestExitCode:
    @pytest.mark.parametrize(
        ("command", "score"), [("true", 1.0), ("exit 1", 0.0), ("exit 255", 0.0), ("test -e x", 0.0)]
    )
    async def test_zero_passes(self, box: Sandbox, command: str, score: float) -> None:
        assert await verdict(box, command) == Score(score, score == 1.0)

    @pytest.mark.parametrize("command", ["no-such-program", "exit 126", "kill -9 $$", "kill -11 $$"])
    async def test_what_did_not_run_to_its_end_is_no_verdict(self, box: Sandbox, command: str) -> None:
        with pytest.raises(VerifierError, match="exit code"):
            await verdict(box, f"echo some output; {command}")

    async def test_files_are_there_and_run_in_the_workspace(self, box: Sandbox) -> None:
        files = {
            "/tests/run.sh": "#!/bin/sh\n. ./lib.sh\ncheck",
            "lib.sh": 'check() { [ "$PWD $A" = "/workspace b" ]; }',
        }
        assert (await verdict(box, "/tests/run.sh", files=files, env={"A": "b"})).value == 1.0

    async def test_a_script_that_hangs(self, box: Sandbox) -> None:
        for timeout_s in GROWING_S:
            with pytest.raises(VerifierTimeout) as caught:
                await verdict(box, "echo working on it; sleep 300", timeout_s=timeout_s)
            if "working on it" in str(caught.value):
                return
        raise AssertionError(str(caught.value))


class TestFile:
    @pytest.mark.parametrize(
        ("command", "score"),
        [
            ("echo 0.5 > reward.txt", Score(0.5)),
            ("echo 0.5 > reward.txt; echo 1 > reward.json; exit 3", Score(1.0)),
            (
                'echo \'{"reward": 0.25, "style": 1, "ok": true}\' > reward.json',
                Score(0.25, None, {"reward": 0.25, "style": 1, "ok": 1}),
            ),
            ("echo '{\"score\": -2}' > reward.json", Score(-2.0, None, {"score": -2})),
        ],
    )
    async def test_json_then_text(self, box: Sandbox, command: str, score: Score) -> None:
        assert await verdict(box, f'cd "$REWARD_DIR"; {command}', reward="file") == score

    @pytest.mark.parametrize(
        "command",
        [
            "true",
            "echo > reward.txt",
            "echo good > reward.txt",
            "echo nan > reward.txt",
            "echo 1e999 > reward.txt",
            "printf '\\377' > reward.txt",
            "echo '{' > reward.json; echo 1 > reward.txt",
            "echo '{}' > reward.json",
            "echo '{\"reward\": NaN}' > reward.json",
            'echo \'{"reward": 1, "x": {}}\' > reward.json',
            "echo '{\"reward\": null}' > reward.json",
            "echo '\"1\"' > reward.json",
            "head -c 100000 /dev/zero > reward.json",
            "mkdir reward.json",
            "mkfifo reward.json",
            "echo 1 > /tmp/one; ln -s /tmp/one reward.txt",
            "ln -s /dev/zero reward.json",
        ],
    )
    async def test_anything_else_is_no_verdict(self, box: Sandbox, command: str) -> None:
        with pytest.raises(VerifierBadReturn):
            await verdict(box, f'cd "$REWARD_DIR"; {command}', reward="file")

    async def test_the_exit_code_where_so_configured(self, box: Sandbox) -> None:
        assert (await verdict(box, "exit 1", reward="file_or_exit_code")).value == 0.0
        assert (
            await verdict(box, "echo 0.5 > $REWARD_DIR/reward.txt; exit 1", reward="file_or_exit_code")
        ).value == 0.5

    async def test_what_was_there_before_does_not_count(self, box: Sandbox) -> None:
        await box.exec(
            ["sh", "-c", "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.json; echo x > /tests/x"]
        )
        with pytest.raises(VerifierBadReturn, match="no reward"):
            await verdict(box, "ls /tests", reward="file", files={"/tests/own": ""})
        assert (await verdict(box, "test ! -e /tests/x", files={"/tests/own": ""})).value == 1.0

    async def test_a_folder_behind_a_link_is_made_anew(self, box: Sandbox) -> None:
        await box.exec(["sh", "-c", "mkdir -p /tmp/mine/verifier; ln -s /tmp/mine /logs"])
        command = "test ! -L /logs && echo 1 > /logs/verifier/reward.txt && ls /tmp/mine/verifier | wc -l >> /tmp/n"
        assert (await verdict(box, command, reward="file")).value == 1.0
        assert await box.read_file("/tmp/n") == b"0\n"


class TestLocal:
    async def test_a_host_has_no_folders_to_be_emptied(self, tmp_path: Path) -> None:
        provider = make_provider("local", directory=tmp_path)
        box = await provider.open(SandboxSpec())
        with pytest.raises(SandboxUnavailable, match="/logs/verifier"):
            await verdict(box, "true", reward="file")
        with pytest.raises(SandboxUnavailable, match="/tests"):
            await verdict(box, "true", files={"/tests/a": ""})
        assert (await verdict(box, 'echo 1 > "$REWARD_DIR/reward.txt"', reward="file", reward_dir="logs")).value == 1.0
        await provider.close()

    @pytest.mark.parametrize(
        "fields", [{"command": ""}, {"command": "x", "reward": "stdout"}, {"command": "x", "isolation": "pure"}]
    )
    def test_what_cannot_be_used_is_named(self, fields: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="verifier"):
            make_verifier({"type": "script", **fields})
