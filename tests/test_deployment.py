"""What a cluster is made from is what its tools take, and keeps what its comments promise.

cluster.yaml is held against Ray's own schema; the manifests for KubeRay and the Dockerfile against ours (no image is
built here: what its steps do to Python is done in a folder).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError as FieldError

from tests.kuberay import PodSpec, RayCluster, RayClusterSpec, RayJob, dockerfile

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


# -- KubeRay --------------------------------------------------------------------------------------------------------

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / f"{name}.yaml").read_text())
    return loaded


def specs() -> list[RayClusterSpec]:
    cluster, job = RayCluster.model_validate(manifest("raycluster")), RayJob.model_validate(manifest("rayjob"))
    return [cluster.spec, job.spec.ray_cluster_spec]


def pods(spec: RayClusterSpec) -> list[PodSpec]:
    return [spec.head_group_spec.template.spec, *(group.template.spec for group in spec.worker_group_specs)]


def test_a_mistake_in_a_manifest_would_be_seen() -> None:
    for path, value in (("maxReplica", 4), ("replicas", "4"), ("groupName", "no name")):
        wrong = manifest("raycluster")
        wrong["spec"]["workerGroupSpecs"][0][path] = value
        with pytest.raises(FieldError, match=path):
            RayCluster.model_validate(wrong)


@pytest.mark.parametrize("spec", specs(), ids=["RayCluster", "RayJob"])
def test_no_rollout_runs_on_the_head_and_there_are_always_as_many_workers(spec: RayClusterSpec) -> None:
    assert spec.head_group_spec.ray_start_params["num-cpus"] == "0"
    for group in spec.worker_group_specs:
        assert group.min_replicas == group.replicas == group.max_replicas


@pytest.mark.parametrize("spec", specs(), ids=["RayCluster", "RayJob"])
def test_every_node_has_the_token_by_name_of_a_secret_only(spec: RayClusterSpec) -> None:
    if spec.auth_options is not None:
        assert (spec.auth_options.mode, spec.auth_options.secret_name) == ("token", "rollout-ray")
    for pod in pods(spec):
        variables = {one.name: one for one in pod.containers[0].env}
        if spec.auth_options is None:
            assert variables["RAY_AUTH_MODE"].value == "token"
            assert variables["RAY_AUTH_TOKEN"].value_from is not None
        assert not [name for name, one in variables.items() if one.value and re.search("KEY|SECRET|TOKEN", name)]


@pytest.mark.parametrize("spec", specs(), ids=["RayCluster", "RayJob"])
def test_a_pod_may_end_in_good_order_before_it_is_killed(spec: RayClusterSpec) -> None:
    from rollout_engine.fleet import STOP_S

    for pod in pods(spec):
        drain = next(float(one.value or 0) for one in pod.containers[0].env if one.name == DRAIN)
        assert pod.termination_grace_period_seconds > drain + STOP_S


@pytest.mark.parametrize("spec", specs(), ids=["RayCluster", "RayJob"])
def test_no_pod_is_root_and_none_has_more_than_its_work_needs(spec: RayClusterSpec) -> None:
    head, *workers = pods(spec)
    for pod in (head, *workers):
        context = pod.containers[0].security_context
        assert pod.security_context.run_as_non_root
        assert not context.allow_privilege_escalation
        assert (context.capabilities.add, context.capabilities.drop) == ([], ["ALL"])
        assert pod.containers[0].resources.limits == pod.containers[0].resources.requests
    assert head.containers[0].security_context.seccomp_profile.type == "RuntimeDefault"
    assert head.host_users
    for worker in workers:  # the namespace sandbox's needs; see docs/deploy.md for how they were found
        context = worker.containers[0].security_context
        assert (context.seccomp_profile.type, context.proc_mount, worker.host_users) == (
            "Unconfined",
            "Unmasked",
            False,
        )


@pytest.mark.parametrize("spec", specs(), ids=["RayCluster", "RayJob"])
def test_the_pods_run_the_image_and_the_ray_that_were_tested(spec: RayClusterSpec) -> None:
    from rollout_engine.version import VERSION

    assert spec.ray_version == pinned_ray()
    for pod in pods(spec):
        assert pod.containers[0].image.endswith(f":{VERSION}")


def pinned_ray() -> str:
    found = re.search(r"(?m)^ray(?:\[\w+\])?==([\d.]+)", (ROOT / "constraints.txt").read_text())
    assert found is not None
    return found[1]


def test_a_retried_job_goes_on_with_its_run_on_s3() -> None:
    job = RayJob.model_validate(manifest("rayjob")).spec
    words = shlex.split(job.entrypoint)
    assert words[:2] == ["rollout", "run"]
    assert "--resume" in words
    assert words[words.index("-o") + 1].startswith("s3://")
    head = job.ray_cluster_spec.head_group_spec.template.spec.containers[0]
    assert any(Path(words[2]).is_relative_to(mount.mount_path) for mount in head.volume_mounts)
    assert job.backoff_limit > 0


def test_the_command_line_takes_the_job_s_entrypoint(tmp_path: Path) -> None:
    from tests.cli.rollout import rollout, write_tasks

    write_tasks(tmp_path / "tasks.jsonl", 1)
    words = shlex.split(RayJob.model_validate(manifest("rayjob")).spec.entrypoint)[1:]
    words[1], words[words.index("-o") + 1] = "tasks.jsonl", "run"
    done = rollout(*words, "--dry-run", cwd=tmp_path, env={"OPENAI_API_KEY": "x"})
    assert done.code == 0, done.err


# -- the image ------------------------------------------------------------------------------------------------------


def test_the_image_is_pinned_and_ends_as_an_ordinary_user() -> None:
    steps = dockerfile((ROOT / "deploy" / "Dockerfile").read_text())
    assert steps[0].name == "FROM"
    found = re.fullmatch(r"rayproject/ray:([\d.]+)-py3(\d+)", steps[0].text)
    assert found is not None
    assert found[1] == pinned_ray()
    users = [step.text for step in steps if step.name == "USER"]
    assert users[-1] == "1000"
    runs = " ".join(step.text for step in steps if step.name == "RUN")
    assert "-c /opt/rollout-engine/constraints.txt" in runs
    assert not re.search(r"curl|wget|https?://|TOKEN|SECRET", runs)
    with pytest.raises(ValueError, match="no instruction"):
        dockerfile("FORM scratch")


def test_every_shell_step_of_the_image_is_a_shell_s(tmp_path: Path) -> None:
    for step in dockerfile((ROOT / "deploy" / "Dockerfile").read_text()):
        if step.name == "RUN":
            subprocess.run(["sh", "-n", "-c", step.text], check=True)


def test_the_wheel_that_the_image_installs_has_all_that_runs_need(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves things beside what it builds
    for name in ("rollout_engine", "actors"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    wheel_it = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*wheel_it, str(source)], check=True, timeout=600, cwd=tmp_path)
    wheel = next(tmp_path.glob("rollout_engine-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    sources = {path.relative_to(ROOT) for name in ("rollout_engine", "actors") for path in (ROOT / name).rglob("*.py")}
    missing = [path for path in sources if not (tmp_path / "site" / path).is_file()]
    assert missing == []
    done = subprocess.run(
        [sys.executable, "-m", "rollout_engine", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("rollout-engine ")
