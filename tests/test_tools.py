"""The tools of the tool_loop agent: commands, functions, MCP servers, and what the model is told of them.

One test: .venv/bin/pytest tests/test_tools.py -k mcp
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.agents.tools import check_tools, shell
from rollout_engine.agents.tools.calls import Call, calls_of, sendable
from rollout_engine.agents.tools.clip import clip
from rollout_engine.agents.tools.output import shell_output, tool_output
from rollout_engine.agents.tools.schema import PATTERN_S, fault_finder
from rollout_engine.agents.tools.toolbox import Toolbox, open_toolbox
from rollout_engine.errors import HostError, InputError, LimitReached, SandboxDied, SetupError
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.specs import Task, ToolTaskSpec
from rollout_engine.types import ExecResult, StopReason
from tests.helpers import make_config, scripted
from tests.rig import MATCH, bench, task_of

TOP = 2000
MARK = f"rollout-test-{os.getpid()}"
"""By which a test knows its own processes."""
TIMEOUT_S = 120.0
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

# -- functions that a task might name, as tests.test_tools:... -------------------------------------------------------

released = threading.Event()


def shout(text: str) -> str:
    return text.upper()


async def whisper(text: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"said": text.lower()}


def where() -> str:
    return threading.current_thread().name


def leave() -> None:
    raise SystemExit(3)


def fail(text: str) -> None:
    raise LookupError("nobody knows " + text * 5000)


def broken() -> None:
    raise HostError("the database is down")


def hang() -> None:
    released.wait(60)


async def hang_async() -> None:
    await asyncio.sleep(60)


async def cancel() -> None:
    raise asyncio.CancelledError


NOT_CALLABLE = 3

# -- the rig ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    provider = LocalProvider()
    opened = await provider.open(SandboxSpec())
    yield opened
    await provider.close()


def tools_of(*tools: dict[str, Any]) -> Task:
    return Task(task_id="t", prompt="?", verifier=MATCH, tools=tools)


async def ask(tools: Toolbox, name: str, **arguments: Any) -> str:
    return await tools.answer(Call("c", name, arguments))


async def answer(sandbox: Sandbox, tool: dict[str, Any], timeout_s: float = TIMEOUT_S, **arguments: Any) -> str:
    tool = {"name": "t", **tool}
    async with open_toolbox(tools_of(tool), sandbox, timeout_s=timeout_s, max_output_bytes=TOP) as tools:
        return await ask(tools, tool["name"], **arguments)


# -- clipping, reading, checking -------------------------------------------------------------------------------------


@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode), st.integers(1, 150))
def test_a_clipped_output_keeps_head_and_tail(output: bytes, most: int) -> None:
    text = clip(output, most)
    whole = output.decode("utf-8", "replace")
    if len(whole.encode()) <= most:
        assert text == whole
        return
    head, tail = text.split("\n[... ")[0], text.rpartition(" bytes left out ...]\n")[2]
    assert len(head.encode()) + len(tail.encode()) <= most
    assert whole.startswith(head)
    assert whole.endswith(tail)
    text.encode()


def test_the_clip_of_a_flood_says_how_much_is_missing() -> None:
    assert clip(b"a" * 500_000 + b"b" * 500_000, 10) == "aaaaa\n[... 999,990 bytes left out ...]\nbbbbb"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40)
@given(
    st.lists(
        JSON | st.fixed_dictionaries({"id": JSON, "function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
    )
)
def test_whatever_a_message_holds_is_read_and_sent_back_well_formed(given_calls: list[Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": given_calls}
    calls = calls_of(message, 7)
    assert len(calls) == len(given_calls)
    sent = sendable(message, calls)["tool_calls"]
    read = calls_of({"tool_calls": sent}, 7)
    assert [(call.id, call.arguments) for call in read] == [(call.id, call.arguments) for call in calls]
    assert all(call.fault is None for call in read)


@pytest.mark.parametrize(
    ("schema", "arguments", "said"),
    [
        (TEXT, {"text": "x"}, None),
        (TEXT, {}, "'text' is a required property"),
        (TEXT, {"text": ["a"]}, "text: ['a'] is not of type 'string'"),
        (
            {"type": "object", "properties": {"n": {"$ref": "http://127.0.0.1:9/x"}}},
            {"n": 1},
            "own schema cannot be used",
        ),
        ({"type": "object", "properties": {"n": {"pattern": "^a+$"}}}, {"n": "ab"}, "does not match"),
        ({"type": "object", "properties": {"n": {"enum": ["x" * 5000]}}}, {"n": 1}, "…"),
    ],
)
def test_arguments_against_a_schema(schema: dict[str, Any], arguments: dict[str, Any], said: str | None) -> None:
    fault = fault_finder(schema)(arguments)
    assert (fault is None) if said is None else said in (fault or "")
    assert len(fault or "") < 500


def test_a_pattern_that_explodes_is_stopped() -> None:
    fault = fault_finder({"type": "object", "properties": {"n": {"pattern": r"^(\w|\w\w)+\d$"}}})
    began = time.monotonic()
    assert "cannot be matched" in (fault({"n": "a" * 5000 + "!"}) or "")
    assert time.monotonic() - began < PATTERN_S + 30


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"function": "tests.test_tools:nobody"}, "tools.0.function"),
        ({"function": "no.such.module:f"}, "tools.0.function"),
        ({"function": "shout"}, "tools.0.function"),
        ({"function": "tests.test_tools:NOT_CALLABLE"}, "tools.0.function"),
        ({"command": "x", "parameters": {"type": "objekt"}}, "tools.0.parameters"),
        ({"command": "x", "parameters": {"type": "array"}}, "tools.0.parameters"),
        ({"mcp": []}, "tools.0.mcp"),
    ],
)
def test_what_is_wrong_with_a_tool_is_found_at_the_door(tool: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tools([ToolTaskSpec(name="t", **tool)])
    assert caught.value.where == field


def test_names_of_tools() -> None:
    with pytest.raises(ValueError, match="two tools have one name"):
        tools_of({"name": "a", "command": "x"}, {"name": "a", "command": "y"})
    with pytest.raises(ValueError, match="pattern"):
        tools_of({"name": "a b", "command": "x"})


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ExecResult(0, b"x\n"), b"x\n[exit code 0]"),
        (ExecResult(-9, oom=True), b"[killed: out of memory]"),
        (ExecResult(137, oom=True), b"[killed: out of memory]"),
        (ExecResult(0, oom=True), b"[exit code 0; out of memory: something in it was killed]"),
        (ExecResult(-15), b"[killed by signal 15]"),
    ],
)
def test_how_a_command_ended_is_told(result: ExecResult, said: bytes) -> None:
    assert shell_output(result) == said
    assert tool_output(result) == (b"x" if result.ok and not result.oom else said)


class Crowded:
    """A sandbox that has no process left, but for every `nth` command."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    async def exec(self, argv: list[str], **_: Any) -> ExecResult:
        self._left -= 1
        return ExecResult(126, crowded=True) if self._left else ExecResult(0, b"ran")


async def test_a_command_that_finds_no_process_is_tried_again_and_then_ends_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "START_PAUSE_S", 0.0)
    late = await shell.run(Crowded(shell.START_TRIES), "x", None, 1, shell_output)  # type: ignore[arg-type]
    assert late == b"ran\n[exit code 0]"
    with pytest.raises(LimitReached) as caught:
        await shell.run(Crowded(shell.START_TRIES + 1), "x", None, 1, shell_output)  # type: ignore[arg-type]
    assert caught.value.reason is StopReason.PROCESS_LIMIT


async def test_a_tool_cannot_take_the_shells_name(sandbox: Sandbox) -> None:
    with pytest.raises(SetupError, match="two tools are named 'shell'"):
        await answer(sandbox, {"name": "shell", "command": "x"})


# -- commands --------------------------------------------------------------------------------------------------------


async def test_a_command_reads_its_arguments_and_runs_in_the_workspace(sandbox: Sandbox) -> None:
    await sandbox.write_file("f", b"here")
    tool = {"command": "cat f; cat", "parameters": TEXT}
    assert await answer(sandbox, tool, text="ä\n") == 'here{"text": "\\u00e4\\n"}'


async def test_a_command_that_fails_says_so(sandbox: Sandbox) -> None:
    assert await answer(sandbox, {"command": "echo no >&2; exit 4"}) == "[stderr]\nno\n[exit code 4]"


async def test_a_command_is_not_run_with_arguments_that_do_not_fit(sandbox: Sandbox) -> None:
    assert "required" in await answer(sandbox, {"command": "touch f", "parameters": TEXT})
    assert not (await sandbox.exec(["test", "-e", "f"])).ok


