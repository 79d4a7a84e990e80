"""MCP tools in every sandbox: a server that needs nothing but the sandbox's own python.

One test: .venv/bin/pytest tests/contracts/test_mcp.py -k namespace
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_engine.agents.tools.calls import Call
from rollout_engine.agents.tools.toolbox import Toolbox, open_toolbox
from rollout_engine.sandboxes.base import Sandbox
from tests.contracts.test_sandbox import mark, nothing_runs
from tests.rig import task_of

__all__ = ["mark"]

SERVER = """
import json, subprocess, sys

subprocess.Popen(["sleep", sys.argv[1]])
TOOL = {"name": "note", "description": "Writes a file.", "inputSchema": {"type": "object"}}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "notes", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        text = asked["params"]["arguments"]["text"]
        open("note.txt", "w").write(text)
        result = {"content": [{"type": "text", "text": f"{len(text)} characters"}]}
    elif "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "?"}}), flush=True)
        continue
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def ask(tools: Toolbox, name: str, **arguments: Any) -> str:
    return await tools.answer(Call("c", name, arguments))


async def serving(sandbox: Sandbox, mark: str) -> Any:
    await sandbox.write_file("server.py", SERVER.encode())
    task = task_of(tools=[{"name": "notes", "mcp": ["python3", "server.py", mark]}])
    return open_toolbox(task, sandbox, timeout_s=60.0, max_output_bytes=10_000)


async def test_a_server_in_the_sandbox_is_listed_called_and_ended(sandbox: Sandbox, mark: str) -> None:
    async with await serving(sandbox, mark) as tools:
        assert [tool.name for tool in tools.specs] == ["shell", "note"]
        assert await ask(tools, "note", text="x" * 200_000) == "200000 characters"
        assert await ask(tools, "shell", command="wc -c < note.txt") == "200000\n[exit code 0]"
    await nothing_runs(mark)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.2])
async def test_a_cancelled_rollout_leaves_no_server(sandbox: Sandbox, mark: str, delay_s: float) -> None:
    async def work() -> None:
        async with await serving(sandbox, mark):
            await asyncio.sleep(300)

    working = asyncio.create_task(work())
    await asyncio.sleep(delay_s)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await nothing_runs(mark)
