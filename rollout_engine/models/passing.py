"""A streamed response handed on byte by byte, while what it says is put together beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.formats.base import Assembler, Format
from rollout_engine.models.base import Piece
from rollout_engine.models.http import Channel, Stream
from rollout_engine.models.retry import Failed
from rollout_engine.models.sse import DONE, EventSplitter
from rollout_engine.models.streaming import added, beside, loaded, value_of, whole_answer


async def pieces(
    stream: Stream, channel: Channel, format: Format, started: float, hide_usage: bool
) -> AsyncGenerator[Piece, None]:
    """The bytes as they come; those that end the answer are held until it is whole. Raises ModelError, LimitReached."""
    if not stream.headers.get("content-type", "").startswith("text/event-stream"):
        raise ModelBadResponse(f"{channel.where}: the answer is no stream of events")
    splitter, assembler = EventSplitter(), format.assembler()
    whole = partial(whole_answer, assembler, stream, channel, started)
    told = False
    while data := value_of(await stream.read()):
        feed = partial(_feed, splitter, data, assembler, channel, hide_usage)
        ended, kept = value_of(await beside(len(data), feed))
        sent = kept if hide_usage else data
        if ended and not told:
            told = True
            yield Piece(sent, await whole())
        elif sent:
            yield Piece(sent)
    if not told:
        _, kept = value_of(_take(assembler, splitter.end(), channel, hide_usage))
        yield Piece(kept if hide_usage else b"", await whole())


def _feed(
    splitter: EventSplitter, data: bytes, assembler: Assembler, channel: Channel, hide_usage: bool
) -> tuple[bool, bytes] | Failed:
    return _take(assembler, splitter.feed(data), channel, hide_usage)


def _take(
    assembler: Assembler, events: Iterable[bytes], channel: Channel, hide_usage: bool
) -> tuple[bool, bytes] | Failed:
    """Adds events to the answer: whether that was its end, and the events that the agent is to see."""
    ended, seen = False, []
    for event in events:
        if event == DONE:
            ended = True
        else:
            chunk = loaded(event, channel)
            failed = chunk if isinstance(chunk, Failed) else added(assembler, chunk, channel)
            if isinstance(failed, Failed):
                return failed
            ended = ended or assembler.ended
            if hide_usage and _only_usage(chunk):
                continue
        if hide_usage:
            seen.append(b"data: " + event.replace(b"\n", b"\ndata: ") + b"\n\n")
    return ended, b"".join(seen)


def _only_usage(chunk: Any) -> bool:
    return isinstance(chunk, dict) and chunk.get("choices") == [] and bool(chunk.get("usage"))