# -- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("shout", {"text": "hé"}, "HÉ"),
        ("whisper", {"text": "HÉ"}, '{"said": "hé"}'),
        ("where", {}, "rollout function tool"),
        ("leave", {}, "[tool error] SystemExit: 3"),
        ("shout", {"word": "x"}, "[tool error] TypeError: shout() got an unexpected keyword argument 'word'"),
        ("cancel", {}, "[tool error] CancelledError: CancelledError"),
    ],
)
async def test_a_function(sandbox: Sandbox, name: str, arguments: dict[str, Any], said: str) -> None:
    assert await answer(sandbox, {"function": f"tests.test_tools:{name}"}, **arguments) == said


async def test_what_a_function_raises_is_clipped(sandbox: Sandbox) -> None:
    said = await answer(sandbox, {"function": "tests.test_tools:fail"}, text="xyz")
    assert said.startswith("[tool error] LookupError: nobody knows xyz")
    assert len(said) < TOP + 100


@pytest.mark.parametrize("name", ["hang", "hang_async"])
async def test_a_function_that_hangs_meets_its_limit(sandbox: Sandbox, name: str) -> None:
    released.clear()
    try:
        said = await answer(sandbox, {"function": f"tests.test_tools:{name}"}, timeout_s=0.1)
    finally:
        released.set()
    assert said == "[tool error] no answer within 0.1 s"


async def test_a_function_may_say_that_the_fault_is_ours(sandbox: Sandbox) -> None:
    with pytest.raises(HostError, match="database"):
        await answer(sandbox, {"function": "tests.test_tools:broken"})


async def test_a_cancelled_rollout_leaves_its_function(sandbox: Sandbox) -> None:
    released.clear()
    asking = asyncio.create_task(answer(sandbox, {"function": "tests.test_tools:hang"}))
    try:
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    finally:
        released.set()


async def test_a_function_that_this_host_lacks(sandbox: Sandbox) -> None:
    with pytest.raises(SetupError, match="no attribute 'nobody'"):
        await answer(sandbox, {"function": "tests.test_tools:nobody"})


# -- MCP -------------------------------------------------------------------------------------------------------------

REAL = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

@server.tool()
def note(text: str) -> str:
    "Writes a file into the workspace."
    open("note.txt", "w").write(text)
    return "noted"

@server.tool()
def fail() -> str:
    raise ValueError("on purpose")

server.run()
"""

SMALL = """
import json, sys, time

def say(id, **fields):
    print(json.dumps({"jsonrpc": "2.0", "id": id, **fields}), flush=True)

def tool(name):
    return {"name": name, "inputSchema": {"type": "object"}, "outputSchema": {"type": "object", "pattern": "((("}}

