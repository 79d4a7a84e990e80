"""A streamed response -> the deltas of an answer, with the same kinds of error as a whole one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

from rollout_engine.errors import LimitReached, ModelConnectionError, ModelError
from rollout_engine.models.classify import stream_error
from rollout_engine.models.http import Channel, Stream
from rollout_engine.models.retry import Failed
from rollout_engine.models.sse import DONE, Assembler, EventSplitter
from rollout_engine.models.wire import (
    PARSE_IN_THREAD_BYTES,
    WEIGHT_VERSION_HEADER,
    completion_of,
    load_big_json,
    load_json,
)
from rollout_engine.types import Completion, Delta

T = TypeVar("T")


async def deltas(stream: Stream, channel: Channel, started: float) -> AsyncGenerator[Delta, None]:
    """The pieces of the answer; the last carries the whole completion. Raises ModelError and LimitReached."""
    if not stream.headers.get("content-type", "").startswith("text/event-stream"):
        completion = await _unstreamed(stream, channel, started)
        text = completion.message["content"]
        if isinstance(text, str) and text:
            yield Delta(text)
        yield Delta(completion=completion)
        return
    assembler = Assembler()
    async with contextlib.aclosing(_events(stream)) as events:
        async for event in events:
            text = _value(await _beside(len(event), partial(_take, assembler, event, channel)))
            if text:
                yield Delta(text)
    yield Delta(completion=await _whole(assembler, stream, channel, started))


async def _events(stream: Stream) -> AsyncGenerator[bytes, None]:
    splitter = EventSplitter()
    while piece := _value(await stream.read()):
        for event in splitter.feed(piece):
            if event == DONE:
                return
            yield event
    for event in splitter.end():
        if event != DONE:
            yield event


def _take(assembler: Assembler, event: bytes, channel: Channel) -> str | Failed:
    """Adds one event to the answer; the new text."""
    load = load_big_json if len(event) > PARSE_IN_THREAD_BYTES else load_json
    try:
        chunk = load(event)
        if not (isinstance(chunk, dict) and chunk.get("error")):
            return assembler.add(chunk)
    except ModelError as error:
        failed: ModelError | LimitReached = channel.failed(error).error
    else:
        failed = stream_error(chunk["error"], channel.where, channel.redact)
    return Failed(failed)


async def _whole(assembler: Assembler, stream: Stream, channel: Channel, started: float) -> Completion:
    if not assembler.finished:
        raise ModelConnectionError(f"{channel.where}: the stream ended before the answer did")
    model_s = asyncio.get_running_loop().time() - started
    version = stream.headers.get(WEIGHT_VERSION_HEADER)
    make = partial(_made, channel, partial(assembler.completion, model_s, version))
    return _value(await _beside(stream.bytes_read, make))


async def _unstreamed(stream: Stream, channel: Channel, started: float) -> Completion:
    """The answer of a server that does not stream although it was asked to."""
    body = _value(await stream.read_all())
    model_s = asyncio.get_running_loop().time() - started
    load: Callable[[bytes], Any] = load_big_json if len(body) > PARSE_IN_THREAD_BYTES else load_json
    version = stream.headers.get(WEIGHT_VERSION_HEADER)
    make = partial(_made, channel, lambda: completion_of(load(body), model_s, version))
    return _value(await _beside(len(body), make))


def _made(channel: Channel, make: Callable[[], Completion]) -> Completion | Failed:
    try:
        return make()
    except ModelError as error:
        failed = channel.failed(error)
    return failed


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Runs work on a big text beside the event loop, and on a small one on the spot."""
    return await asyncio.to_thread(work) if size > PARSE_IN_THREAD_BYTES else work()


def _value(outcome: T | Failed) -> T:
    """The value; raises the error of a failed step, outside of any handler, so that nothing hangs on to it."""
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome
