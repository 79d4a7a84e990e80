"""The `tool_loop` agent: real local sandboxes, models of a test's own words and scripted ones, every limit.

One test: .venv/bin/pytest tests/test_tool_loop.py -k malformed
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.agents import agent_needs_sandbox, make_agent
from rollout_engine.agents.base import AgentLimits
from rollout_engine.agents.tool_loop import MAX_CALLS, ToolLoop
from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, SandboxDied
from rollout_engine.models.server import ModelServer
from rollout_engine.prepare import prepare
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.schema import batch_to_records, records_to_batch
from rollout_engine.specs import Task, task_body
from rollout_engine.tasks import check_task
from rollout_engine.types import Completion, Isolation, Message, Score, StopReason, ToolSpec, Trajectory, Turn, Usage
from tests.helpers import make_config, scripted
from tests.rig import bench, chat_server, served

MATCH = {"type": "match", "compare": "exact", "expected": "42"}
LIMITS = AgentLimits(max_turns=10, max_tokens=1000, max_output_bytes=2000, agent_s=120.0)


class FileJudge:
    """Passes where the sandbox holds `answer.txt` with the right text."""

    isolation = Isolation.IN_PLACE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        self._expected = spec["expected"]

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        assert sandbox is not None
        result = await sandbox.exec(["cat", "answer.txt"])
        return Score(float(result.stdout.decode().strip() == self._expected))


def file_task(**fields: Any) -> Task:
    verifier = {"type": "tests.test_tool_loop:FileJudge", "expected": "42"}
    solution = {"script": "echo 40 > a.txt\necho 2 > b.txt\nexpr $(cat a.txt) + $(cat b.txt) > answer.txt"}
    return Task(**{"task_id": "t", "prompt": "Add.", "verifier": verifier, "solution": solution, **fields})


def call(command: str, call_id: str = "c1") -> dict[str, Any]:
    return named("shell", json.dumps({"command": command}), call_id)


def named(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def acting(*calls: Any, finish: str = "tool_calls", tokens: int = 10) -> Completion:
    message: Message = {"role": "assistant", "content": None, "tool_calls": list(calls)}
    return Completion(message, finish, Usage(5, tokens))


def saying(text: str = "42") -> Completion:
    return Completion({"role": "assistant", "content": text}, "stop", Usage(5, 10))


class Model:
    """Says what it was told to, in order, the last again and again; remembers what it was asked."""

    def __init__(self, *completions: Completion) -> None:
        self._completions = list(completions)
        self.asked: list[list[Message]] = []
        self.offered: Sequence[ToolSpec] = ()

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Completion:
        self.asked.append(list(messages))
        self.offered = tools
        return self._completions.pop(0) if len(self._completions) > 1 else self._completions[0]


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    provider = LocalProvider()
    opened = await provider.open(SandboxSpec())
    yield opened
    await provider.close()


async def played(
    model: Model, sandbox: Sandbox, task: Task | None = None, limits: AgentLimits = LIMITS, **options: Any
) -> tuple[StopReason, list[Turn]]:
    turns: list[Turn] = []
    reason = await ToolLoop(**options).run(task or file_task(), model, sandbox, limits, turns.append)
    return reason, turns


async def told(sandbox: Sandbox, *calls: Any, limits: AgentLimits = LIMITS, **options: Any) -> list[str]:
    """What the model is told about calls."""
    _, turns = await played(Model(acting(*calls), saying()), sandbox, limits=limits, **options)
    return [message["content"] for message in turns[1].messages[:-1]]


async def test_each_turn_holds_only_what_is_new(sandbox: Sandbox) -> None:
    model = Model(acting(call("echo one > f", "a"), call("cat f; exit 3", "b")), saying("done"))
    reason, turns = await played(model, sandbox, file_task(system_prompt="Work."))
    assert reason is StopReason.FINISHED
    head = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Add."}]
    answers = [
        {"role": "tool", "tool_call_id": "a", "content": "[exit code 0]"},
        {"role": "tool", "tool_call_id": "b", "content": "one\n[exit code 3]"},
    ]
    first = acting(call("echo one > f", "a"), call("cat f; exit 3", "b")).message
    assert [turn.messages for turn in turns] == [[*head, first], [*answers, saying("done").message]]
    assert model.asked == [head, [*head, first, *answers]]
    assert [turn.index for turn in turns] == [0, 1]
    assert turns[1].env_s > 0
    assert [tool.name for tool in model.offered] == ["shell"]


async def test_standard_error_and_signals_are_shown(sandbox: Sandbox) -> None:
    assert await told(sandbox, call("echo out; echo err >&2; exit 2"), call("kill -9 $$"), call("printf '\\377'")) == [
        "out\n[stderr]\nerr\n[exit code 2]",
        "[killed by signal 9]",
        "\ufffd\n[exit code 0]",
    ]


async def test_output_is_clipped_in_its_middle(sandbox: Sandbox) -> None:
    limits = AgentLimits(10, 1000, 100, 120.0)
    (text,) = await told(sandbox, call("seq 1 100000; echo oops >&2; exit 1"), limits=limits)
    assert text.startswith("1\n2\n3\n")
    assert "bytes left out" in text
    assert text.endswith("100000\n[stderr]\noops\n[exit code 1]")
    assert len(text) < 200


async def test_a_command_that_meets_its_limit_is_told_with_its_output(sandbox: Sandbox) -> None:
    (text,) = await told(sandbox, call("echo begun; sleep 300"), command_timeout_s=3.0)
    assert text == "begun\n[killed: no end within 3 s; the output above is what it wrote until then]"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (named("no_such", "{}"), "there is no tool 'no_such'; there are: shell"),
        (named("shell", '{"command": '), "the arguments are no JSON"),
        (named("shell", '["ls"]'), "no JSON object"),
        (named("shell", '{"command": NaN}'), "NaN is no JSON number"),
        (named("shell", "{}"), "'command' is a required property"),
        (named("shell", ""), "'command' is a required property"),
        (named("shell", None), "'command' is a required property"),
        (named("shell", '{"command": 3}'), "command: 3 is not of type 'string'"),
        (named("shell", '{"command": "ls", "cwd": "/"}'), "'cwd' was unexpected"),
        (named("shell", '{"command": "echo \\u0000"}'), "NUL"),
        (named("shell", json.dumps({"command": ": " + "x" * 200_000})), "longer than"),
        (named("shell", "1" * 5000), "no JSON"),
        ({"id": "c1", "type": "function"}, "names no function"),
        ({"id": "c1", "function": {"name": 3}}, "names no function"),
        ({}, "names no function"),
        ("shell", "is no object"),
    ],
    ids=str,
)
async def test_a_malformed_call_is_answered(sandbox: Sandbox, bad: Any, said: str) -> None:
    model = Model(acting(bad, call("echo fine", "good")), saying())
    reason, turns = await played(model, sandbox)
    assert reason is StopReason.FINISHED
    wrong, right = turns[1].messages[:2]
    assert wrong["content"].startswith("[tool error] ")
    assert said in wrong["content"]
    assert right == {"role": "tool", "tool_call_id": "good", "content": "fine\n[exit code 0]"}
    # The record has what the model said; its server gets back what every server takes.
    assert turns[0].messages[-1]["tool_calls"][0] == bad
    sent = model.asked[1][1]["tool_calls"]
    assert isinstance(json.loads(sent[0]["function"]["arguments"]), dict)
    assert sent[0]["id"] == wrong["tool_call_id"]
    assert sent[0]["function"]["name"]
    assert sent[1] == call("echo fine", "good")


async def test_arguments_may_come_as_an_object_and_without_an_id(sandbox: Sandbox) -> None:
    model = Model(acting({"function": {"name": "shell", "arguments": {"command": "echo \ud83d"}}}), saying())
    _, turns = await played(model, sandbox)
    assert turns[1].messages[0] == {"role": "tool", "tool_call_id": "call-0-0", "content": "?\n[exit code 0]"}


async def test_a_flood_of_calls_is_bounded(sandbox: Sandbox) -> None:
    answers = await told(sandbox, *(call("echo x >> f", f"c{i}") for i in range(MAX_CALLS + 2)))
    assert len(answers) == MAX_CALLS + 2
    assert "not run" in answers[-1]
    assert (await sandbox.read_file("f")).count(b"x") == MAX_CALLS


# -- limits ------------------------------------------------------------------------------------------------------


async def test_the_limit_of_turns(sandbox: Sandbox) -> None:
    model = Model(acting(call("echo x >> f")))
    reason, turns = await played(model, sandbox, limits=AgentLimits(3, 1000, 2000, 120.0))
    assert reason is StopReason.MAX_TURNS
    assert len(turns) == 3
    # The results of the last calls would be on no turn: they are not run.
    assert await sandbox.read_file("f") == b"x\nx\n"


async def test_the_limit_of_completion_tokens(sandbox: Sandbox) -> None:
    reason, turns = await played(Model(acting(call("true"), tokens=40)), sandbox, limits=AgentLimits(9, 100, 99, 120.0))
    assert reason is StopReason.MAX_TOKENS
    assert len(turns) == 3


async def test_a_last_answer_may_use_up_the_tokens(sandbox: Sandbox) -> None:
    reason, _ = await played(Model(saying()), sandbox, limits=AgentLimits(9, 10, 99, 120.0))
    assert reason is StopReason.FINISHED


async def test_calls_that_were_cut_are_not_run(sandbox: Sandbox) -> None:
    reason, turns = await played(Model(acting(call("touch f"), finish="length")), sandbox)
    assert reason is StopReason.MAX_TOKENS
    assert len(turns) == 1
    assert (await sandbox.exec(["test", "-e", "f"])).exit_code == 1


async def test_a_dead_sandbox_is_never_shown_to_the_model(sandbox: Sandbox) -> None:
    model, turns = Model(acting(call("true"))), list[Turn]()
    await sandbox.close()
    with pytest.raises(SandboxDied):
        await ToolLoop().run(file_task(), model, sandbox, LIMITS, turns.append)
    assert len(model.asked) == len(turns) == 1


@pytest.mark.parametrize("seconds", [0, -1, True, "3", None, float("inf"), float("nan")])
def test_options_are_checked(seconds: Any) -> None:
    with pytest.raises(InputError, match="command_timeout_s"):
        make_agent("tool_loop", {"command_timeout_s": seconds})


# -- as a rollout ------------------------------------------------------------------------------------------------


def test_it_gets_a_sandbox_for_a_task_that_declares_nothing() -> None:
    task = Task(task_id="t", prompt="?", verifier=MATCH)
    assert prepare(task_body(task), make_config(agent="tool_loop")).sandbox is not None
    assert prepare(task_body(task), make_config()).sandbox is None
    assert not agent_needs_sandbox("no-such-agent")
    with pytest.raises(InputError, match="the agent tool_loop needs a sandbox"):
        check_task(task, make_config(agent="tool_loop"))
    check_task(task, make_config(agent="tool_loop", sandbox="local"))


@pytest.mark.parametrize(
    ("skill", "turns", "passed"), [(1.0, 1, True), (1.0, 3, True), (1.0, 5, True), (0.0, 2, False)]
)
async def test_a_scripted_model_solves_a_task_by_its_shell(skill: float, turns: int, passed: bool) -> None:
    config = make_config(scripted(skill=skill, turns=turns), agent="tool_loop", sandbox="local")
    async with bench(config) as rig:
        record = await rig.run(file_task())
    assert (record.status, record.passed, record.num_turns) == ("completed", passed, turns + 1)
    assert record.final_answer == "Done."
    (again,) = batch_to_records(records_to_batch([record]))
    assert again.turns == record.turns


async def test_the_same_over_http() -> None:
    tasks = [file_task(task_id=f"t{i}") for i in range(6)]
    spec = ModelSpec(name="m", kind="scripted", options={"skill": 0.5, "turns": 2})
    here = make_config(spec.model_dump(), agent="tool_loop", sandbox="local")
    async with ModelServer({"m": spec}, solutions={task.task_id: task.solution or "" for task in tasks}) as server:
        there = make_config(served(server.url, seed_header=True), agent="tool_loop", sandbox="local")
        async with bench(here) as near, bench(there) as far:
            first = [await near.run(task) for task in tasks]
            second = await asyncio.gather(*(far.run(task) for task in tasks))
    assert [record.passed for record in first] == [record.passed for record in second]
    assert {record.passed for record in first} == {True, False}
    assert [[turn.messages for turn in record.turns] for record in first] == [
        [turn.messages for turn in record.turns] for record in second
    ]


@pytest.mark.slow
async def test_the_agents_time_cuts_a_command_and_the_prefix_is_verified() -> None:
    async def stuck(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        command = "sleep 300" if len(body["messages"]) > 1 else "echo 42 > answer.txt"
        message = {"role": "assistant", "content": None, "tool_calls": [call(command)]}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})

    async with chat_server(stuck) as url:
        config = make_config(served(url), agent="tool_loop", sandbox="local", limits={"agent_s": 5.0})
        async with bench(config) as rig:
            record = await rig.run(file_task())
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 1.0)
    assert record.num_turns == 2


async def test_a_script_without_a_shell_is_a_missing_answer() -> None:
    async with bench(make_config(scripted())) as rig:
        record = await rig.run(Task(task_id="t", prompt="?", verifier=MATCH, solution={"script": "true"}))
    assert (record.status, record.failure_type) == ("failed", "ModelMissingAnswer")
    assert "no tool 'shell'" in str(record.failure_message)
