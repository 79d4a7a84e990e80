"""How containers reach their host where setns is not possible: by a mounted socket, or by a forwarder's stream.

One test: .venv/bin/pytest tests/sandboxes/docker/test_reach.py -k forwarder
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from docker.errors import NotFound
from docker.utils import kwargs_from_env

from rollout_engine.config import ModelSpec
from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import EVERYTHING, Listener, SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider, DockerSandbox, capabilities, doors, network
from rollout_engine.sandboxes.docker.mounted import FOLDER
from rollout_engine.sandboxes.docker.reach import ELSEWHERE, NO_COMPILER, Facts, Reach, reach
from tests import docker_here
from tests.agents_cli.conftest import Serve, behind, serve, shell_task
from tests.agents_cli.tiny import tiny
from tests.docker_here import Daemon
from tests.helpers import make_config
from tests.models.conftest import Handler, Hanging, backend, openai_spec, stream_to
from tests.proxy.rig import Rig, door
from tests.rig import bench
from tests.sandboxes.backends import ORDINARY_USER, absent

__all__ = ["serve"]

CI = Path(__file__).parents[3] / ".ci" / "docker.py"
LIMIT_S = 120.0
ASK = {"model": "any", "messages": [{"role": "user", "content": "What is six times seven?"}]}
CLIENT = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.stdin.buffer.readline()
try:
    with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})) as answer:
        for line in answer:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
"""Posts a line of its standard input, and writes what comes back as it comes."""


def in_folder(folder: Path, pattern: str = "*") -> list[Path]:
    return list(folder.glob(pattern))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where providers make their temporary folders, and nobody else does."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


async def lead(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Leads a connection to a Unix socket, as `ssh -L` would."""
    theirs, ours = await asyncio.open_unix_connection(path)
    await asyncio.gather(copy(reader, ours), copy(theirs, writer))


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


def here() -> str:
    """The path of the daemon's socket."""
    return "/" + str(kwargs_from_env()["base_url"]).partition("://")[2].lstrip("/")


