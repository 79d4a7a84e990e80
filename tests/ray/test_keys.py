"""An API key is in no byte that is written, and in no process's environment or command line but the driver's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rollout_engine import RolloutEngine
from tests.helpers import make_config, make_tasks
from tests.ray.rays import SharedRay, descendants
from tests.rig import answer, chat_server, served

pytestmark = pytest.mark.ray


def written(*folders: Path) -> Iterator[tuple[Path, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # what Ray removes meanwhile
                if path.is_file() and not path.is_symlink():
                    yield path, path.read_bytes()


def shown(pid: int) -> tuple[str, str]:
    """What other processes of the same user see of a process; nothing, if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        return (folder / "environ").read_text(errors="replace"), (folder / "cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""


async def test_a_key_reaches_the_server_and_nothing_else(
    shared_ray: SharedRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Set after Ray was started: what a host knows of it, the engine has told it.
    key = f"sk-{secrets.token_hex(16)}"
    monkeypatch.setenv("ROLLOUT_TEST_KEY", key)
    caplog.set_level(0)

    async def demanding(request: web.Request) -> web.StreamResponse:
        """Answers with the key that it got wherever it can: in the answer's status line, headers and body."""
        sent = request.headers.get("authorization", "")
        if sent != f"Bearer {key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        content = (await request.json())["messages"][0]["content"]
        number = int(content.split()[1].strip("."))
        if number % 3 == 0:
            return answer(str(number))
        message = {"error": {"message": f"key {key} in header {sent!r} has a problem", "code": key}}
        status = 401 if number % 3 == 1 else 500
        return web.json_response(message, status=status, reason=f"{key} refused", headers={"x-key": key})

    run_dir = tmp_path / "run"
    async with asyncio.timeout(180), chat_server(demanding) as url:
        config = make_config(
            served(url, api_key_env="ROLLOUT_TEST_KEY"), ray="auto", retry={"max_retries": 0, "breaker_failures": 0}
        )
        async with RolloutEngine(config=config, run_dir=run_dir) as engine:
            rows = [record async for record in engine.rollouts(make_tasks(30))]
            host = shared_ray.host_pid()
            assert any(shown(host))
            assert not any(key in text for pid in (host, *descendants(host)) for text in shown(pid))
            await engine.close()
            tables = await asyncio.to_thread(engine.tables)
    by_type = {kind: sum(row.failure_type == kind for row in rows) for kind in {row.failure_type for row in rows}}
    assert by_type == {None: 10, "ModelAuthError": 10, "ModelServerError": 10}
    assert key not in str(rows)
    # The files as they are, and what compressed ones hold.
    found = [path for path, content in written(run_dir, shared_ray.session_dir) if key.encode() in content]
    assert found == []
    for table in (tables.rollouts, tables.turns, tables.groups, tables.rewards):
        assert key not in str(table.to_pylist())
    said = capfd.readouterr()
    assert key not in said.out + said.err + caplog.text
    assert os.environ["ROLLOUT_TEST_KEY"] == key
