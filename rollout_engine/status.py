"""Where a run stands, as one document: made by its driver about every second, read by people's other terminals.

It is data from a file that anybody may have written: bounded, checked, and never more than data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rollout_engine.errors import InputError, describe

FORMAT = 1
"""A reader refuses a higher one; fields that it does not know it leaves out."""
MAX_STATUS_BYTES = 512 * 1024
MAX_HOSTS = 256
MAX_MODELS = 64
MAX_SLOWEST = 10
MAX_ERRORS = 20
MAX_NOTES = 20
MAX_TEXT_CHARS = 400

RunState: TypeAlias = Literal["running", "draining", "behind", "ended"]
"""behind: nothing is started because a consumer or the disk is behind."""
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class HostStatus(_Part):
    """One host, as it said about a second ago."""

    host_id: Text
    node: Text = ""
    """Its machine; empty until the host has said so."""
    pid: Count = 0
    slots: Count = 0
    held: Count = 0
    """Rollouts that it was granted and that have no row yet."""
    running: Count = 0
    heard_s: Amount = 0.0
    """Seconds since its last reply."""
    draining: bool = False
    loop_lag_s: Amount = 0.0


class ModelStatus(_Part):
    """One model, or judge, over all hosts."""

    name: Text
    in_flight: Count = 0
    """Calls between permit and answer."""
    waiting: Count = 0
    """Calls that wait for a permit or a request rate."""
    limit: Count | None = None
    """Calls in flight that the run allows now; None: no limit."""
    limit_per_s: Amount | None = None
    """Calls begun per second that the run allows now; None: no limit."""
    adaptive: bool = False
    """These limits are being found out (`max_concurrency = "auto"`)."""
    judge: bool = False
    """It is asked by verifiers; tokens, cost and breaker are those of the run's own models alone."""
    calls: Count = 0
    rate_limited: Count = 0
    """Answers 429 so far."""
    retries: Count = 0
    tokens: Count = 0
    tokens_per_s: Amount = 0.0
    """Over the last half minute."""
    cost_usd: Amount = 0.0
    breaker: Literal["closed", "open", "half_open", "dead"] = "closed"
    breaker_kind: Text = ""
    """The failure that opened it."""


class SlowStatus(_Part):
    """One of the rollouts that have been held longest."""

    rollout: Text
    """model/attempt/task_id."""
    host_id: Text
    phase: Text
    waits_for: Text
    since_s: Amount
    """For how long it has waited for that."""
    age_s: Amount
    """Seconds since it was planned."""


class ErrorStatus(_Part):
    """Rows without a score, by what failed."""

    kind: Text
    """boundary:type."""
    count: Count
    example: Text = ""
    rollout: Text = ""
    """Whose message the example is: its rollout_id."""


class ProgressStatus(_Part):
    total: Count | None = None
    before: Count = 0
    done: Count = 0
    queued: Count = 0
    running: Count = 0
    valid: Count = 0
    failed: Count = 0
    verifier_errors: Count = 0
    cancelled: Count = 0
    retries: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cost_usd: Amount = 0.0
    elapsed_s: Amount = 0.0
    rate: Amount = 0.0
    """Rollouts a second since the driver's start."""
    rate_now: Amount = 0.0
    """Over the last half minute."""
    eta_s: Amount | None = None


class Status(_Part):
    """The content of status.json."""

    format: Annotated[int, Field(ge=1, le=FORMAT)] = FORMAT
    run_id: Text
    epoch: Count
    written_at: Amount
    """Wall clock, seconds since 1970."""
    state: RunState
    progress: ProgressStatus
    hosts: Annotated[tuple[HostStatus, ...], Field(max_length=MAX_HOSTS)] = ()
    more_hosts: Count = 0
    """Hosts that did not fit."""
    models: Annotated[tuple[ModelStatus, ...], Field(max_length=MAX_MODELS)] = ()
    phases: Annotated[Mapping[Text, Count], Field(max_length=16)] = {}
    slowest: Annotated[tuple[SlowStatus, ...], Field(max_length=MAX_SLOWEST)] = ()
    errors: Annotated[tuple[ErrorStatus, ...], Field(max_length=MAX_ERRORS)] = ()
    notes: Annotated[tuple[Text, ...], Field(max_length=MAX_NOTES)] = ()

    def encoded(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class _Head(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format: int = 0


def parse_status(raw: bytes, where: str) -> Status:
    """Raises InputError where it is not what this version's driver writes."""
    fix = "it is no part of the results: remove it, and the run's driver writes another one within seconds"
    if len(raw) > MAX_STATUS_BYTES:
        raise InputError(f"is larger than {MAX_STATUS_BYTES} bytes: no driver wrote it", where=where, fix=fix)
    try:
        head = _Head.model_validate_json(raw)
        if head.format > FORMAT:
            raise InputError(
                f"has format {head.format}, this version reads {FORMAT}",
                where=where,
                fix="look at it with the version of rollout-engine that runs it",
            )
        return Status.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        finding = f"{place}: {first['msg']}" if place else describe(ValueError(first["msg"]))
        raise InputError(f"is no status of a run: {finding[:MAX_TEXT_CHARS]}", where=where, fix=fix) from error


def short(text: str) -> str:
    """Text as it goes into a status: bounded, and fit for JSON."""
    clipped = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
    return clipped.encode("utf-8", "replace").decode()
