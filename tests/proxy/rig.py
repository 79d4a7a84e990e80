"""A rollout's door on a real socket, over a real model client at a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rollout_engine.agentclock import AgentClock
from rollout_engine.bound import BoundModel, Model
from rollout_engine.config import ModelSpec
from rollout_engine.formats.base import Overrides
from rollout_engine.models import make_client, sampling_of
from rollout_engine.permits import UNLIMITED
from rollout_engine.proxy.door import Door, DoorLimits
from rollout_engine.proxy.roles import RoleRule
from rollout_engine.proxy.rollout_session import RolloutSession, SessionLimits
from rollout_engine.proxy.token import new_token
from rollout_engine.types import CallContext, CallGate, RolloutRecord, Turn

CONTEXT = CallContext(0, 0, "t", "m", 0, 0, "42")


@dataclass
class Rig:
    """A door that listens, and what came of the calls through it."""

    session: RolloutSession
    door: Door
    base: str
    record: RolloutRecord
    turns: list[Turn] = field(default_factory=list)

    async def ask(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """One call that is not streamed: status and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with aiohttp.ClientSession() as http, http.post(self.base + path, data=data, headers=headers) as got:
            raw = await got.read()
            return got.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()

    async def events(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """One streamed call: status and every byte."""
        async with aiohttp.ClientSession() as http, http.post(self.base + path, json=body, headers=headers) as got:
            return got.status, await got.read()


@contextlib.asynccontextmanager
async def door(
    spec: ModelSpec,
    *,
    limits: SessionLimits | None = None,
    door_limits: DoorLimits | None = None,
    overrides: Overrides | None = None,
    rules: Sequence[RoleRule] = (),
    models: Sequence[str] = (),
    record_sub: bool = False,
    context: CallContext = CONTEXT,
    key: str | None = None,
    deadline_s: float = 120.0,
) -> AsyncIterator[Rig]:
    """Opens a door over the client of `spec`."""
    client = make_client(spec, api_key=key)
    model = Model(spec, client, sampling_of(spec))
    model.permits.renew(UNLIMITED)
    record = RolloutRecord(0, 0, "t", "m", 0)
    loop = asyncio.get_running_loop()

    def of_call(turn: int, gate: CallGate) -> CallContext:
        return context._replace(turn=turn, gate=gate)

    bound = BoundModel(model, of_call, AgentClock(loop.time() + deadline_s, loop.time() + deadline_s), record)
    turns: list[Turn] = []
    session = RolloutSession(
        bound,
        limits or SessionLimits(),
        turns.append,
        overrides=overrides,
        rules=rules,
        models=models,
        record_sub=record_sub,
    )
    token = new_token()
    opened = Door(session, token, door_limits)
    factory = opened.server()
    server = await loop.create_server(factory, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Rig(session, opened, f"http://127.0.0.1:{port}/r/{token}", record, turns)
    finally:
        opened.close()
        session.end("the test is over")
        server.close()
        await factory.shutdown(1.0)
        await server.wait_closed()
        await client.close()
