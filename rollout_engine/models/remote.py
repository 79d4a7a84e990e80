"""The client of a model behind HTTP: one body for a call, whole or streamed, in whatever format its server speaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollout_engine.config import ModelSpec
from rollout_engine.errors import ModelError
from rollout_engine.models.base import Passed, Piece
from rollout_engine.models.classify import refusal
from rollout_engine.models.dialects import Dialect, clean_key
from rollout_engine.models.http import Channel, Reply, Stream
from rollout_engine.models.passing import pieces
from rollout_engine.models.pool import Pool
from rollout_engine.models.retry import Failed, TryCounts, call_with_retries
from rollout_engine.models.seed import SEED_HEADER, seed_header
from rollout_engine.models.streaming import deltas
from rollout_engine.models.wire import PARSE_IN_THREAD_BYTES, WEIGHT_VERSION_HEADER, load_big_json, load_json
from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec

T = TypeVar("T")


class RemoteClient:
    """One model at its servers. `close` it; safe for any number of calls at once."""

    def __init__(self, spec: ModelSpec, api_key: str | None, dialect: Dialect) -> None:
        self._spec, self._dialect, self._format = spec, dialect, dialect.format
        key = clean_key(spec, api_key, dialect)
        headers = dialect.headers(key)
        channels = [Channel(spec, dialect.urls(spec, url), headers, key, url) for url in spec.urls]
        self._pool = Pool(channels, spec.url_max_concurrency)
        self._build = dialect.builder(spec.model or "")
        self.tries = TryCounts()

    @property
    def speaks(self) -> str:
        """See `PassingClient`."""
        return self._format.name

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> Completion:
        """The model's answer; see `ModelClient`. A pause between tries is part of `model_s`."""
        started = asyncio.get_running_loop().time()
        body = self._build(messages, sampling, tools, False)
        headers = self._call_headers(context)
        reply = await self._tried(partial(self._post, body, headers, context, set(), started), deadline, context)
        return reply.completion

    async def stream(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
        deadline: float,
        context: CallContext,
    ) -> AsyncIterator[Delta]:
        """The answer in pieces. Tried again until the response has begun, and not once a piece was handed out."""
        started = asyncio.get_running_loop().time()
        body = self._build(messages, sampling, tools, True)
        headers = self._call_headers(context)
        opened = await self._tried(partial(self._open, body, headers, context, set()), deadline, context)
        async with opened.ending:
            found = deltas(opened.stream, opened.channel, self._format, started)
            async with contextlib.aclosing(found):
                async for delta in found:
                    yield delta

    async def pass_on(
        self, body: bytes, *, deadline: float, context: CallContext, headers: Mapping[str, str] | None = None
    ) -> Passed:
        """The server's own answer to this body; see `PassingClient`."""
        started = asyncio.get_running_loop().time()
        sent = {**(headers or {}), **self._call_headers(context)}
        return await self._tried(partial(self._post, body, sent, context, set(), started), deadline, context)

    async def pass_stream(
        self,
        body: bytes,
        *,
        deadline: float,
        context: CallContext,
        headers: Mapping[str, str] | None = None,
        hide_usage: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """The server's own stream."""
        started = asyncio.get_running_loop().time()
        sent = {**(headers or {}), **self._call_headers(context)}
        opened = await self._tried(partial(self._open, body, sent, context, set()), deadline, context)
        async with opened.ending:
            found = pieces(opened.stream, opened.channel, self._format, started, hide_usage)
            async with contextlib.aclosing(found):
                async for piece in found:
                    yield piece

    async def close(self) -> None:
        await self._pool.close()

    async def _tried(self, once: Callable[[float], Awaitable[T | Failed]], deadline: float, context: CallContext) -> T:
        return await call_with_retries(
            once,
            retries=self._spec.call_retries,
            deadline=deadline,
            call_timeout_s=self._spec.call_timeout_s,
            counts=self.tries,
            gate=context.gate,
        )

    def _call_headers(self, context: CallContext) -> Mapping[str, str]:
        return {SEED_HEADER: seed_header(context)} if self._spec.seed_header else {}

    async def _post(
        self,
        body: bytes,
        headers: Mapping[str, str],
        context: CallContext,
        avoid: set[int],
        started: float,
        until: float,
    ) -> Passed | Failed:
        """One try; `avoid` gathers the servers on which the call has failed."""
        if self._pool.single is not None:
            return await self._ask(self._pool.single, body, headers, started, until)
        picked = await self._pool.pick(prefix_key(context), avoid, until)
        async with self._pool.using(picked, avoid) as outcome:
            result = await self._ask(picked.channel, body, headers, started, until)
            outcome.told(result)
        return result

    async def _ask(
        self, channel: Channel, body: bytes, headers: Mapping[str, str], started: float, until: float
    ) -> Passed | Failed:
        reply = await channel.post(body, headers, until)
        if isinstance(reply, Failed):
            return reply
        if not 200 <= reply.status < 300:
            return _refusal(channel, reply)
        model_s = asyncio.get_running_loop().time() - started
        if len(reply.body) <= PARSE_IN_THREAD_BYTES:
            return self._parse(channel, load_json, reply, model_s)
        return await asyncio.to_thread(self._parse, channel, load_big_json, reply, model_s)

    def _parse(self, channel: Channel, load: Callable[[bytes], Any], reply: Reply, model_s: float) -> Passed | Failed:
        try:
            version = reply.headers.get(WEIGHT_VERSION_HEADER)
            return Passed(reply.body, self._format.completion(load(reply.body), model_s, version))
        except ModelError as error:
            failed = channel.failed(error)
        return failed

    async def _open(
        self, body: bytes, headers: Mapping[str, str], context: CallContext, avoid: set[int], until: float
    ) -> Opened | Failed:
        """The same for the beginning of a stream, which is in flight at its server until it is closed."""
        picked = await self._pool.pick(prefix_key(context), avoid, until)
        async with contextlib.AsyncExitStack() as mine:
            outcome = await mine.enter_async_context(self._pool.using(picked, avoid))
            stream = await picked.channel.open(body, headers, until)
            outcome.told(stream)
            if isinstance(stream, Failed):
                return stream
            mine.push_async_callback(stream.close)
            if 200 <= stream.status < 300:
                return Opened(picked.channel, stream, mine.pop_all())
            content = await stream.read_all()
            if isinstance(content, Failed):
                failed = content
            else:
                failed = _refusal(picked.channel, Reply(stream.status, stream.headers, content))
            outcome.told(failed)
        return failed


class Opened(NamedTuple):
    """A stream that has begun. Enter `ending` around its reading."""

    channel: Channel
    stream: Stream
    ending: contextlib.AsyncExitStack


def prefix_key(context: CallContext) -> tuple[int, str]:
    """Calls of one task in one round begin with the same messages, and those of a rollout go on from there."""
    return context.round, context.task_id


def _refusal(channel: Channel, reply: Reply) -> Failed:
    return refusal(reply.status, reply.headers, reply.body, channel.where, channel.redact)
