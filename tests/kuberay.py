"""The fields of KubeRay's and Kubernetes' objects that the manifests use, strictly: what is not here is a mistake.

Written by hand, because no package carries the operator's own schemas (0.9 MB each, most of it Kubernetes' pods).
The fields of containers were compared with the custom resource definition of RayCluster (ray.io/v1); others were read
in its reference only in part. Fields of KubeRay that the manifests do not use yet are left out, too.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|[KMGT]i?)?$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Ref(Strict):
    name: Name
    key: str | None = None
    optional: bool = False


class ValueFrom(Strict):
    secret_key_ref: Ref


class Variable(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]
    value: str | None = None
    value_from: ValueFrom | None = None

    @model_validator(mode="after")
    def one(self) -> Variable:
        if (self.value is None) == (self.value_from is None):
            raise ValueError(f"{self.name}: give either value or valueFrom")
        return self


class EnvFrom(Strict):
    secret_ref: Ref


class ContainerPort(Strict):
    container_port: Port
    name: Annotated[Name, StringConstraints(max_length=15)]


class Resources(Strict):
    requests: dict[Literal["cpu", "memory", "ephemeral-storage"], Quantity]
    limits: dict[Literal["cpu", "memory", "ephemeral-storage"], Quantity]


class HttpGet(Strict):
    path: Annotated[str, StringConstraints(pattern=r"^/")]
    port: Port


class Probe(Strict):
    http_get: HttpGet
    initial_delay_seconds: Annotated[int, Field(ge=0)]
    period_seconds: Annotated[int, Field(ge=1)]
    timeout_seconds: Annotated[int, Field(ge=1)]
    failure_threshold: Annotated[int, Field(ge=1)]


class Profile(Strict):
    type: Literal["RuntimeDefault", "Unconfined"]


class Capabilities(Strict):
    add: list[str] = []
    drop: list[str] = []


class ContainerSecurity(Strict):
    allow_privilege_escalation: bool
    capabilities: Capabilities
    seccomp_profile: Profile
    app_armor_profile: Profile | None = None
    proc_mount: Literal["Default", "Unmasked"] = "Default"


class PodSecurity(Strict):
    run_as_non_root: bool
    run_as_user: Annotated[int, Field(ge=1)]
    run_as_group: Annotated[int, Field(ge=1)]
    fs_group: Annotated[int, Field(ge=1)]


class Mount(Strict):
    name: Name
    mount_path: Annotated[str, StringConstraints(pattern=r"^/")]
    read_only: bool = False


class Volume(Strict):
    name: Name
    config_map: Ref


class Container(Strict):
    name: Name
    image: Annotated[str, StringConstraints(pattern=r"^[^:@\s]+(:[\w.-]+|@sha256:[0-9a-f]{64})$")]
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"]
    ports: list[ContainerPort] = []
    env: list[Variable] = []
    env_from: list[EnvFrom] = []
    resources: Resources
    readiness_probe: Probe
    security_context: ContainerSecurity
    volume_mounts: list[Mount] = []


class PodSpec(Strict):
    termination_grace_period_seconds: Annotated[int, Field(ge=0)]
    automount_service_account_token: bool
    host_users: bool = True
    security_context: PodSecurity
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []

    @model_validator(mode="after")
    def mounts_are_there(self) -> PodSpec:
        known = {volume.name for volume in self.volumes}
        for container in self.containers:
            if unknown := {mount.name for mount in container.volume_mounts} - known:
                raise ValueError(f"{container.name} mounts {unknown}, which is no volume of the pod")
            if container.security_context.proc_mount == "Unmasked" and self.host_users:
                raise ValueError(f"{container.name}: Kubernetes takes procMount Unmasked with hostUsers false only")
        return self


class PodTemplate(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(Strict):
    group_name: Name
    replicas: Annotated[int, Field(ge=0)]
    min_replicas: Annotated[int, Field(ge=0)]
    max_replicas: Annotated[int, Field(ge=0)]
    ray_start_params: dict[str, str]
    template: PodTemplate


class AuthOptions(Strict):
    mode: Literal["disabled", "token"]
    secret_name: Name


class RayClusterSpec(Strict):
    ray_version: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
    auth_options: AuthOptions | None = None
    head_group_spec: HeadGroup
    worker_group_specs: Annotated[list[WorkerGroup], Field(min_length=1)]


class Metadata(Strict):
    name: Name
    labels: dict[str, str] = {}


class RayCluster(Strict):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class RayJobSpec(Strict):
    entrypoint: Annotated[str, StringConstraints(min_length=1)]
    backoff_limit: Annotated[int, Field(ge=0)]
    submission_mode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)]
    active_deadline_seconds: Annotated[int, Field(gt=0)]
    ray_cluster_spec: RayClusterSpec


class RayJob(Strict):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class Instruction(BaseModel):
    """One instruction of a Dockerfile."""

    name: str
    text: str


_KNOWN = frozenset(["FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV", "LABEL", "ENTRYPOINT", "CMD"])


def dockerfile(text: str) -> list[Instruction]:
    """The instructions, continuations joined and comments left out. Raises ValueError for what is none."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name not in _KNOWN or not rest:
            raise ValueError(f"no instruction that is used here: {line!r}")
        found.append(Instruction(name=name, text=rest))
    return found