@pytest.fixture(scope="session")
def remote() -> str:
    """The daemon as one that is elsewhere. In a thread to the end: this process has things there until then."""
    if (missing := docker_here.missing()) is not None:
        pytest.skip(missing)
    ready: Future[str] = Future()

    async def serve() -> None:
        server = await asyncio.start_server(partial(lead, here()), "127.0.0.1", 0)
        ready.set_result(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return ready.result(LIMIT_S)


@pytest.fixture(params=["socket", "stream"])
async def provider(
    needs_a_daemon: None, request: pytest.FixtureRequest, folders: Path, remote: str
) -> AsyncIterator[DockerProvider]:
    if request.param == "socket":
        made = DockerProvider(run="reach", image="pybox", reach="socket")
    else:
        made = DockerProvider(run="reach", image="pybox", engine_host=remote)
    yield made
    await made.close()
    assert in_folder(folders) == []


mounted = pytest.mark.parametrize("provider", ["socket"], indirect=True)
carried = pytest.mark.parametrize("provider", ["stream"], indirect=True)


@pytest.fixture
async def sandbox(provider: DockerProvider) -> AsyncIterator[DockerSandbox]:
    opened = await provider.open(SandboxSpec())
    yield opened
    await opened.close()


@contextlib.asynccontextmanager
async def behind_door(sandbox: DockerSandbox, rig: Rig) -> AsyncIterator[str]:
    """The rig's door on a listener of the sandbox: its address inside."""
    listener = await sandbox.listen()
    factory = rig.door.server()
    server = await asyncio.get_running_loop().create_unix_server(factory, sock=listener.sock)
    yield f"http://127.0.0.1:{listener.port}/r/{rig.base.rpartition('/')[2]}"
    server.close()
    await factory.shutdown(1.0)
    await listener.close()


async def post(sandbox: DockerSandbox, url: str, body: Any, user: str | None = None) -> str:
    line = json.dumps(body).encode() + b"\n"
    done = await sandbox.exec(["python3", "-c", CLIENT, url], stdin=line, timeout_s=LIMIT_S, user=user)
    assert done.ok, done
    return done.stdout.decode()


CHAT = "/v1/chat/completions"
SCRIPTED = ModelSpec(name="m", kind="scripted", call_retries=0)


@contextlib.asynccontextmanager
async def through(sandbox: DockerSandbox, handler: Handler) -> AsyncIterator[str]:
    """The address inside of a model that answers so."""
    async with (
        asyncio.timeout(LIMIT_S),
        backend(handler) as server,
        door(openai_spec(server.url), deadline_s=LIMIT_S) as rig,
        behind_door(sandbox, rig) as url,
    ):
        yield url


@pytest.mark.docker
class TestForwarders:
    async def test_any_user_of_the_container_calls_the_proxy_and_only_with_its_token(
        self, sandbox: DockerSandbox
    ) -> None:
        async with door(SCRIPTED) as rig, behind_door(sandbox, rig) as url:
            for user in ("0", "nobody"):
                assert (
                    json.loads(await post(sandbox, url + CHAT, ASK, user))["choices"][0]["message"]["content"] == "42"
                )
            assert (await post(sandbox, url[:-1] + "x" + CHAT, ASK)) == "404 not found\n"
        assert len(rig.turns) == 2

    async def test_a_stream_comes_piece_by_piece_and_many_calls_at_once(self, sandbox: DockerSandbox) -> None:
        async with door(SCRIPTED) as rig, behind_door(sandbox, rig) as url:
            said = await asyncio.gather(*(post(sandbox, url + CHAT, {**ASK, "stream": True}) for _ in range(12)))
        assert all(each.endswith("data: [DONE]\n\n") for each in said)
        assert len(rig.turns) == 12

    async def test_a_long_stream_is_whole_and_a_large_request_too(self, sandbox: DockerSandbox) -> None:
        events = 500
        asked: list[int] = []

        async def say(request: web.Request) -> web.StreamResponse:
            asked.append(len(await request.read()))
            answer = await stream_to(request)
            for number in range(events):
                choice = {"index": 0, "delta": {"content": f"<{number}>"}, "finish_reason": None}
                await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())
            return answer

        large = {**ASK, "stream": True, "messages": [{"role": "user", "content": "x" * 900_000}]}
        async with through(sandbox, say) as url:
            said = await asyncio.gather(
                post(sandbox, url + CHAT, {**ASK, "stream": True}), post(sandbox, url + CHAT, large)
            )
        for each in said:
            at = [each.find(f"<{number}>") for number in range(events)]
            assert -1 not in at
            assert at == sorted(at)
            assert each.endswith("data: [DONE]\n\n")
        assert max(asked) > 900_000

    async def test_a_program_that_is_killed_cancels_its_call_upstream(self, sandbox: DockerSandbox) -> None:
        hanging = Hanging()
        async with through(sandbox, hanging) as url:
            program = await sandbox.connect(["python3", "-c", CLIENT, url + CHAT])
            await program.write(json.dumps(ASK).encode() + b"\n")
            await hanging.arrived.wait()
            assert not hanging.gone.is_set()
            await program.close()
            await hanging.gone.wait()

    @mounted
    async def test_nobody_but_its_own_container_sees_a_socket(
        self, provider: DockerProvider, sandbox: DockerSandbox, folders: Path
    ) -> None:
        other = await provider.open(SandboxSpec())
        mine, theirs = await sandbox.listen(4242), await other.listen(4242)
        try:
            seen = [(await each.exec(["ls", FOLDER])).stdout.split() for each in (sandbox, other)]
            assert [len(names) for names in seen] == [1, 1]
            assert seen[0] != seen[1]
            assert not (await sandbox.exec(["sh", "-c", f"rm {FOLDER}/*"])).ok
            assert not (await sandbox.exec(["touch", f"{FOLDER}/x"])).ok
            [base] = in_folder(folders)
            assert base.stat().st_mode & 0o777 == 0o700
        finally:
            await mine.close()
            await theirs.close()
            await other.close()

    async def test_its_end_frees_port_socket_and_process_and_the_sandboxs_the_folder(
        self, provider: DockerProvider, folders: Path
    ) -> None:
        sandbox = await provider.open(SandboxSpec())
        listener = await sandbox.listen()
        [base] = in_folder(folders)
        [folder] = in_folder(base, "rollout-*")
        with pytest.raises(OSError, match="in use"):
            await sandbox.listen(listener.port)
        await listener.close()
        assert in_folder(folder) == []
        await (await sandbox.listen(listener.port)).close()
        running = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        assert b"supervisor forward" not in running.stdout
        assert b"supervisor carry" not in running.stdout
        open_one = await sandbox.listen()
        await sandbox.close()
        assert not folder.exists()
        await open_one.close()

    @mounted
    async def test_it_is_no_part_of_an_export(self, provider: DockerProvider) -> None:
        agent = await provider.open(SandboxSpec())
        await agent.write_file("answer", b"42")
        layer = await agent.export([EVERYTHING])
        sandbox = await provider.open(SandboxSpec(layers=(layer,)))
        assert (await sandbox.exec(["cat", "answer"])).stdout == b"42"
        await sandbox.close()

    async def test_it_works_on_a_read_only_root(self, provider: DockerProvider) -> None:
        if "memory" not in (await capabilities()).limits:
            pytest.skip("the daemon holds no limits")
        sandbox = await provider.open(SandboxSpec(require_limits=True))
        await (await sandbox.listen()).close()
        await sandbox.close()

    async def test_a_cancelled_listen_leaves_no_socket(self, sandbox: DockerSandbox, folders: Path) -> None:
        for delay_s in (0.0, 0.001, 0.005, 0.02):
            listening = asyncio.create_task(sandbox.listen())
            await asyncio.sleep(delay_s)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await listening).close()
        assert in_folder(folders, "*/rollout-*/*") == []

    async def test_a_whole_rollout_of_an_agent_program(self, provider: DockerProvider, serve: Serve) -> None:
        task = shell_task()
        url = await serve([task], m={"skill": 1.0, "turns": 2})
        given = {"agent": "command", "agent_options": tiny("well"), "sandbox": "docker"}
        async with bench(make_config(behind(url), **given), provider=provider) as rig, asyncio.timeout(LIMIT_S):
            await (rollout := rig.rollout(task)).run()
        record = rollout.record
        assert (record.status, record.stop_reason, record.score) == ("completed", "finished", 1.0), record
        assert len(record.turns) == 3

    async def test_a_forwarder_that_is_killed_in_mid_call_leaves_its_agent_to_itself(
        self, provider: DockerProvider, folders: Path, daemon: Daemon
    ) -> None:
        task, hanging = shell_task(), Hanging()
        async with asyncio.timeout(LIMIT_S), backend(hanging) as server:
            given = {"agent": "command", "agent_options": tiny("well"), "sandbox": "docker"}
            async with bench(make_config(behind(server.url), **given), provider=provider) as rig:
                rollout = rig.rollout(task)
                running = asyncio.create_task(rollout.run())
                await hanging.arrived.wait()
                [sandbox] = provider._open_ones
                assert (await sandbox.exec(["sh", "-c", KILL_FORWARDER])).ok
                await running
            await hanging.gone.wait()
        found = rollout.record
        assert (found.status, found.failure_boundary, found.failure_type) == ("failed", "agent", "AgentError"), found
        assert "before a model call was answered; docker: the forwarder" in (found.failure_message or "")
        with pytest.raises(NotFound):
            daemon.api.inspect_container(sandbox.name)
        assert in_folder(folders, "*/rollout-*") == []


