"""Whatever crosses the wire to a host or back survives pickle: specs, requests, replies with rows, plans, all errors.

One test: .venv/bin/pytest tests/test_pickle.py -k errors
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import pyarrow as pa
import pytest

from rollout_engine import errors, exchange, types
from rollout_engine.config import RunConfig
from rollout_engine.errors import ExecTimeout, HostLost, InputError, LimitReached, ModelRateLimited, failure_of
from rollout_engine.exchange import Demand, HostLimits, Lease, Reply, Request, Traffic
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.models.local import Answer, Play
from rollout_engine.sandboxes.base import JobStatus, SandboxSpec
from rollout_engine.schema import records_to_batch
from rollout_engine.specs import Task
from rollout_engine.types import (
    CallContext,
    Completion,
    Delta,
    ExecResult,
    Failure,
    KeySpace,
    RolloutRecord,
    RolloutSpec,
    Sampling,
    Score,
    StopReason,
    ToolPiece,
    ToolSpec,
    Trajectory,
    Turn,
    Usage,
)
from tests.helpers import make_config, make_plan, make_tasks, scripted

SPEC = RolloutSpec(7, 0, "t/ä", "digest", "m", 2, 1, 0, 1.5)
COMPLETION = Completion({"role": "assistant", "content": "42"}, "stop", Usage(1, 2, 3), [1], [2], [-0.5], "step-1", 0.1)
TURN = Turn(0, [{"role": "user", "content": "q"}, COMPLETION.message], COMPLETION)
RECORD = RolloutRecord(7, 0, "t", "m", 2, status="completed", score=1.0, score_components={"a": 0.5}, turns=[TURN])
LIMITS = HostLimits({"m": Lease(3, 1.5)}, 0.1, 2.0, True)

VALUES: list[Any] = [
    KeySpace(2, 3),
    SPEC,
    Failure(types.Boundary.MODEL, "ModelTimeout", "late", True),
    Usage(1, 2, 3),
    ToolSpec("shell", "runs", {"type": "object"}),
    Sampling(0.5, 0.9, 10, 1, ("\n",), True, {"top_k": 5}),
    CallContext(0, 1, "t", "m", 2, 3, "42"),
    COMPLETION,
    ToolPiece(0, "{}", "call-0", "shell", {"extra": 1}),
    Delta("4", COMPLETION),
    TURN,
    Trajectory((TURN,), "42"),
    Score(0.5, True, {"style": 0.5}),
    ExecResult(-9, b"out", b"err", True, True, 1.5),
    RECORD,
    Lease(-1, -1.0),
    Traffic(3, 1, 0.7, 90.0, 4),
    Demand(1, 2, 0.5, traffic=Traffic(3, 1, 0.7, 90.0, 4)),
    LIMITS,
    Request(1, 2, 3, (SPEC,), {"digest": b"{}"}, (7,), 4, 5, LIMITS, True),
    SandboxSpec(image="busybox", layers=("a",), env={"A": "b"}, label="t"),
    JobStatus(0, b"out", b"err"),
    Answer({"role": "assistant", "content": "42"}),
    Play(Answer({"role": "assistant", "content": "42"}), 0.5),
    next(make_tasks(1)),
    Task(prompt=[{"role": "user", "content": "q"}], verifier_code="def verify(): ...", environment={"image": "x"}),
    make_config(scripted(), k=3, environments={"e": {"image": "x"}}),
    HostPlan("run", 1, "host-0", "node", make_config(), "/runs/a"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_wire_type_comes_back_as_it_went(value: Any, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(value, protocol))
    assert type(back) is type(value)
    assert back == value


def test_no_value_type_is_forgotten_here() -> None:
    """A new dataclass or tuple of types.py and exchange.py has its line above."""
    named = {type(value) for value in VALUES} | {Reply}
    for module in (types, exchange):
        for name, found in inspect.getmembers(module, inspect.isclass):
            mine = found.__module__ == module.__name__
            if mine and (is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))):
                assert found in named, name


def test_a_reply_comes_back_with_its_rows() -> None:
    batch = records_to_batch([RECORD] * 3)
    batches = ((4, batch), (5, batch.slice(1, 1)))
    reply = Reply(batches, 9, 3, 77, (7, 8), ("digest",), 2, {"m": Demand(1, 2, 0.5)}, 5, {"cpu_s": 1.0})
    back = pickle.loads(pickle.dumps(reply))
    assert list(back.batches) == list(batches)
    assert {rows.schema for _, rows in back.batches} == {batch.schema}
    for field in fields(Reply):
        if field.name != "batches":
            assert getattr(back, field.name) == getattr(reply, field.name)


def test_a_piece_of_a_batch_does_not_bring_the_whole_along() -> None:
    batch = records_to_batch([RECORD] * 5000)
    assert len(pickle.dumps(batch.take(pa.array([1, 2])))) < len(pickle.dumps(batch)) / 100


def test_a_real_hosts_reply_to_a_pickled_request_can_be_pickled() -> None:
    async def scenario() -> None:
        host = Host(pickle.loads(pickle.dumps(make_plan(make_config()))))
        await host.open()
        request = pickle.loads(pickle.dumps(Request(1, 1, limits=HostLimits(wait_s=0.0))))
        reply = await host.exchange(request)
        assert pickle.loads(pickle.dumps(reply)).free_slots == reply.free_slots
        await host.close()

    asyncio.run(scenario())


ERRORS = [
    (kind, arguments)
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RolloutEngineError)
    for arguments in ((), ("said what",))
    if arguments or kind is not InputError
]


@pytest.mark.parametrize(("kind", "arguments"), ERRORS)
def test_all_errors_come_back_as_what_they_were(kind: type[Exception], arguments: tuple[str, ...]) -> None:
    if kind is LimitReached:
        arguments = ()
    error = kind(*arguments)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
    assert failure_of(back) == failure_of(error)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (InputError("wrong", "tasks.jsonl:3", "correct it"), "fix"),
        (LimitReached(StopReason.MAX_TURNS), "reason"),
        (ModelRateLimited("429", 2.5), "retry_after_s"),
        (HostLost("gone", process_gone=True), "process_gone"),
        (ExecTimeout("late", ExecResult(-9, b"partial")), "partial"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_error_carries_comes_along(error: Exception, field: str) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert getattr(back, field) == getattr(error, field)
    assert str(back) == str(error)


def test_a_config_of_every_field_comes_back(tmp_path: Any) -> None:
    config = make_config({**scripted(), "stop": ["x"], "extra_body": {"a": [1]}}, limits={"agent_s": 1.5}, seed=3)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config == pickle.loads(pickle.dumps(config))
