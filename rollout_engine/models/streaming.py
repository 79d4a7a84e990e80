"""A streamed response -> the deltas of an answer, with the same kinds of error as a whole one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

from rollout_engine.errors import LimitReached, ModelConnectionError, ModelError
from rollout_engine.formats.base import Assembler, Format
from rollout_engine.models.classify import error_within, stream_error
from rollout_engine.models.http import Channel, Stream
from rollout_engine.models.retry import Failed
from rollout_engine.models.sse import DONE, NOTHING, EventSplitter
from rollout_engine.models.wire import PARSE_IN_THREAD_BYTES, WEIGHT_VERSION_HEADER, load_big_json, load_json
from rollout_engine.types import Completion, Delta

T = TypeVar("T")


async def deltas(stream: Stream, channel: Channel, format: Format, started: float) -> AsyncGenerator[Delta, None]:
    """The pieces of the answer; the last carries the whole completion. Raises ModelError and LimitReached."""
    if not stream.headers.get("content-type", "").startswith("text/event-stream"):
        completion = await _unstreamed(stream, channel, format, started)
        text = completion.message["content"]
        if isinstance(text, str) and text:
            yield Delta(text)
        yield Delta(completion=completion)
        return
    assembler = format.assembler()
    async with contextlib.aclosing(_events(stream)) as events:
        async for event in events:
            delta = value_of(await beside(len(event), partial(_take, assembler, event, channel)))
            if delta != NOTHING:
                yield delta
            if assembler.ended:
                break
    yield Delta(completion=await whole_answer(assembler, stream, channel, started))


async def _events(stream: Stream) -> AsyncGenerator[bytes, None]:
    splitter = EventSplitter()
    while piece := value_of(await stream.read()):
        for event in splitter.feed(piece):
            if event == DONE:
                return
            yield event
    for event in splitter.end():
        if event != DONE:
            yield event


def _take(assembler: Assembler, event: bytes, channel: Channel) -> Delta | Failed:
    """Adds one event to the answer; what is new."""
    chunk = loaded(event, channel)
    return chunk if isinstance(chunk, Failed) else added(assembler, chunk, channel)


def loaded(event: bytes, channel: Channel) -> Any | Failed:
    """An event's JSON."""
    load = load_big_json if len(event) > PARSE_IN_THREAD_BYTES else load_json
    try:
        return load(event)
    except ModelError as error:
        failed = channel.failed(error)
    return failed


def added(assembler: Assembler, chunk: Any, channel: Channel) -> Delta | Failed:
    """Adds one parsed event to the answer; what is new."""
    fault = error_within(chunk)
    if fault:
        return Failed(stream_error(fault, channel.where, channel.redact))
    try:
        return assembler.add(chunk)
    except ModelError as error:
        failed = channel.failed(error)
    return failed


async def whole_answer(assembler: Assembler, stream: Stream, channel: Channel, started: float) -> Completion:
    """The answer, once all of its events are there."""
    if not assembler.finished:
        raise ModelConnectionError(f"{channel.where}: the stream ended before the answer did")
    model_s = asyncio.get_running_loop().time() - started
    version = stream.headers.get(WEIGHT_VERSION_HEADER)
    make = partial(_made, channel, partial(assembler.completion, model_s, version))
    return value_of(await beside(stream.bytes_read, make))


async def _unstreamed(stream: Stream, channel: Channel, format: Format, started: float) -> Completion:
    """The answer of a server that does not stream although it was asked to."""
    body = value_of(await stream.read_all())
    model_s = asyncio.get_running_loop().time() - started
    load: Callable[[bytes], Any] = load_big_json if len(body) > PARSE_IN_THREAD_BYTES else load_json
    version = stream.headers.get(WEIGHT_VERSION_HEADER)
    make = partial(_made, channel, lambda: format.completion(load(body), model_s, version))
    return value_of(await beside(len(body), make))


def _made(channel: Channel, make: Callable[[], Completion]) -> Completion | Failed:
    try:
        return make()
    except (ModelError, LimitReached) as error:
        failed = channel.failed(error) if isinstance(error, ModelError) else Failed(error)
    return failed


async def beside(size: int, work: Callable[[], T]) -> T:
    """Runs work on a big text beside the event loop, and on a small one on the spot."""
    return await asyncio.to_thread(work) if size > PARSE_IN_THREAD_BYTES else work()


def value_of(outcome: T | Failed) -> T:
    """The value; raises the error of a failed step, outside of any handler, so that nothing hangs on to it."""
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome
