"""Server-sent events <-> Completion: cutting the stream, putting the pieces together, and taking them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.models.wire import completion_of, encode, logprobs_json, usage_json
from rollout_engine.types import Completion, Delta, ToolPiece

DONE = b"[DONE]"
NOTHING = Delta()
MAX_PIECES = 64
"""A text is streamed in at most this many pieces."""
_PIECE_CHARS = 16


class EventSplitter:
    """Cuts a stream of bytes into the data of its events, wherever the network cut it."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that end in this chunk."""
        if not self._rest and not self._data:
            events = _whole_events(chunk)
            if events is not None:
                return events
        events = []
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if self._rest:
                line = b"".join((*self._rest, line))
                self._rest.clear()
            events.extend(self._line(line.removesuffix(b"\r")))
        if rest:
            self._rest.append(rest)
        return events

    def end(self) -> list[bytes]:
        """The event that the end of the stream ends, where its blank line is missing."""
        return [*self._line(b"".join(self._rest).removesuffix(b"\r")), *self._line(b"")]

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data)
            self._data.clear()


def _whole_events(chunk: bytes) -> list[bytes] | None:
    """The usual chunk at once: whole events of one `data: ` line each. None: it is another."""
    if not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n") or b"\r" in chunk:
        return None
    events = chunk[6:-2].split(b"\n\ndata: ")
    return events if chunk.count(b"\n") == 2 * len(events) else None


class Assembler:
    """Puts the chunks of one answer together."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._others: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._whole: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._stop: Any = None
        self._token_ids: list[Any] | None = None
        self._logprobs: list[Any] | None = None

    @property
    def finished(self) -> bool:
        """The server said why it stopped."""
        return self._finish_reason is not None

    @property
    def ended(self) -> bool:
        """The end has a mark of its own, which is no chunk."""
        return False

    def add(self, chunk: Any) -> Delta:
        """Takes one chunk in; what is new. Raises ModelBadResponse."""
        if not isinstance(chunk, dict):
            raise ModelBadResponse(f"a streamed chunk is a JSON {type(chunk).__name__}, not an object")
        for name in ("usage", "prompt_token_ids", "weight_version", "metadata"):
            if chunk.get(name) is not None:
                self._whole[name] = chunk[name]
        choices = chunk.get("choices")
        if choices in (None, []):  # the last chunk holds only the usage
            return NOTHING
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise ModelBadResponse(f"a streamed chunk has odd choices: {encode(choices)[:200]}")
        return self._choice(choices[0])

    def _choice(self, choice: dict[str, Any]) -> Delta:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._stop = choice.get("stop_reason") or self._stop
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if isinstance(ids, list):
            self._token_ids = self._token_ids if self._token_ids is not None else []
            self._token_ids.extend(ids)
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._logprobs = self._logprobs if self._logprobs is not None else []
            self._logprobs.extend(logprobs["content"])
        delta = choice.get("delta")
        return self._delta(delta) if isinstance(delta, dict) else NOTHING

    def _delta(self, delta: dict[str, Any]) -> Delta:
        text: Any = delta.get("content")
        if len(delta) == 1 and isinstance(text, str):  # nearly all of a stream is this
            self._texts.setdefault("content", []).append(text)
            return Delta(text)
        pieces: tuple[ToolPiece, ...] = ()
        for name, value in delta.items():
            if name == "tool_calls" and isinstance(value, list):
                pieces = tuple([self._tool_call(piece) for piece in value])
            elif name == "role":
                self._others[name] = value
            elif isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                self._others[name] = value
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        return Delta(text if isinstance(text, str) else "", None, thought if isinstance(thought, str) else "", pieces)

    def _tool_call(self, piece: Any) -> ToolPiece:
        if not isinstance(piece, dict):
            raise ModelBadResponse("a streamed tool call is no object")
        index = piece.get("index", 0)
        index = index if isinstance(index, int) else 0
        call = self._calls.setdefault(index, {})
        arguments = call_id = name = ""
        extra: dict[str, Any] = {}
        for field, value in piece.items():
            if field == "function" and isinstance(value, dict):
                function = call.setdefault("function", {"name": "", "arguments": ""})
                arguments, name = str(value.get("arguments") or ""), str(value.get("name") or "")
                function["arguments"] += arguments
                function.update((key, part) for key, part in value.items() if key != "arguments" and part)
            elif field != "index" and value is not None:
                call[field] = value
                if field == "id":
                    call_id = str(value)
                elif field != "type":
                    extra[field] = value
        return ToolPiece(index, arguments, call_id, name, extra or None)

    def completion(self, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The whole answer. Raises what `completion_of` raises."""
        message = {"role": "assistant", **self._others, **{name: "".join(t) for name, t in self._texts.items()}}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        message.setdefault("content", None)
        choice: dict[str, Any] = {
            "message": message,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop,
            "token_ids": self._token_ids,
        }
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs}
        return completion_of({**self._whole, "choices": [choice]}, model_s, weight_version)


def pieces_of(text: str) -> list[str]:
    """The text in a bounded number of pieces of about the same length."""
    size = max(_PIECE_CHARS, -(-len(text) // MAX_PIECES))
    return [text[start : start + size] for start in range(0, len(text), size)]


def chunks_of(completion: Completion, model: str, number: int, created: int) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer: the inverse of `Assembler`."""
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": created, "model": model}
    message = completion.message
    content = message.get("content")
    first = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    if isinstance(content, list):
        first["content"] = content
    if message.get("tool_calls"):
        first["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    opening: dict[str, Any] = {**head, "choices": [{"index": 0, "delta": first, "finish_reason": None}]}
    if completion.prompt_token_ids is not None:
        opening["prompt_token_ids"] = completion.prompt_token_ids
    if completion.weight_version is not None:
        opening["weight_version"] = completion.weight_version
    yield opening
    for choice in _text_choices(completion, content):
        yield {**head, "choices": [choice]}
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": completion.finish_reason}
    if completion.stop_sequence is not None:
        last["stop_reason"] = completion.stop_sequence
    yield {**head, "choices": [last]}
    yield {**head, "choices": [], "usage": usage_json(completion.usage)}


def _text_choices(completion: Completion, content: Any) -> Iterator[dict[str, Any]]:
    """The pieces of the text, each with its share of the tokens."""
    deltas: list[dict[str, str]] = [{}]
    if isinstance(content, str):
        deltas = [{"content": piece} for piece in pieces_of(content) or [""]]
    for at, delta in enumerate(deltas):
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        if completion.completion_token_ids is not None:
            choice["token_ids"] = _share(completion.completion_token_ids, at, len(deltas))
        if completion.logprobs is not None:
            choice["logprobs"] = logprobs_json(_share(completion.logprobs, at, len(deltas)))
        yield choice


def _share(values: list[Any], at: int, parts: int) -> list[Any]:
    return values[at * len(values) // parts : (at + 1) * len(values) // parts]
