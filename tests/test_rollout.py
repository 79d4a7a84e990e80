"""How a rollout may end: every line of DESIGN's table that needs no isolation, with real servers and sandboxes.

One test: .venv/bin/pytest tests/test_rollout.py -k prefix
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.config import ModelSpec
from rollout_engine.errors import (
    LimitReached,
    ModelRefused,
    SandboxAway,
    SandboxDied,
    SandboxError,
    SandboxStartError,
    VerifierError,
)
from rollout_engine.models.retry import MAX_REFUSALS
from rollout_engine.models.server import ModelServer
from rollout_engine.rollout import Rollout
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.schema import batch_to_records, records_to_batch
from rollout_engine.specs import Task
from rollout_engine.types import Isolation, RolloutRecord, Score, StopReason, Trajectory, Turn
from tests.helpers import make_config, scripted
from tests.rig import answer, bench, chat_server, served, task_of

FOREVER = 60.0

# -- agents and verifiers that a user might write, named as tests.test_rollout:... -----------------------------------


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message for you")


RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("a bug of the agent"),
    "TimeoutError": lambda: TimeoutError("its own, not ours"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("x")]),
    "RecursionError": RecursionError,
    "UnprintableError": UnprintableError,
    "UnicodeError": lambda: UnicodeError("a lone surrogate: \ud83d"),
}


class Talker:
    """Asks `turns` times and then ends as told: a stop reason, or an error of RAISED."""

    def __init__(self, turns: int = 1, ending: str = "finished") -> None:
        self._turns, self._ending = turns, ending

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        new = task.messages()
        asked = list(new)
        for index in range(self._turns):
            completion = await model.complete(asked)
            on_turn(Turn(index, [*new, completion.message], completion))
            new = [{"role": "user", "content": "Go on."}]
            asked += [completion.message, *new]
        if self._ending in RAISED:
            raise RAISED[self._ending]()
        if self._ending == "hang":
            await asyncio.Event().wait()
        if self._ending == "limit":
            raise LimitReached(StopReason.MAX_TURNS)
        if self._ending == "refused":
            raise ModelRefused("withheld")
        if self._ending == "sandbox":
            raise SandboxDied("the box is gone")
        return StopReason(self._ending)


class Odd:
    """Records what is no turn, or what no table can hold."""

    def __init__(self, what: str) -> None:
        self._what = what

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        completion = await model.complete(task.messages())
        odd: Any = {"no turn": {"index": 0}, "none": None}.get(self._what)
        on_turn(odd)
        on_turn(Turn(0, [completion.message], completion))
        return StopReason.FINISHED


class Typist:
    """Works in its sandbox: writes the answer into a file, and says what it read back."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        assert sandbox is not None
        completion = await model.complete(task.messages())
        await sandbox.write_file("answer.txt", str(completion.message["content"]).encode())
        result = await sandbox.exec(["cat", "answer.txt", "given.txt"])
        said = {**completion.message, "content": result.stdout.decode()}
        on_turn(Turn(0, [*task.messages(), said], replace(completion, message=said)))
        return StopReason.FINISHED


class Judge:
    """A verifier that does as its spec says."""

    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0) -> None:
        self._do = spec["do"]

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        do = self._do
        if do in RAISED:
            raise RAISED[do]()
        if do == "hang":
            await asyncio.Event().wait()
        if do == "limit":
            raise LimitReached(StopReason.MAX_TURNS)
        if do == "verifier error":
            raise VerifierError("no finding")
        if do == "dead sandbox":
            raise SandboxDied("the box is gone")
        if do == "prefix":
            return Score(float(len(trajectory.turns)), components={"turns": float(len(trajectory.turns))})
        returned: dict[str, Any] = {
            "nan": Score(float("nan")),
            "inf": Score(float("-inf")),
            "none": None,
            "number": 1.0,
            "text": Score("good"),  # type: ignore[arg-type]
            "components": Score(1.0, components={"style": "good"}),  # type: ignore[dict-item]
            "nan component": Score(1.0, components={"style": float("nan")}),
            "list of components": Score(1.0, components=[1.0]),  # type: ignore[arg-type]
            "passed": Score(1.0, passed="yes"),  # type: ignore[arg-type]
            "half": Score(0.5, components={"style": 0.25}),
        }
        return returned[do]


