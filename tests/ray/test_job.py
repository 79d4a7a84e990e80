"""A run submitted to a cluster with `ray job submit` uses that cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollout_engine.store.rundir import open_run, read_rollouts
from tests.cli.rollout import rollout, write_tasks
from tests.helpers import make_config
from tests.ray.rays import ROOT, SHORT, alive, blocking_until, descendants, free_port

pytestmark = pytest.mark.ray

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of a head with its job server, which runs as long as the test: RAY_ADDRESS is the server's."""
    folder, port, agent = Path(tempfile.mkdtemp(prefix="ray-test-", dir=SHORT)), free_port(), free_port()
    (folder / "token").write_text(secrets.token_hex(16))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{RAY.parent}:{environment['PATH']}"  # `python` on a node is the one that has the package
    # The standard ones are those of any other Ray on this machine.
    ports = [
        f"--port={free_port()}",
        f"--dashboard-port={port}",
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={free_port()}",
    ]
    small = ["--num-cpus=2", f"--object-store-memory={80 * 2**20}", f"--temp-dir={folder}"]
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--include-dashboard=true", *ports, *small],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        ready = (port, agent)
        blocking_until(lambda: all(map(listens, ready)) or head.poll() is not None, "the job server listens", 180)
        assert head.poll() is None, (folder / "log").read_text()
        yield {**environment, "RAY_ADDRESS": f"http://127.0.0.1:{port}", "AGENT": f"http://127.0.0.1:{agent}"}
    finally:
        below = [head.pid, *descendants(head.pid)]
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()
        blocking_until(lambda: not alive(below), "the head has ended")
        shutil.rmtree(folder, ignore_errors=True)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def test_a_submitted_driver_runs_on_the_cluster_it_was_submitted_to(
    environment: dict[str, str], tmp_path: Path
) -> None:
    config = make_config(ray="auto").model_dump(mode="json", exclude_defaults=True)
    orders = json.dumps({"config": config, "tasks": 3, "run_dir": str(tmp_path / "run")})
    submitted = subprocess.run(
        [RAY, "job", "submit", "--", sys.executable, "-m", "tests.ray.drive", orders],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert re.search(r"(?m)^rows 3$", submitted.stdout), submitted.stdout
    assert "Started a local Ray" not in submitted.stdout
    assert read_rollouts(tmp_path / "run").num_rows == 3
    assert open_run(tmp_path / "run").info.status == "finished"


def test_a_detached_run_is_handed_to_the_job_server_and_can_be_watched(
    environment: dict[str, str], tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks.jsonl")
    command = ("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-k", "2", "--sandbox", "none")
    command = (*command, "--ray", environment["RAY_ADDRESS"], "-o", str(tmp_path / "run"), "--detach", "--json")
    submitted = rollout(*command, cwd=tmp_path, env=environment)
    assert submitted.code == 0, submitted.err
    job = submitted.document["job"]
    waited = [RAY, "job", "logs", "--follow", job]
    followed = subprocess.run(waited, env=environment, capture_output=True, text=True, timeout=240, check=True)
    assert (tmp_path / "run" / "run.json").exists(), followed.stdout
    assert read_rollouts(tmp_path / "run").num_rows == 12, followed.stdout
    attached = rollout("attach", str(tmp_path / "run"), "--json", cwd=tmp_path)
    assert (attached.code, attached.document["status"]) == (0, "finished")


def test_a_job_server_that_is_not_there_or_wants_another_token_is_told(
    environment: dict[str, str], tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 1)
    command = ("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", str(tmp_path / "run"))
    server = environment["RAY_ADDRESS"]
    wrong = {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    for address, env in (("http://127.0.0.1:1", environment), (server, wrong)):
        done = rollout(*command, "--detach", "--ray", address, cwd=tmp_path, env=env)
        assert (done.code, f"the job server at {address} does not take the job" in done.err) == (2, True), done.err
        assert wrong["RAY_AUTH_TOKEN"] not in done.err
    done = rollout(*command, "--ray", server, cwd=tmp_path, env=environment)
    assert (done.code, "is a job server" in done.err) == (2, True)


def test_the_probes_of_the_manifests_are_answered_without_a_token(environment: dict[str, str]) -> None:
    cluster = yaml.safe_load((ROOT / "deploy" / "raycluster.yaml").read_text())["spec"]
    groups = {"8265": cluster["headGroupSpec"], "52365": cluster["workerGroupSpecs"][0]}
    here = {"8265": environment["RAY_ADDRESS"], "52365": environment["AGENT"]}
    for port, group in groups.items():
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        assert str(probe["port"]) == port
        with urllib.request.urlopen(f"{here[port]}{probe['path']}", timeout=60) as answer:
            assert answer.status == 200