KILL_FORWARDER = """
for each in /proc/[0-9]*; do
  case "$(tr '\\0' ' ' < $each/cmdline)" in */supervisor?[cf]*) kill -9 ${each#/proc/} && exit 0;; esac
done
exit 1
"""


OWNER = """
import asyncio, os, socket, sys
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
from rollout_engine.sandboxes.docker import supply
async def main():
    provider = DockerProvider(run=sys.argv[1], image="busybox", reach="socket" if len(sys.argv) < 3 else None)
    sandbox = await provider.open(SandboxSpec())
    try:
        listener = await sandbox.listen()
    except Exception as error:
        print(type(error).__name__, error, (await sandbox.exec(["echo", "alive"])).stdout, flush=True)
        await provider.close()
        return
    async def answer(reader, writer):
        writer.write(b"42, " + await reader.readline())
        writer.close()
    if listener.sock.family == socket.AF_UNIX:
        await asyncio.start_unix_server(answer, sock=listener.sock)
        said = await sandbox.exec(["sh", "-c", f"echo hello | nc 127.0.0.1 {listener.port}"], timeout_s=100)
        assert said.stdout == b"42, hello\\n", said
    print("up", flush=True)
    if sys.argv[3:] == ["once"]:
        await provider.close()
        return
    await asyncio.sleep(1000)
if len(sys.argv) > 2:  # what only root can read is read before
    supply.compiled()
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
asyncio.run(main())
"""


