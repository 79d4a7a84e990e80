"""The tools of an MCP server that runs in the sandbox and talks over its standard input and output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from anyio import BrokenResourceError, ClosedResourceError
from mcp import Client, MCPError
from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult, PaginatedRequestParams
from mcp.types import Tool as ListedTool
from pydantic import ValidationError

from rollout_engine.agents.tools.base import ToolError
from rollout_engine.agents.tools.mcp_stdio import Link, stdio
from rollout_engine.errors import InfraError, SetupError, SetupTimeout, describe
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import ToolTaskSpec
from rollout_engine.types import ToolSpec

MAX_TOOLS = 500
"""A server that lists more is cut there."""
CLOSE_S = 5.0


class McpServer:
    """One server of one rollout. Its session lives in a task of its own: the task groups of `mcp` wrap whatever is
    raised inside of them, and an agent's errors have to come through as they are."""

    def __init__(self, tool: ToolTaskSpec, sandbox: Sandbox, timeout_s: float) -> None:
        """`timeout_s` bounds the start and each call."""
        assert tool.mcp is not None
        self._name, self._argv, self._sandbox, self._timeout_s = tool.name, tool.mcp, sandbox, timeout_s
        self._link = Link()
        self._client: Client | None = None
        self._life: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def open(self) -> Sequence[McpTool]:
        """Starts the server and lists its tools. Raises SetupError where it does not come up."""
        ready: asyncio.Future[list[ListedTool]] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        self._life.add_done_callback(lambda life: _settle(ready, life))
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                listed = await ready
        except TimeoutError:
            raise SetupTimeout(f"MCP server {self._name!r} did not list its tools in {self._timeout_s:g} s") from None
        except InfraError:
            raise
        except Exception as error:
            self._raise_fault()
            why = self._link.ended or describe(_first(error))
            raise SetupError(f"MCP server {self._name!r} did not start: {why}") from error
        return [McpTool(self, tool) for tool in listed]

    async def close(self) -> None:
        """Ends the session and kills the server, in bounded time."""
        self._over.set()
        if self._life is not None:
            if self._client is None:
                self._life.cancel()
            await asyncio.wait({self._life}, timeout=CLOSE_S)
            self._life.cancel()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        """What a tool of the server answers. Raises ToolError; a fault of the sandbox as it is."""
        self._raise_fault()
        if self._client is None or self._link.ended is not None:
            raise ToolError(self._gone())
        params = CallToolRequestParams(name=name, arguments=dict(arguments))
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                # Not `call_tool`: that checks the answer against a schema of the server's own, which may come from
                # the agent, and regular expressions of an agent's would run in the host.
                result = await self._client.session.send_request(CallToolRequest(params=params), CallToolResult)
        except TimeoutError:
            raise ToolError(f"no answer within {self._timeout_s:g} s") from None
        except (MCPError, ValidationError, BrokenResourceError, ClosedResourceError) as error:
            self._raise_fault()
            raise ToolError(self._gone() if self._link.ended is not None else describe(error)) from error
        return _shown(result)

    async def _live(self, ready: asyncio.Future[list[ListedTool]]) -> None:
        stream = await self._sandbox.connect(self._argv)
        try:
            async with Client(stdio(stream, self._link), cache=None) as client:
                listed = await _list_tools(client)
                self._client = client
                if not ready.done():  # whoever waited may have given up
                    ready.set_result(listed)
                await self._over.wait()
        finally:
            self._client = None
            await stream.close()

    def _raise_fault(self) -> None:
        if self._link.fault is not None:
            raise self._link.fault

    def _gone(self) -> str:
        return f"the MCP server {self._name} is gone: {self._link.ended or 'its session has ended'}"


class McpTool:
    """One tool of a server, under its own name. The server checks the arguments itself."""

    def __init__(self, server: McpServer, listed: ListedTool) -> None:
        self.spec = ToolSpec(listed.name, listed.description or "", listed.input_schema)
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> bytes:
        return await self._server.call(self.spec.name, arguments)


async def _list_tools(client: Client) -> list[ListedTool]:
    found: list[ListedTool] = []
    cursor: str | None = None
    while len(found) < MAX_TOOLS:
        params = PaginatedRequestParams(cursor=cursor) if cursor is not None else None
        page = await client.session.list_tools(params=params)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found[:MAX_TOOLS]


def _shown(result: CallToolResult) -> bytes:
    parts = [_part(content.model_dump(mode="json", exclude_none=True)) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return (f"[tool error]\n{text}" if result.is_error else text).encode("utf-8", "replace")


def _part(content: dict[str, Any]) -> str:
    """Texts as they are; of pictures, sounds and files the kind alone: the model reads text."""
    kind, text = content.get("type"), content.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    resource = content.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    named = content.get("mimeType") or content.get("mime_type") or content.get("uri") or ""
    return f"[{kind} {named}]".replace(" ]", "]")


def _settle(ready: asyncio.Future[list[ListedTool]], life: asyncio.Task[None]) -> None:
    error = None if life.cancelled() else life.exception()
    if not ready.done():
        ready.set_exception(error or SetupError("the session ended"))
    with suppress(asyncio.CancelledError):
        ready.exception()  # nobody may be waiting any more


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
