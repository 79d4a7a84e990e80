"""cluster.yaml is what Ray's cluster launcher takes, and what its comments promise."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config

    filled: dict[str, Any] = prepare_config(cluster)
    return filled


def start_commands(cluster: dict[str, Any]) -> list[list[str]]:
    """The two commands that start Ray, as words."""
    lines = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    return [shlex.split(line) for line in lines if "ray start" in line]


def test_it_fits_ray_s_own_schema(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    validate_config(prepared(cluster))


def test_a_mistake_would_be_seen(cluster: dict[str, Any]) -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(ValidationError):
        validate_config({**cluster, "max_worker": 4})


def test_there_are_always_as_many_workers_as_a_run_finds_at_its_start(cluster: dict[str, Any]) -> None:
    worker = prepared(cluster)["available_node_types"]["worker"]
    assert worker["min_workers"] == worker["max_workers"] == cluster["max_workers"]


def test_every_node_is_started_with_token_authentication_said(cluster: dict[str, Any]) -> None:
    commands = start_commands(cluster)
    assert len(commands) == 2
    for words in commands:
        assert words[:2] == ["RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token"]
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_ray_start_knows_every_option(cluster: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    used = {word.partition("=")[0] for words in start_commands(cluster) for word in words if word.startswith("--")}
    assert used
    assert used <= known


def test_every_node_installs_the_package_with_the_versions_that_were_tested(cluster: dict[str, Any]) -> None:
    filled = prepared(cluster)
    install = next(line for line in cluster["setup_commands"] if "pip install" in line)
    for kind in ("head_setup_commands", "worker_setup_commands"):
        assert install in filled[kind]
    mounts = cluster["file_mounts"]
    wheel, constraints = re.search(r"(~\S+)/rollout_engine-\*\.whl", install), re.search(r"-c (~\S+)", install)
    assert wheel is not None
    assert constraints is not None
    assert mounts[wheel[1]] == "dist"
    assert (ROOT / mounts[constraints[1]]).is_file()


def test_the_image_has_the_ray_and_the_python_that_were_tested(cluster: dict[str, Any]) -> None:
    found = re.fullmatch(r"rayproject/ray:([\d.]+)-py3(\d+)", cluster["docker"]["image"])
    assert found is not None
    pinned = re.search(r"(?m)^ray(?:\[\w+\])?==([\d.]+)", (ROOT / "constraints.txt").read_text())
    assert pinned is not None
    assert found[1] == pinned[1]
    wanted = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert int(found[2]) >= int(wanted[1])
