"""`rollout doctor`: every line is true of this machine, and no key's value is ever shown.

One test: .venv/bin/pytest tests/cli/test_doctor.py -k keys
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_engine.commands import checks
from rollout_engine.commands.checks import Finding
from rollout_engine.sandboxes.docker.hijack import Address
from rollout_engine.sandboxes.namespace import seccomp
from tests.cli.inside import Inside

SECRET = "sk-this-is-the-secret"


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that take seconds."""
    monkeypatch.setattr(checks, "CHECKS", (checks.python, checks.machine, checks.cgroups))


def levels(found: Iterator[Finding]) -> dict[str, str]:
    return {finding.area: finding.level for finding in found}


@pytest.mark.usefixtures("light")
def test_keys_are_told_by_name_and_never_by_value(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_API_KEY", SECRET)
    (inside.folder / "run.toml").write_text(
        '[models.a]\nkind = "openai"\nmodel = "m"\nbase_url = "http://h/v1"\napi_key_env = "MINE"\n'
    )
    for flags in ((), ("--json",)):
        done = inside("doctor", "--config", "run.toml", *flags)
        assert done.code == 1
        assert "MINE is not set" in done.out
        assert "OTHER_API_KEY" in done.out
        assert SECRET not in done.out + done.err


@pytest.mark.usefixtures("light")
def test_json_says_whether_all_is_well(inside: Inside) -> None:
    done = inside("doctor", "--json")
    assert done.document["ok"] == (done.code == 0)
    assert {"python", "packages", "cores", "memory", "descriptors", "disk"} <= {
        finding["area"] for finding in done.document["findings"]
    }


def test_descriptors_are_the_process_s_own() -> None:
    [finding] = [finding for finding in checks.machine() if finding.area == "descriptors"]
    assert f"hard {resource.getrlimit(resource.RLIMIT_NOFILE)[1]:,}" in finding.found


def test_too_few_descriptors_fail_and_name_the_number_needed() -> None:
    code = "import resource; resource.setrlimit(7, (300, 300)); from rollout_engine.commands import checks; " + (
        "print([f for f in checks.machine() if f.area == 'descriptors'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "level='fail'" in done.stdout
    assert "1024" in done.stdout


def test_a_ray_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert [finding.level for finding in checks._ray_address(address)] == ["ok"]
    with socket.socket() as taken:  # so that nobody else comes to listen there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        [refused] = checks._ray_address(address)
    assert (refused.level, address in refused.found) == ("fail", True)
    assert [finding.level for finding in checks._ray_address("ray://h:10001")] == ["fail"]
    assert [finding.level for finding in checks._ray_address(None)] == ["ok"]


def test_a_docker_that_is_not_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert levels(checks.docker()) == {"docker": "warn"}


def test_it_says_by_which_way_containers_reach_their_proxy() -> None:
    # Its path may have 107 characters, and a folder for tests may have most of them.
    with socket.socket(socket.AF_UNIX) as daemon, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        daemon.bind(f"{folder}/s")
        daemon.listen()
        here = checks._docker_listener(Address(f"{folder}/s"), {"Architecture": platform.machine()})
    assert here.level == "ok"
    assert ("setns" if os.geteuid() == 0 else "a mounted socket and a forwarder") in here.found
    far = checks._docker_listener(Address(host="h", port=2375), {"Architecture": platform.machine()})
    assert (far.level, "a forwarder's stream: the daemon is on another machine" in far.found) == ("ok", True)
    none = checks._docker_listener(Address(host="h", port=2375), {"Architecture": "another"})
    assert (none.level, "another machine" in none.found) == ("warn", True)
    assert "namespace" in none.fix


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_it_says_what_sandboxes_hold_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = list(checks.namespaces())
    assert {finding.level for finding in found} <= {"ok", "warn"}
    told = " ".join(finding.found for finding in found)
    assert "namespace sandboxes: " in told
    assert "system call filter: " in told
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_missing_system_call_filter_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "program", lambda **_: None)
    [finding] = [finding for finding in checks.namespaces() if "system call filter" in finding.found]
    assert (finding.level, "pyseccomp" in finding.fix) == ("warn", True)


def test_all_of_it_runs_here(inside: Inside) -> None:
    done = inside("doctor", "--json")
    found = done.document["findings"]
    assert {"ray", "ray cluster", "docker", "namespaces", "cgroups", "api keys"} <= {each["area"] for each in found}
    assert all(finding["fix"] for finding in found if finding["level"] != "ok")