@pytest.mark.docker
@pytest.mark.usefixtures("needs_a_daemon")
class TestWhereItCannotBe:
    async def test_the_folders_of_a_killed_host_are_removed_by_the_next(self, folders: Path, daemon: Daemon) -> None:
        env = {**os.environ, "TMPDIR": str(folders)}
        pipe = asyncio.subprocess.PIPE
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, "killed", stdout=pipe, env=env)
        assert owner.stdout is not None
        assert await asyncio.wait_for(owner.stdout.readline(), LIMIT_S) == b"up\n"
        [left] = in_folder(folders)
        owner.kill()
        await owner.wait()
        provider = DockerProvider(run="killed", image="busybox", reach="socket")
        await (await provider.open(SandboxSpec())).close()
        assert not left.exists()
        await provider.close()
        assert in_folder(folders) == []
        await daemon.gone("killed")

    @pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own takes root")
    async def test_a_daemon_with_other_files_opens_sandboxes_all_the_same(self, tmp_path: Path) -> None:
        own = 'mount -t tmpfs none "$0" && TMPDIR="$0" exec "$@"'
        argv = ["unshare", "-m", "sh", "-c", own, str(tmp_path), sys.executable, "-c", OWNER, "unseen"]
        done = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(done.communicate(), LIMIT_S)
        assert said.startswith(b"SandboxUnavailable")
        assert b"TMPDIR" in said
        assert said.rstrip().endswith(b"b'alive\\n'")

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
    async def test_an_ordinary_user_takes_the_mounted_socket_by_itself(self, tmp_path: Path) -> None:
        anybody = str(ORDINARY_USER)
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.chown(folder, ORDINARY_USER, ORDINARY_USER)
            async with await asyncio.start_unix_server(partial(lead, here()), f"{folder}/docker.sock"):
                os.chown(f"{folder}/docker.sock", ORDINARY_USER, ORDINARY_USER)
                env = {**os.environ, "TMPDIR": folder, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
                owner = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", OWNER, "anybody", anybody, stdout=asyncio.subprocess.PIPE, env=env
                )
                assert owner.stdout is not None
                assert await asyncio.wait_for(owner.stdout.readline(), LIMIT_S) == b"up\n"
                assert len(in_folder(Path(folder), "rollout-sockets-*/rollout-*/*")) == 1
                owner.kill()
                await owner.wait()

    @pytest.mark.skipif(os.geteuid() != 0, reason="starts a daemon of an ordinary user")
    async def test_a_rootless_daemon_of_an_ordinary_user(self) -> None:
        if shutil.which("rootlesskit") is None:
            absent("rootlesskit is not installed (.ci/docker.py start)")
        code = f"import os, sys; sys.argv += ['rootless', os.environ['ROOTLESS_UID'], 'once']\n{OWNER}"
        argv = [sys.executable, str(CI), "rootless", "--", sys.executable, "-c", code]
        done = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(done.communicate(), 2 * LIMIT_S)
        assert (done.returncode, said) == (0, b"up\n")

    async def test_a_daemon_elsewhere_for_which_no_forwarder_is_made(self, remote: str) -> None:
        assert (await capabilities(remote)).reach == Reach("stream", ELSEWHERE)
        provider = DockerProvider(run="far", image="busybox", engine_host=remote, supervise=False)
        sandbox = await provider.open(SandboxSpec())
        with pytest.raises(SandboxUnavailable, match="on another machine, and no forwarder"):
            await sandbox.listen()
        await provider.close()

    async def test_a_daemon_whose_socket_was_led_here_gets_the_stream(
        self, folders: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(*_: Any) -> Listener:
            raise SandboxUnavailable("docker: process 1 is not the container's")

        monkeypatch.setattr(doors.network, "listen", refuse)
        monkeypatch.setattr("rollout_engine.sandboxes.docker.doors.facts_of", lambda *_: HERE)
        provider = DockerProvider(run="led", image="busybox")
        sandbox = await provider.open(SandboxSpec())
        for listener in await asyncio.gather(sandbox.listen(), sandbox.listen()):
            assert listener.sock.family == socket.AF_UNIX
            await listener.close()
        await provider.close()
        assert in_folder(folders) == []

    async def test_a_process_that_is_not_the_containers_is_not_entered(self) -> None:
        with pytest.raises(SandboxUnavailable, match="not the container's"):
            network._listen("f" * 64, os.getpid(), 0)

    async def test_what_is_there_here(self) -> None:
        assert (await capabilities()).reach.way == ("setns" if os.geteuid() == 0 else "socket")


HERE = Facts(local=True, seen=True, privileged=True, supervised=True)


@pytest.mark.parametrize(
    ("facts", "way", "why"),
    [
        (HERE, "setns", ""),
        (replace(HERE, supervised=False), "setns", ""),
        (replace(HERE, privileged=False), "socket", "takes root"),
        (replace(HERE, seen=False), "socket", "not seen from here"),
        (replace(HERE, privileged=False, supervised=False), None, NO_COMPILER),
        (replace(HERE, local=False), "stream", ELSEWHERE),
        (replace(HERE, local=False, supervised=False), None, NO_COMPILER),
    ],
)
def test_the_best_way_that_there_is(facts: Facts, way: str | None, why: str) -> None:
    found = reach(facts)
    assert (found.way, why in found.why) == (way, True)
    assert reach(facts, "stream").way == ("stream" if facts.supervised else None)
    assert reach(facts, "socket").way == ("socket" if facts.local and facts.supervised else None)
    assert reach(facts, "setns").way == (way if way == "setns" else None)