print("starting, on the wrong stream", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    id, method, params = asked.get("id"), asked["method"], asked.get("params") or {}
    if method == "initialize":
        say(id, result={"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                        "serverInfo": {"name": "small", "version": "1"}})
    elif method == "tools/list":
        page = params.get("cursor")
        names = {None: ["odd"], "2": ["die", "hang", "flood"]}[page]
        say(id, result={"tools": [tool(name) for name in names], **({} if page else {"nextCursor": "2"})})
    elif method == "tools/call" and params["name"] == "odd":
        say(id, result={"content": [{"type": "image", "mimeType": "image/png", "data": "AA=="},
                                    {"type": "text", "text": json.dumps(params["arguments"])}]})
    elif method == "tools/call" and params["name"] == "die":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(7)
    elif method == "tools/call" and params["name"] == "hang":
        time.sleep(300)
    elif method == "tools/call" and params["name"] == "flood":
        sys.stdout.write("x" * (9 << 20)); sys.stdout.flush()
    elif id is not None:
        say(id, error={"code": -32601, "message": "no such method"})
"""


async def with_server(sandbox: Sandbox, source: str, timeout_s: float = TIMEOUT_S) -> Any:
    await sandbox.write_file("server.py", source.encode())
    task = tools_of({"name": "calc", "mcp": [sys.executable, "server.py", MARK]})
    return open_toolbox(task, sandbox, timeout_s=timeout_s, max_output_bytes=TOP)


async def running(sandbox: Sandbox) -> str:
    """The command lines of all processes, which the local sandbox sees."""
    look = "for each in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $each; echo; done 2>/dev/null"
    return (await sandbox.exec(["sh", "-c", look])).stdout.decode(errors="replace")


async def none_runs(sandbox: Sandbox) -> None:
    """Waits until no server is left: one that was killed is seen until it has ended."""
    async with asyncio.timeout(60):
        while MARK in await running(sandbox):
            await asyncio.sleep(0.01)


async def test_the_tools_of_a_real_mcp_server_are_offered_and_called(sandbox: Sandbox) -> None:
    async with await with_server(sandbox, REAL) as tools:
        assert MARK in await running(sandbox)
        offered = {tool.name: tool for tool in tools.specs}
        assert list(offered) == ["shell", "add", "note", "fail"]
        assert offered["add"].description == "Adds two numbers."
        assert set(offered["add"].parameters["properties"]) == {"a", "b"}
        assert await ask(tools, "add", a=40, b=2) == "42"
        assert "tool error" in await ask(tools, "add", a="x")
        assert (await ask(tools, "fail")).startswith("[tool error]\n")
        assert await ask(tools, "note", text="hello") == "noted"
        assert await ask(tools, "shell", command="cat note.txt") == "hello\n[exit code 0]"
    await none_runs(sandbox)


async def test_an_mcp_server_of_another_make(sandbox: Sandbox) -> None:
    async with await with_server(sandbox, SMALL) as tools:
        assert [tool.name for tool in tools.specs] == ["shell", "odd", "die", "hang", "flood"]
        assert await ask(tools, "odd", a=[1]) == '[image image/png]\n{"a": [1]}'
        for _ in range(2):
            assert "is gone: it ended with exit code 7: out of luck" in await ask(tools, "die")


async def test_an_mcp_server_that_floods_is_not_listened_to(sandbox: Sandbox) -> None:
    async with await with_server(sandbox, SMALL) as tools:
        assert "it sent a message of more than 8 MiB" in await ask(tools, "flood")


@pytest.mark.slow
async def test_an_mcp_call_that_hangs_meets_its_limit(sandbox: Sandbox) -> None:
    async with await with_server(sandbox, SMALL, timeout_s=6.0) as tools:
        assert await ask(tools, "hang") == "[tool error] no answer within 6 s"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit('no luck')", "did not start: it ended with exit code 1: no luck"),
        ("import time; time.sleep(300)", "did not list its tools in 0.5 s"),
        ("while True: print('chatter')", "lines that are no messages"),
    ],
)
async def test_an_mcp_server_that_does_not_start(sandbox: Sandbox, source: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        async with await with_server(sandbox, source, timeout_s=0.5 if "sleep" in source else 60.0):
            raise AssertionError("the server did start")


async def test_a_sandbox_that_dies_under_its_mcp_server_is_a_fault_of_ours(sandbox: Sandbox) -> None:
    async with await with_server(sandbox, SMALL) as tools:
        await sandbox.close()
        with pytest.raises(SandboxDied):
            await ask(tools, "odd")


async def test_what_is_raised_beside_an_mcp_server_comes_through_as_it_is(sandbox: Sandbox) -> None:
    with pytest.raises(LookupError, match="as it is"):
        async with await with_server(sandbox, SMALL):
            raise LookupError("as it is")


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.3, 0.8])
async def test_a_cancelled_rollout_leaves_no_mcp_server(sandbox: Sandbox, delay_s: float) -> None:
    async def work() -> None:
        async with await with_server(sandbox, SMALL) as tools:
            await ask(tools, "hang")

    working = asyncio.create_task(work())
    await asyncio.sleep(delay_s)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await none_runs(sandbox)


async def test_a_rollout_whose_tool_does_not_come_up_fails_in_its_setup() -> None:
    task = task_of(tools=[{"name": "calc", "mcp": ["sh", "-c", "echo no luck >&2; exit 3"]}])
    async with bench(make_config(scripted(), agent="tool_loop", sandbox="local")) as rig:
        record = await rig.run(task)
    assert (record.status, record.failure_boundary, record.failure_type) == ("failed", "setup", "SetupError")
    assert "no luck" in str(record.failure_message)


async def test_a_declared_tool_in_a_whole_rollout() -> None:
    task = task_of(tools=[{"name": "shout", "function": "tests.test_tools:shout", "parameters": TEXT}])
    async with bench(make_config(scripted(), agent="tool_loop", sandbox="local")) as rig:
        record = await rig.run(task)
    assert (record.status, record.score, record.num_turns) == ("completed", 1.0, 1)
