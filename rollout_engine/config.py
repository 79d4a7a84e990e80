"""Every knob on one page. Frozen, strict about unknown fields, each with its unit and its default.

Read from TOML (`rollout run --config run.toml`), from `-m` and other flags, or built in Python; see options.py.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from rollout_engine.errors import InputError
from rollout_engine.specs import EnvironmentSpec, Spec

OwnName = Annotated[str, StringConstraints(pattern=r"^[\w.]+:[\w.]+$")]
"""`module:attribute` of something of the user's own."""
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class ModelSpec(Spec):
    """One model of a run. `kind` picks the client; the fields of other kinds stay empty."""

    name: ModelName
    kind: Literal["openai", "replay", "scripted"] | OwnName
    """openai | replay | scripted, or `module:attribute` of your own client factory."""
    model: str | None = None
    """openai: the model's name at its server."""
    base_url: str | None = None
    """openai: the server's URL up to and including /v1."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None: OPENAI_API_KEY where set, else no key is sent."""
    file: str | None = None
    """replay: a JSONL or Parquet file of answers, or an earlier run directory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """scripted: skill, latency_ms, faults, ... (see models/scripted.py); own kinds: whatever they take."""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    """Completion tokens of one call."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    """Ask for logprobs and, from servers that have them, token ids."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request body."""
    seed_header: bool = False
    """openai: send the `x-rollout-seed` header; only for servers made by `rollout serve-model`."""
    price_prompt: float | None = Field(default=None, ge=0)
    """USD per million prompt tokens."""
    price_completion: float | None = Field(default=None, ge=0)
    """USD per million completion tokens."""
    max_concurrency: int | None = Field(default=None, gt=0)
    """Calls in flight at the server, over the whole cluster; None: bounded by the rollouts in flight."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Calls started per minute, over the whole cluster."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """One try of one call, from request to the end of the answer."""
    connect_timeout_s: float = Field(default=20.0, gt=0)
    call_retries: int = Field(default=4, ge=0, le=20)
    """Tries after the first for 429, 5xx and connection errors."""
    max_response_bytes: int = Field(default=32 * 2**20, gt=0)


class RunLimits(Spec):
    """Limits of one rollout where its task sets none."""

    max_turns: int = Field(default=30, gt=0)
    max_tokens: int = Field(default=1_000_000, gt=0)
    """Completion tokens over all turns of a rollout."""
    max_output_bytes: int = Field(default=64 * 1024, gt=0)
    """Bytes of one command's output that the agent sees."""
    queue_s: float = Field(default=600.0, gt=0)
    """Allowance for waiting in the host's queues, part of the whole-rollout deadline."""
    start_s: float = Field(default=300.0, gt=0)
    agent_s: float = Field(default=1800.0, gt=0)
    verify_s: float = Field(default=300.0, gt=0)
    close_s: float = Field(default=30.0, gt=0)

    @property
    def deadline_s(self) -> float:
        """The whole-rollout deadline: the sum of the phase limits and the queueing allowance."""
        return self.queue_s + self.start_s + self.agent_s + self.verify_s + self.close_s


class HostSpec(Spec):
    """How many rollouts a host holds, in which phase, and how long it lives without its driver."""

    slots: int = Field(default=256, gt=0)
    """Rollouts between their start and the end of their agent."""
    starting: int = Field(default=64, gt=0)
    """Sandboxes being started at once."""
    verifying: int = Field(default=64, gt=0)
    """Verifications at once."""
    prefetch: float = Field(default=0.5, ge=0, le=4)
    """Rollouts queued on the host beyond its slots, as a part of them: hides the driver's round trip."""
    lease_s: float = Field(default=120.0, gt=0)
    """A host that has not heard from its driver for this long cancels its rollouts and cleans up."""
    max_batch_rows: int = Field(default=1024, gt=0)
    max_batch_bytes: int = Field(default=4 * 2**20, gt=0)
    max_unacked_bytes: int = Field(default=256 * 2**20, gt=0)
    """Finished rows that wait for their commit; above it the host starts nothing."""


class StoreSpec(Spec):
    """How rows reach the disk."""

    segment_bytes: int = Field(default=256 * 2**20, gt=0)
    """A log segment is closed above this size."""
    inline_trace_bytes: int = Field(default=64 * 1024, gt=0)
    """Turns larger than this go to a trace file where hosts can reach the run directory."""
    live_tables_s: float = Field(default=10.0, ge=1)
    """groups.parquet and rewards.parquet are rewritten at most this often while the run goes on."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """The driver renews its epoch this often; one that is 6 times older is taken for dead."""
    max_unread_rows: int = Field(default=20_000, gt=0)
    """Committed rows that a consumer has not read; above it nothing is granted."""
    max_unread_bytes: int = Field(default=256 * 2**20, gt=0)
    max_uncommitted_bytes: int = Field(default=256 * 2**20, gt=0)
    """Rows received and not yet synced; above it nothing is granted."""


class RetrySpec(Spec):
    """What the scheduler does about infrastructure failures."""

    max_retries: int = Field(default=2, ge=0)
    """Fresh starts of an attempt after a retryable failure."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the first fresh start; doubles, with jitter, up to backoff_max_s."""
    backoff_max_s: float = Field(default=60.0, ge=0)
    max_host_losses: int = Field(default=3, ge=0)
    """How often an attempt is planned again because its host was lost."""
    breaker_failures: int = Field(default=20, ge=0)
    """Consecutive failures of one kind that pause a model; 0: never."""
    breaker_pause_s: float = Field(default=5.0, ge=0)
    """Pause before one rollout is tried again; doubles with each trip."""
    breaker_trips: int = Field(default=3, gt=0)
    """Trips without a success in between after which the model's remaining rollouts are failed."""