def judged(do: str, **fields: Any) -> Task:
    return task_of(verifier={"type": "tests.test_rollout:Judge", "do": do}, **fields)


def talking(**options: Any) -> dict[str, Any]:
    return {"agent": "tests.test_rollout:Talker", "agent_options": options}


def in_local(**fields: Any) -> Task:
    """A task with a sandbox."""
    return task_of(environment={"trusted": True}, **fields)


def storable(record: RolloutRecord) -> RolloutRecord:
    """The record as the log gives it back; fails where a row cannot be stored."""
    return batch_to_records(records_to_batch([record]))[0]


def assert_failed(record: RolloutRecord, boundary: str, kind: str, *, retryable: bool) -> None:
    """One row that says which wall was crossed, and has no score."""
    row = storable(record)
    found = (row.status, row.failure_boundary, row.failure_type, row.retryable)
    assert found == ("failed", boundary, kind, retryable), row.failure_message
    assert row.score is None
    assert row.passed is None
    assert row.failure_message


def assert_no_finding(record: RolloutRecord, status: str = "completed") -> None:
    """The verifier came to nothing: the agent's ending stays, the score is null, and the boundary says whose it was."""
    row = storable(record)
    assert (row.status, row.failure_boundary, row.score, row.passed) == (status, "verifier", None, None)
    assert row.score_components == {}
    assert row.failure_message


# -- the agent ends --------------------------------------------------------------------------------------------------


async def test_a_finished_agent_is_completed_and_verified() -> None:
    async with bench(make_config()) as rig:
        record = await rig.run()
    assert (record.status, record.stop_reason, record.score, record.passed) == ("completed", "finished", 1.0, True)
    assert (record.final_answer, record.num_turns, record.verifier_isolation) == ("42", 1, "pure")
    assert record.failure_boundary is record.failure_type is record.failure_message is record.retryable is None


async def test_a_wrong_answer_is_completed_with_score_zero_and_not_null() -> None:
    async with bench(make_config(scripted(skill=0.0))) as rig:
        record = await rig.run()
    assert (record.status, record.score, record.passed) == ("completed", 0.0, False)
    assert record.failure_boundary is None


async def test_an_answer_cut_at_its_token_limit_is_truncated_and_verified() -> None:
    async def cut(request: web.Request) -> web.Response:
        return answer("42", finish="length")

    async with chat_server(cut) as url, bench(make_config(served(url))) as rig:
        record = await rig.run()
    assert (record.status, record.stop_reason, record.score) == ("truncated", "max_tokens", 1.0)


@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason is not StopReason.FINISHED])
async def test_every_limit_of_the_agent_truncates_and_its_prefix_is_verified(reason: StopReason) -> None:
    async with bench(make_config(**talking(turns=2, ending=reason.value))) as rig:
        record = await rig.run(judged("prefix"))
    assert (record.status, record.stop_reason, record.score, record.num_turns) == ("truncated", reason.value, 2.0, 2)
    assert record.score_components == {"turns": 2.0}


async def test_a_limit_that_an_agent_raises_truncates_too() -> None:
    async with bench(make_config(**talking(turns=3, ending="limit"))) as rig:
        record = await rig.run(judged("prefix"))
    assert (record.status, record.stop_reason, record.score) == ("truncated", "max_turns", 3.0)


async def test_an_agent_out_of_time_is_truncated_and_its_prefix_is_verified() -> None:
    config = make_config(limits={"agent_s": 1.0}, **talking(turns=2, ending="hang"))
    async with bench(config) as rig:
        record = await rig.run(judged("prefix"))
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 2.0)
    assert 0.99 < record.agent_s < 20


async def test_a_model_that_hangs_in_a_later_turn_leaves_the_prefix() -> None:
    calls = 0

    async def slow_second(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls > 1:
            await asyncio.sleep(FOREVER)
        return answer("42")

    config_of = {"limits": {"agent_s": 2.0}, **talking(turns=5)}
    async with chat_server(slow_second) as url, bench(make_config(served(url), **config_of)) as rig:
        record = await rig.run(judged("prefix"))
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 1.0)
    assert record.final_answer == "42"


