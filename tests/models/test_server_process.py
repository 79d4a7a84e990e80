"""The model server as a process: it comes up, it says where, and it leaves with its parent.

.venv/bin/pytest tests/models/test_server_process.py
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request

import pytest

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models.server_process import ServerProcess

from .conftest import ask, client, context, openai_spec

SPEC = ModelSpec(name="m1", kind="scripted", options={"skill": 1})

PARENT = """
import os, signal
from rollout_engine.config import ModelSpec
from rollout_engine.models.server_process import ServerProcess
server = ServerProcess({"m1": ModelSpec(name="m1", kind="scripted")})
server.start()
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

COMMAND = """
from rollout_engine.config import ModelSpec
from rollout_engine.models.server_process import run_server
run_server({"m1": ModelSpec(name="m1", kind="scripted")}, port=0, say=lambda line: print(line, flush=True))
print("ended", flush=True)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_serves_from_a_child_and_ends_with_its_context() -> None:
    with ServerProcess({"m1": SPEC}, solutions={"täsk": "x" * 1_000_000}) as server:
        pid = server.pid
        async with client(openai_spec(server.url, seed_header=True)) as model:
            completion = await ask(model, context("täsk"))
        assert completion.message["content"] == "x" * 1_000_000
        assert server.stats()["answered"] == 1
    assert not alive(pid)
    server.close()


def test_the_child_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = os.pidfd_open(pid)
        assert parent.wait(60) == -signal.SIGKILL
    try:
        assert select.select([child], [], [], 60)[0], "the server outlived its parent"
    finally:
        os.close(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_its_url_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        line = command.stdout.readline()
        assert line.startswith("serving m1 at http://127.0.0.1:")
        with urllib.request.urlopen(f"{line.split()[-1]}/health", timeout=60) as reply:
            assert json.load(reply) == {"status": "ok"}
        command.send_signal(number)
        assert command.stdout.read() == "ended\n"
        assert command.wait(60) == 0


def test_bad_models_are_an_input_error_of_the_parent() -> None:
    spec = ModelSpec(name="m1", kind="scripted", options={"skil": 1})
    with pytest.raises(InputError, match=r"models\.m1\.options\.skil"):
        ServerProcess({"m1": spec}).start()