class RewardSpec(Spec):
    """How scores become rewards: the formula and its sources are in docs/rewards.md."""

    ordered: bool = True
    """Models are given strongest first."""
    policy: str | None = None
    """Whose learnability counts; None: the weakest (last) model."""
    w_learnability: float = 4.0
    alpha: float = 0.25
    """Weight of separation."""
    pass_threshold: float = 1.0
    """A score at or above it is a pass where the verifier does not say."""
    min_coverage: float = Field(default=0.5, ge=0, le=1)
    """Valid part of a group below which its estimates are null."""
    max_verifier_error_rate: float = Field(default=0.0, ge=0, le=1)
    """Verifier errors of a group above which its rewards are null."""
    confidence: float = Field(default=0.95, gt=0, lt=1)


class RunConfig(Spec):
    """One run: what is asked of whom, how often, where, and within which limits."""

    models: tuple[ModelSpec, ...] = ()
    """Strongest first (unless rewards.ordered is false)."""
    k: int = Field(default=1, gt=0, le=100_000)
    """Attempts of each task by each model."""
    seed: int = 0
    """Seeds scripted models and the run's own random choices."""
    agent: str = "single_turn"
    """single_turn, tool_loop, or `module:attribute` of your own."""
    agent_options: dict[str, Any] = Field(default_factory=dict)
    sandbox: Literal["auto", "namespace", "docker", "local", "none"] | OwnName = "auto"
    """auto: namespace, then docker, then local for trusted tasks; none: tasks that need one are refused."""
    trusted_code: tuple[str, ...] = ()
    """Shell patterns of the `module:attribute` that *tasks* may name (own verifiers, function tools): such code runs
    with the hosts' rights, so a task file from elsewhere gets none."""
    environments: dict[str, EnvironmentSpec] = Field(default_factory=dict)
    """Named environments for `env_key`; `name:version` is looked up first as it is, then as `name`."""
    ray: str = "auto"
    """auto | local | off | ADDRESS. auto: an initialised Ray, RAY_ADDRESS or a job's; else a local one."""
    hosts_per_node: int = Field(default=1, gt=0)
    max_cost_usd: float | None = Field(default=None, ge=0)
    """Nothing is started once the committed rows cost this much."""
    no_progress_s: float | None = Field(default=None, gt=0)
    """A run in which nothing ends for this long is ended; None: the whole-rollout deadline and a minute."""
    plan_ahead: int = Field(default=4096, gt=0)
    """Rollouts planned beyond those that fit the hosts."""
    limits: RunLimits = RunLimits()
    host: HostSpec = HostSpec()
    store: StoreSpec = StoreSpec()
    retry: RetrySpec = RetrySpec()
    rewards: RewardSpec = RewardSpec()

    @field_validator("models", mode="before")
    @classmethod
    def _named(cls, models: Any) -> Any:
        if isinstance(models, dict):
            return [{"name": name, **(fields if isinstance(fields, dict) else {})} for name, fields in models.items()]
        return models

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        names = [model.name for model in self.models]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two models are named {doubled[0]!r}")
        if self.rewards.policy is not None and names and self.rewards.policy not in names:
            raise ValueError(f"rewards.policy {self.rewards.policy!r} is none of the models {names}")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)

    def environment(self, env_key: str) -> EnvironmentSpec:
        """The environment that a task's env_key names. Raises InputError."""
        for key in (env_key, re.sub(r":[^:]*$", "", env_key)):
            if key in self.environments:
                return self.environments[key]
        known = ", ".join(sorted(self.environments)) or "none"
        raise InputError(
            f"env_key {env_key!r} names no environment (known: {known})",
            fix=f"add [environments.{env_key}] to the config",
        )


def api_keys(models: tuple[ModelSpec, ...]) -> dict[str, str]:
    """Model name -> key, read from the environment variables that the models name. Raises InputError."""
    keys: dict[str, str] = {}
    for model in models:
        variable = model.api_key_env or "OPENAI_API_KEY"
        key = os.environ.get(variable)
        if model.kind == "openai" and key:
            keys[model.name] = key
        elif model.api_key_env is not None:
            raise InputError(
                f"environment variable {variable} is not set",
                where=f"models.{model.name}.api_key_env",
                fix=f"export {variable}=... or name another variable with -m {model.name}.api_key_env=NAME",
            )
    return keys