async def test_a_context_overflow_is_truncated_and_its_prefix_is_verified() -> None:
    async def full(request: web.Request) -> web.Response:
        if len((await request.json())["messages"]) > 1:
            error = {"message": "maximum context length is 8 tokens", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        return answer("42")

    async with chat_server(full) as url, bench(make_config(served(url), **talking(turns=4))) as rig:
        record = await rig.run()
    assert (record.status, record.stop_reason, record.score) == ("truncated", "context_overflow", 1.0)
    assert (record.num_turns, record.final_answer) == (1, "42")


async def test_a_prompt_that_never_fitted_is_truncated_without_an_answer() -> None:
    async def full(request: web.Request) -> web.Response:
        error = {"message": "maximum context length is 8 tokens", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    async with chat_server(full) as url, bench(make_config(served(url))) as rig:
        record = await rig.run()
    assert (record.status, record.stop_reason, record.score) == ("truncated", "context_overflow", 0.0)
    assert (record.num_turns, record.final_answer) == (0, None)


# -- the agent breaks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("turns", [0, 1])
async def test_whatever_an_agent_raises_fails_its_rollout_alone(kind: str, turns: int) -> None:
    async with bench(make_config(**talking(turns=turns, ending=kind))) as rig:
        record = await rig.run()
    assert_failed(record, "agent", kind, retryable=True)
    assert record.num_turns == turns


@pytest.mark.parametrize(
    ("ending", "boundary", "kind", "retryable"),
    [("refused", "model", "ModelRefused", False), ("sandbox", "sandbox", "SandboxDied", True)],
)
async def test_an_infrastructure_fault_that_an_agent_meets_keeps_its_own_boundary(
    ending: str, boundary: str, kind: str, retryable: bool
) -> None:
    async with bench(make_config(**talking(ending=ending))) as rig:
        record = await rig.run()
    assert_failed(record, boundary, kind, retryable=retryable)


async def test_an_agent_that_returns_no_stop_reason_fails_with_its_type_named() -> None:
    async with bench(make_config(agent="tests.test_rollout:Mute")) as rig:
        record = await rig.run()
    assert_failed(record, "agent", "TypeError", retryable=True)
    assert "StopReason" in (record.failure_message or "")


class Mute:
    async def run(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("what", ["no turn", "none"])
async def test_a_turn_that_is_none_fails_the_rollout_where_it_happens(what: str) -> None:
    async with bench(make_config(agent="tests.test_rollout:Odd", agent_options={"what": what})) as rig:
        record = await rig.run()
    assert_failed(record, "agent", "TypeError", retryable=True)
    assert record.turns == []


# -- the verifier ----------------------------------------------------------------------------------------------------

NO_FINDING = [
    *RAISED,
    "nan",
    "inf",
    "none",
    "number",
    "text",
    "components",
    "nan component",
    "list of components",
    "passed",
    "limit",
    "verifier error",
]


@pytest.mark.parametrize("do", NO_FINDING)
async def test_a_verifier_without_a_finding_leaves_a_null_score_and_the_agents_ending(do: str) -> None:
    async with bench(make_config()) as rig:
        assert_no_finding(await rig.run(judged(do)))


async def test_a_verifier_without_a_finding_leaves_a_truncated_rollout_truncated() -> None:
    async with bench(make_config(**talking(ending="max_turns"))) as rig:
        record = await rig.run(judged("ValueError"))
    assert_no_finding(record, "truncated")
    assert record.stop_reason == "max_turns"


async def test_a_verifier_that_hangs_meets_its_limit() -> None:
    async with bench(make_config(limits={"verify_s": 0.05})) as rig:
        record = await rig.run(judged("hang"))
    assert_no_finding(record)
    assert record.failure_type == "VerifierTimeout"
    assert 0.04 < record.verify_s < 20


@pytest.mark.parametrize("do", ["ValueError", "SystemExit", "nan", "hang"])
async def test_a_task_may_declare_that_its_verifiers_errors_count_as_zero(do: str) -> None:
    async with bench(make_config(limits={"verify_s": 0.05})) as rig:
        record = await rig.run(judged(do, on_verifier_error="zero"))
    assert (record.status, record.score, record.passed) == ("completed", 0.0, False)
    assert record.failure_boundary == "verifier"


async def test_an_infrastructure_fault_under_the_verifier_is_no_verifiers_error() -> None:
    async with bench(make_config()) as rig:
        assert_failed(await rig.run(judged("dead sandbox")), "sandbox", "SandboxDied", retryable=True)


@pytest.mark.parametrize(("threshold", "passed"), [(1.0, False), (0.5, True)])
async def test_a_graded_score_passes_at_the_runs_threshold(threshold: float, passed: bool) -> None:
    async with bench(make_config(rewards={"pass_threshold": threshold})) as rig:
        record = await rig.run(judged("half"))
    assert (record.score, record.passed, record.score_components) == (0.5, passed, {"style": 0.25})


# -- the model -------------------------------------------------------------------------------------------------------

MODEL_FAULTS = {
    "p_429": ("ModelRateLimited", True),
    "p_500": ("ModelServerError", True),
    "p_cut": ("ModelConnectionError", True),
    "p_hang": ("ModelTimeout", True),
    "p_garbage": ("ModelBadResponse", True),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
async def test_each_fault_of_a_model_behind_http_is_told_apart(fault: str) -> None:
    options = {fault: 1.0, "retry_after_s": 0.0}
    async with ModelServer({"m": ModelSpec(name="m", kind="scripted", options=options)}) as server:
        limit_s = 0.5 if fault == "p_hang" else 60.0
        config = make_config(served(server.url, seed_header=True, call_timeout_s=limit_s))
        async with bench(config) as rig:
            record = await rig.run()
    kind, retryable = MODEL_FAULTS[fault]
    assert_failed(record, "model", kind, retryable=retryable)
    assert record.num_turns == 0


async def test_a_rate_limit_fails_only_once_a_call_has_been_refused_many_times() -> None:
    options = {"p_429": 1.0, "retry_after_s": 0.06}
    async with ModelServer({"m": ModelSpec(name="m", kind="scripted", options=options)}) as server:
        async with bench(make_config(served(server.url, seed_header=True, call_retries=2))) as rig:
            record = await rig.run()
        calls = server.stats()["429"]
    assert_failed(record, "model", "ModelRateLimited", retryable=True)
    assert calls == 1 + MAX_REFUSALS


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (401, {"message": "wrong key"}, "ModelAuthError"),
        (403, {"message": "no access"}, "ModelAuthError"),
        (400, {"message": "bad temperature"}, "ModelRequestError"),
        (404, {"message": "no such model"}, "ModelRequestError"),
        (400, {"message": "no", "code": "content_filter"}, "ModelRefused"),
    ],
)
async def test_a_refused_request_fails_and_is_not_worth_another_try(
    status: int, error: dict[str, str], kind: str
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": error}, status=status)

    async with chat_server(refuse) as url, bench(make_config(served(url))) as rig:
        assert_failed(await rig.run(), "model", kind, retryable=False)


async def test_a_withheld_answer_fails() -> None:
    async def withhold(request: web.Request) -> web.Response:
        return answer("", finish="content_filter")

    async with chat_server(withhold) as url, bench(make_config(served(url))) as rig:
        assert_failed(await rig.run(), "model", "ModelRefused", retryable=False)


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with bench(make_config(served("http://127.0.0.1:9/v1"))) as rig:
        assert_failed(await rig.run(), "model", "ModelConnectionError", retryable=True)


@pytest.mark.parametrize("content", ["", None])
async def test_an_empty_answer_is_an_answer_and_wrong(content: str | None) -> None:
    async def empty(request: web.Request) -> web.Response:
        return answer(content)

    async with chat_server(empty) as url, bench(make_config(served(url))) as rig:
        record = await rig.run()
    assert (record.status, record.score, record.num_turns) == ("completed", 0.0, 1)


async def test_a_model_that_never_answers_fails_although_it_is_the_agents_time_that_is_over() -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(FOREVER)
        return answer()

    async with chat_server(hang) as url, bench(make_config(served(url), limits={"agent_s": 0.1})) as rig:
        assert_failed(await rig.run(), "model", "ModelTimeout", retryable=True)


async def test_a_failure_after_some_turns_keeps_them_and_has_no_score() -> None:
    calls = 0

    async def break_later(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return answer("42") if calls < 3 else web.Response(status=503)

    async with chat_server(break_later) as url, bench(make_config(served(url), **talking(turns=5))) as rig:
        record = await rig.run()
    assert_failed(record, "model", "ModelServerError", retryable=True)
    assert (record.num_turns, record.completion_tokens) == (2, 6)


async def test_a_lone_surrogate_in_an_answer_is_storable() -> None:
    async def odd(request: web.Request) -> web.Response:
        body = rb'{"choices":[{"message":{"role":"assistant","content":"\ud83d 42"},"finish_reason":"stop"}]}'
        return web.Response(body=body, content_type="application/json")

    async with chat_server(odd) as url, bench(make_config(served(url))) as rig:
        assert storable(await rig.run()).final_answer == "? 42"


# -- the whole-rollout deadline ---------------------------------------------------------------------------------------


def assert_late(record: RolloutRecord, phase: str) -> None:
    assert_failed(record, "deadline", "DeadlineError", retryable=True)
    assert f"in phase {phase}" in (record.failure_message or "")


@pytest.mark.parametrize("starting", [0, 1])
async def test_the_deadline_names_the_start_that_it_ended(starting: int, tmp_path: Path) -> None:
    config = make_config(sandbox="local")
    async with bench(config, provider=Slow(tmp_path, open_s=FOREVER), starting=starting) as rig:
        assert_late(await rig.run(in_local(), deadline_s=1.0), "start")


async def test_the_deadline_names_the_setup_that_it_ended() -> None:
    async with bench(make_config(sandbox="local")) as rig:
        assert_late(await rig.run(in_local(setup=["sleep 60"]), deadline_s=2.0), "setup")


@pytest.mark.parametrize("ending", ["hang", "finished"])
async def test_the_deadline_names_the_agent_that_it_ended(ending: str) -> None:
    """Whether the agent works or its model hangs."""
    latency = FOREVER * 1000 if ending == "finished" else 0
    async with bench(make_config(scripted(latency_ms=latency), **talking(ending=ending))) as rig:
        assert_late(await rig.run(deadline_s=1.0), "agent")


@pytest.mark.parametrize("verifying", [0, 1])
async def test_the_deadline_names_the_verification_that_it_ended(verifying: int) -> None:
    async with bench(make_config(), verifying=verifying) as rig:
        record = await rig.run(judged("hang"), deadline_s=1.0)
    assert_late(record, "verify")
    assert record.num_turns == 1


async def test_time_in_the_queue_counts_up_to_its_allowance() -> None:
    config = make_config(limits={"queue_s": 59.0}, **talking(ending="hang"))
    async with bench(config) as rig:
        began = time.monotonic()
        record = await rig.run(deadline_s=60.0, queued_at=time.time() - 3600)
        took = time.monotonic() - began
    assert_late(record, "agent")
    assert record.queue_s > 3000
    assert 0.9 < took < 30


# -- sandboxes --------------------------------------------------------------------------------------------------------


class Slow(LocalProvider):
    """A real provider whose sandboxes take their time to open or to close, or do neither."""

    def __init__(
        self, directory: Path, *, open_s: float = 0.0, close_s: float = 0.0, fault: BaseException | None = None
    ) -> None:
        super().__init__(directory)
        self._open_s, self._close_s, self._fault = open_s, close_s, fault
        self.closed = asyncio.Event()
        self.opened = 0

    async def open(self, spec: SandboxSpec) -> Any:
        await asyncio.sleep(self._open_s)
        if self._fault is not None:
            raise self._fault
        self.opened += 1
        return SlowToClose(await super().open(spec), self._close_s, self.closed)


class SlowToClose:
    def __init__(self, sandbox: Sandbox, close_s: float, closed: asyncio.Event) -> None:
        self._sandbox, self._close_s, self._closed = sandbox, close_s, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def close(self) -> None:
        await asyncio.sleep(self._close_s)
        await self._sandbox.close()
        self._closed.set()


async def test_files_setup_agent_and_answer_in_a_sandbox() -> None:
    task = in_local(files={"given.txt": " apples"}, setup=["printf ' green' >> given.txt"], verifier={**EXACT})
    async with bench(make_config(sandbox="local", agent="tests.test_rollout:Typist")) as rig:
        record = await rig.run(task)
    assert (record.status, record.score, record.final_answer) == ("completed", 1.0, "42 apples green")
    assert (record.sandbox, record.limits_enforced) == ("local", "none")
    assert record.start_s > 0
    assert record.close_s > 0


EXACT = {"type": "match", "compare": "exact", "expected": "42 apples green"}


async def test_a_sandbox_that_cannot_be_made_fails_the_rollout() -> None:
    async with bench(make_config(sandbox="local")) as rig:
        record = await rig.run(task_of(environment={"trusted": True, "image": "busybox"}))
    assert_failed(record, "sandbox", "SandboxUnavailable", retryable=False)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (SandboxStartError("no room"), "SandboxStartError"),
        (OSError("no fork"), "OSError"),
        (SystemExit(1), "SystemExit"),
    ],
)
async def test_whatever_a_provider_raises_is_a_sandbox_failure(fault: BaseException, kind: str, tmp_path: Path) -> None:
    async with bench(make_config(sandbox="local"), provider=Slow(tmp_path, fault=fault)) as rig:
        assert_failed(await rig.run(in_local()), "sandbox", kind, retryable=True)


async def test_a_sandbox_that_does_not_open_in_time_fails_the_rollout(tmp_path: Path) -> None:
    config = make_config(sandbox="local", limits={"start_s": 0.05})
    async with bench(config, provider=Slow(tmp_path, open_s=FOREVER)) as rig:
        record = await rig.run(in_local())
    assert_failed(record, "sandbox", "SandboxStartError", retryable=True)
    assert record.sandbox == "none"


async def test_a_task_with_a_sandbox_in_a_run_without_one_fails_and_says_so() -> None:
    async with bench(make_config(sandbox="none")) as rig:
        assert_failed(await rig.run(in_local()), "sandbox", "SandboxStartError", retryable=True)


async def test_a_failing_setup_command_fails_the_rollout_with_its_output(tmp_path: Path) -> None:
    provider = Slow(tmp_path)
    async with bench(make_config(sandbox="local"), provider=provider) as rig:
        record = await rig.run(in_local(setup=["echo 'no such package' >&2; exit 7"]))
    assert_failed(record, "setup", "SetupError", retryable=False)
    assert "exited with 7" in (record.failure_message or "")
    assert "no such package" in (record.failure_message or "")
    assert provider.closed.is_set()
    assert record.sandbox == "none"


async def test_a_file_that_cannot_be_put_in_place_is_a_setup_failure() -> None:
    async with bench(make_config(sandbox="local")) as rig:
        record = await rig.run(in_local(files={"a": "file", "a/b": "below a file"}))
    row = storable(record)
    assert (row.status, row.failure_boundary, row.score) == ("failed", "setup", None)


class Away(LocalProvider):
    """A real provider that raises each of these faults in turn, once a task is prepared and its agent at work."""

    def __init__(self, directory: Path, *faults: SandboxError) -> None:
        super().__init__(directory)
        self._faults = list(faults)
        self.asked: list[float] = []

    async def open(self, spec: SandboxSpec) -> Any:
        self.asked.append(time.monotonic())
        if len(self.asked) > 2 and self._faults:
            raise self._faults.pop(0)
        return await super().open(spec)


AWAY, DIED = SandboxAway("its daemon is being restarted"), SandboxDied("the box is gone")
IN_A_BOX = {"type": "script", "command": "grep -q 42 answer.txt", "isolation": "fresh"}


async def test_a_verifier_waits_for_a_provider_that_is_away_and_the_agent_does_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_engine.verification.AWAY_PAUSE_S", 0.3)
    provider = Away(tmp_path, AWAY, AWAY)
    async with bench(make_config(sandbox="local", agent="tests.test_rollout:Typist"), provider=provider) as rig:
        record = await rig.run(in_local(files={"given.txt": " apples"}, verifier={**IN_A_BOX}))
    assert (record.status, record.score, record.num_turns) == ("completed", 1.0, 1), record.failure_message
    assert [later - sooner >= 0.3 for sooner, later in pairwise(provider.asked[2:])] == [True, True]


async def test_a_verifier_whose_sandboxes_keep_failing_leaves_no_score(tmp_path: Path) -> None:
    provider = Away(tmp_path, DIED, DIED, DIED)
    async with bench(make_config(sandbox="local", agent="tests.test_rollout:Typist"), provider=provider) as rig:
        record = await rig.run(in_local(files={"given.txt": " apples"}, verifier={**IN_A_BOX}))
    assert_failed(record, "sandbox", "SandboxDied", retryable=True)
    assert len(provider.asked) == 5


async def test_a_setup_that_does_not_end_is_ended_by_the_start_limit(tmp_path: Path) -> None:
    provider = Slow(tmp_path)
    async with bench(make_config(sandbox="local", limits={"start_s": 0.2}), provider=provider) as rig:
        record = await rig.run(in_local(setup=["sleep 60"]))
    assert_failed(record, "sandbox", "SandboxStartError", retryable=True)
    assert provider.closed.is_set()


def left_in(directory: Path) -> list[str]:
    """What is left of sandboxes whose provider still lives."""
    return [path.name for home in directory.iterdir() for path in home.iterdir()]


@pytest.mark.parametrize("ending", ["finished", "ValueError", "SystemExit", "hang"])
async def test_the_sandbox_is_closed_however_the_agent_ends(ending: str, tmp_path: Path) -> None:
    provider = Slow(tmp_path)
    config = make_config(sandbox="local", limits={"agent_s": 0.1}, **talking(ending=ending))
    async with bench(config, provider=provider) as rig:
        await rig.run(in_local())
        assert provider.closed.is_set()
        assert left_in(tmp_path) == []


async def test_a_close_that_hangs_is_given_up_and_changes_nothing(tmp_path: Path) -> None:
    config = make_config(sandbox="local", limits={"close_s": 0.1})
    async with bench(config, provider=Slow(tmp_path, close_s=FOREVER)) as rig:
        began = time.monotonic()
        record = await rig.run(in_local())
        took = time.monotonic() - began
    assert (record.status, record.score) == ("completed", 1.0)
    assert 0.09 < record.close_s < took < 20


# -- slots, cancellation ----------------------------------------------------------------------------------------------


async def test_the_slot_is_free_once_the_agent_is_done_before_verification_and_teardown(tmp_path: Path) -> None:
    provider = Slow(tmp_path, close_s=FOREVER)
    free = asyncio.Event()
    async with bench(make_config(sandbox="local", limits={"close_s": 0.05}), provider=provider) as rig:
        rollout = rig.rollout(judged("hang", environment={"trusted": True}), on_slot_free=free.set)
        task = asyncio.create_task(rollout.run())
        async with asyncio.timeout(60):
            await free.wait()
        assert rollout.phase == "verify"
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("ending", ["finished", "ValueError", "hang"])
async def test_a_slot_is_freed_exactly_once(ending: str) -> None:
    freed: list[int] = []
    async with bench(make_config(limits={"agent_s": 0.05}, **talking(ending=ending))) as rig:
        await rig.run(on_slot_free=lambda: freed.append(1))
    assert freed == [1]


async def phase_is(rollout: Rollout, phase: str) -> None:
    async with asyncio.timeout(60):
        while rollout.phase != phase:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("phase", ["start", "setup", "agent", "verify"])
async def test_cancelled_in_any_phase_it_closes_its_sandbox_and_frees_its_slot(phase: str, tmp_path: Path) -> None:
    provider = Slow(tmp_path, open_s=FOREVER if phase == "start" else 0.0)
    freed: list[int] = []
    config = make_config(sandbox="local", **talking(ending="hang" if phase == "agent" else "finished"))
    task = judged("hang", environment={"trusted": True}, setup=["sleep 60"] if phase == "setup" else [])
    async with bench(config, provider=provider) as rig:
        rollout = rig.rollout(task, on_slot_free=lambda: freed.append(1))
        running = asyncio.create_task(rollout.run())
        await phase_is(rollout, phase)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert provider.closed.is_set() == (phase != "start")
    assert freed == [1]
    assert rollout.record.score is None


async def test_cancelled_while_it_closes_it_still_closes(tmp_path: Path) -> None:
    provider = Slow(tmp_path, close_s=0.5)
    async with bench(make_config(sandbox="local"), provider=provider) as rig:
        rollout = rig.rollout(in_local())
        running = asyncio.create_task(rollout.run())
        await phase_is(rollout, "close")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert provider.closed.is_set()


# -- what a row says --------------------------------------------------------------------------------------------------


async def test_each_phase_is_timed(tmp_path: Path) -> None:
    before = time.time()
    provider = Slow(tmp_path, open_s=0.05, close_s=0.02)
    async with bench(make_config(scripted(latency_ms=30), sandbox="local"), provider=provider) as rig:
        record = await rig.run(in_local(), queued_at=before - 5)
    assert 5.0 <= record.queue_s < 30
    assert record.start_s >= 0.045
    assert record.agent_s >= 0.025
    assert 0 < record.verify_s < 20
    assert record.close_s >= 0.015
    assert before <= record.started_at < record.ended_at <= time.time()
    phases = record.start_s + record.agent_s + record.verify_s + record.close_s
    assert phases <= record.ended_at - record.started_at + 0.01


async def test_a_failed_phase_is_timed_too() -> None:
    async with bench(make_config(limits={"agent_s": 0.05}, **talking(turns=0, ending="hang"))) as rig:
        record = await rig.run()
    assert_failed(record, "model", "ModelTimeout", retryable=True)
    assert record.agent_s >= 0.04


async def test_tokens_and_cost_are_summed_over_the_turns() -> None:
    async def chat(request: web.Request) -> web.Response:
        return answer("42")

    prices = {"price_prompt": 1.0, "price_completion": 10.0}
    async with chat_server(chat) as url, bench(make_config(served(url, **prices), **talking(turns=3))) as rig:
        record = await rig.run()
    assert (record.prompt_tokens, record.completion_tokens) == (30, 9)
    assert record.cost_usd == pytest.approx((30 * 1.0 + 9 * 10.0) / 1e6)


async def test_a_model_without_prices_has_no_cost_and_not_a_cost_of_zero() -> None:
    async with bench(make_config()) as rig:
        assert (await rig.run()).cost_usd is None


async def test_what_a_failed_rollout_cost_is_counted() -> None:
    prices = {"price_prompt": 1.0, "price_completion": 1.0}
    async with bench(make_config({**scripted(), **prices}, **talking(turns=2, ending="ValueError"))) as rig:
        record = await rig.run()
    assert record.status == "failed"
    assert record.cost_usd is not None
    assert record.cost_usd > 0


async def test_the_weights_of_the_first_and_of_the_last_answer_are_kept() -> None:
    versions = iter(["step-7", None, "step-8"])

    async def chat(request: web.Request) -> web.Response:
        version = next(versions)
        return answer("42", **({} if version is None else {"weight_version": version}))

    async with chat_server(chat) as url, bench(make_config(served(url), **talking(turns=3))) as rig:
        record = await rig.run()
    assert (record.weight_version_start, record.weight_version_end) == ("step-7", "step-8")


async def test_a_row_says_where_and_as_what_it_ran() -> None:
    async with bench(make_config()) as rig:
        record = await rig.run(key=17, attempt=2, retry=1, generation=3)
    assert (record.key, record.attempt, record.retries, record.generation) == (17, 2, 1, 3)
    assert (record.host_id, record.node_id, record.sandbox) == ("host-0", "node", "none")


async def test_many_rollouts_at_once_keep_apart() -> None:
    """Those that break do not touch those that do not."""
    async with bench(make_config(scripted(latency_ms=5))) as rig:
        dos: Sequence[str] = ["half", "SystemExit", "nan", "prefix"] * 25
        records = await asyncio.gather(*(rig.run(judged(do), key=key) for key, do in enumerate(dos)))
    assert [record.score for record in records] == [0.5, None, None, 1.0] * 25
    assert {record.status for record in records} == {"completed"}
