"""The client of an OpenAI-compatible server (vLLM, SGLang, OpenAI, ...): chat completions, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, ModelError
from rollout_engine.models.classify import refusal
from rollout_engine.models.http import Channel, Reply, Stream
from rollout_engine.models.retry import Failed, call_with_retries
from rollout_engine.models.seed import SEED_HEADER, seed_header
from rollout_engine.models.streaming import deltas
from rollout_engine.models.wire import (
    PARSE_IN_THREAD_BYTES,
    WEIGHT_VERSION_HEADER,
    completion_of,
    load_big_json,
    load_json,
    request_body,
    request_head,
)
from rollout_engine.types import CallContext, Completion, Delta, Message, Sampling, ToolSpec


class OpenAIClient:
    """One model at one server. `close` it; safe for any number of calls at once."""

    def __init__(self, spec: ModelSpec, api_key: str | None = None) -> None:
        self._spec = spec
        self._channel = Channel(spec, clean_key(spec, api_key))
        # The head of the last request, kept by identity: a host calls with the same sampling and tools all the time.
        self._head: tuple[object, object, bool, str] = (None, None, False, "")

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
        body = request_body(self._request_head(sampling, tools, stream=False), messages)
        return await call_with_retries(
            partial(self._try, body, self._call_headers(context), started),
            retries=self._spec.call_retries,
            deadline=deadline,
            call_timeout_s=self._spec.call_timeout_s,
        )

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
        body = request_body(self._request_head(sampling, tools, stream=True), messages)
        stream = await call_with_retries(
            partial(self._open, body, self._call_headers(context)),
            retries=self._spec.call_retries,
            deadline=deadline,
            call_timeout_s=self._spec.call_timeout_s,
        )
        try:
            async with contextlib.aclosing(deltas(stream, self._channel, started)) as pieces:
                async for delta in pieces:
                    yield delta
        finally:
            await stream.close()

    async def close(self) -> None:
        await self._channel.close()

    def _request_head(self, sampling: Sampling, tools: Sequence[ToolSpec], *, stream: bool) -> str:
        known_sampling, known_tools, known_stream, head = self._head
        if sampling is not known_sampling or tools is not known_tools or stream is not known_stream:
            assert self._spec.model is not None
            head = request_head(self._spec.model, sampling, tools, stream)
            # Only a tuple is known not to have changed when it comes again.
            if isinstance(tools, tuple):
                self._head = (sampling, tools, stream, head)
        return head

    def _call_headers(self, context: CallContext) -> Mapping[str, str]:
        return {SEED_HEADER: seed_header(context)} if self._spec.seed_header else {}

    async def _try(self, body: bytes, headers: Mapping[str, str], started: float, until: float) -> Completion | Failed:
        reply = await self._channel.post(body, headers, until)
        if isinstance(reply, Failed):
            return reply
        if not 200 <= reply.status < 300:
            return self._refusal(reply)
        model_s = asyncio.get_running_loop().time() - started
        if len(reply.body) <= PARSE_IN_THREAD_BYTES:
            return self._parse(load_json, reply, model_s)
        return await asyncio.to_thread(self._parse, load_big_json, reply, model_s)

    def _refusal(self, reply: Reply) -> Failed:
        return refusal(reply.status, reply.headers, reply.body, self._channel.where, self._channel.redact)

    def _parse(self, load: Callable[[bytes], Any], reply: Reply, model_s: float) -> Completion | Failed:
        try:
            return completion_of(load(reply.body), model_s, reply.headers.get(WEIGHT_VERSION_HEADER))
        except ModelError as error:
            failed = self._channel.failed(error)
        return failed

    async def _open(self, body: bytes, headers: Mapping[str, str], until: float) -> Stream | Failed:
        stream = await self._channel.open(body, headers, until)
        if isinstance(stream, Failed):
            return stream
        if 200 <= stream.status < 300:
            return stream
        try:
            content = await stream.read_all()
        finally:
            await stream.close()
        return content if isinstance(content, Failed) else self._refusal(Reply(stream.status, stream.headers, content))


def clean_key(spec: ModelSpec, api_key: str | None) -> str | None:
    """The key without surrounding blanks (a file's newline). Raises InputError, which does not show it."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            "the API key holds characters that no HTTP header can carry",
            where=f"models.{spec.name}.api_key_env",
            fix=f"check the value of {spec.api_key_env or 'OPENAI_API_KEY'}",
        )
    return key or None
