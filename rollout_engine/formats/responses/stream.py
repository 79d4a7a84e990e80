"""Streamed answers of the responses format: items that are added, filled and done, within one response."""

from __future__ import annotations

from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.formats.base import Asked, named_event
from rollout_engine.formats.parts import Block, Said, tool_call
from rollout_engine.formats.responses.items import call_item, output_thought
from rollout_engine.formats.responses.response import completion_of, ending, message_item, output_items, response_head
from rollout_engine.models.sse import NOTHING
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Delta, ToolPiece


class ResponsesWriter:
    """response.created, the items one after the other, response.completed. A call is sent when it is whole."""

    ping = b": keep-alive\n\n"

    def __init__(self, asked: Asked, number: int, created: int) -> None:
        self._asked, self._number = asked, number
        self._head = response_head(asked, number, created)
        self._said = Said()
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None
        """text, thought, or none."""
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}
        """By index: id, name, and the pieces of the arguments."""

    def begin(self) -> bytes:
        return self._event("created", response=self._head) + self._event("in_progress", response=self._head)

    def write(self, delta: Delta) -> bytes:
        self._said.note(delta)
        out = []
        if delta.reasoning:
            out += [self._opened("thought"), self._fill("reasoning_text.delta", delta.reasoning)]
        if delta.block is not None:
            out.append(self._thought_ends(dict(delta.block)))
        if delta.content:
            out += [self._opened("text"), self._fill("output_text.delta", delta.content)]
        for piece in delta.tools:
            call = self._calls.setdefault(piece.index, [piece.id, piece.name])
            call[0], call[1] = call[0] or piece.id, call[1] or piece.name
            call.append(piece.arguments)
        return b"".join(out)

    def end(self, completion: Completion) -> bytes:
        out = [self.write(delta) for delta in self._said.rest(completion)]
        out.append(self._closed())
        out += [self._call(index) for index in sorted(self._calls)]
        # The items as they were sent, not as they would be: their ids are known by now.
        whole = output_items(completion.message, self._number, self._asked.free_text)
        if not self._items and whole:
            out += [self._whole_item(item) for item in whole]
        response = {**self._head, **ending(completion), "output": self._items}
        out.append(self._event(response["status"], response=response))
        return b"".join(out)

    def error(self, status: int, message: str, code: str) -> bytes:
        error = {"code": code, "message": message}
        return self._event("failed", response={**self._head, "status": "failed", "error": error})

    def _opened(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        closed = self._closed()
        self._open, self._text = kind, []
        if kind == "thought":
            item = {**output_thought({"type": "reasoning", "text": ""}, self._thought_id()), "content": []}
            return closed + self._event("output_item.added", output_index=len(self._items), item=item)
        item = {**message_item("", self._number), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        added = self._event("output_item.added", output_index=len(self._items), item=item)
        return closed + added + self._at("content_part.added", content_index=0, part=part)

    def _fill(self, kind: str, text: str) -> bytes:
        self._text.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text.delta" else {}
        return self._at(kind, content_index=0, delta=text, **more)

    def _thought_ends(self, block: Block) -> bytes:
        if self._open != "thought":
            closed = self._closed()
            return closed + self._whole_item(output_thought(block, self._thought_id()))
        return self._closed(block)

    def _closed(self, block: Block | None = None) -> bytes:
        """Ends the open item."""
        if self._open is None:
            return b""
        text, kind = "".join(self._text), self._open
        if kind == "thought":
            thought = block if block is not None else {"type": "reasoning", "text": text}
            item = output_thought({**thought, "text": text}, self._thought_id())
            out = self._at("reasoning_text.done", content_index=0, text=text)
        else:
            item = message_item(text, self._number)
            out = self._at("output_text.done", content_index=0, text=text, logprobs=[])
            out += self._at("content_part.done", content_index=0, part=item["content"][0])
        self._open = None
        return out + self._done(item)

    def _call(self, index: int) -> bytes:
        call_id, name, *pieces = self._calls[index]
        item = call_item(tool_call(call_id, name, "".join(pieces)), self._asked.free_text)
        return self._whole_item({**item, "id": f"fc_{self._number}_{index}", "status": "completed"})

    def _whole_item(self, item: dict[str, Any]) -> bytes:
        """An item that is sent at once."""
        at, where = len(self._items), {"item_id": item.get("id"), "output_index": len(self._items)}
        if item["type"] == "function_call":
            opened = {**item, "arguments": "", "status": "in_progress"}
            out = self._event("output_item.added", output_index=at, item=opened)
            out += self._event("function_call_arguments.delta", **where, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            return out + self._event("function_call_arguments.done", **where, **done) + self._done(item)
        return self._event("output_item.added", output_index=at, item=item) + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        out = self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return out

    def _at(self, kind: str, **fields: Any) -> bytes:
        item_id = f"msg_{self._number}" if self._open == "text" else self._thought_id()
        return self._event(kind, item_id=item_id, output_index=len(self._items), **fields)

    def _thought_id(self) -> str:
        return f"rs_{self._number}_{len(self._items)}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind, number = f"response.{kind}", self._events
        self._events += 1
        return named_event(kind, encode({"type": kind, "sequence_number": number, **fields}))


class ResponsesAssembler:
    """Puts the events of one answer together. The last one holds the whole response; the items say the same."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._items: dict[int, Any] = {}
        self._calls: dict[int, int] = {}
        self.ended = False

    @property
    def finished(self) -> bool:
        """The server said why it stopped."""
        return self.ended

    def add(self, event: Any) -> Delta:
        """Takes one event in; what is new. Raises ModelBadResponse."""
        if not isinstance(event, dict):
            raise ModelBadResponse(f"a streamed event is a JSON {type(event).__name__}, not an object")
        kind, index = str(event.get("type")), event.get("output_index")
        if kind in ("response.completed", "response.incomplete"):
            self.ended = True
            self._whole = event["response"] if isinstance(event.get("response"), dict) else {}
        elif kind == "response.output_item.done" and isinstance(index, int):
            return self._done(index, event.get("item"))
        elif kind == "response.output_item.added" and isinstance(index, int):
            return self._added(index, event.get("item"))
        delta = event.get("delta")
        return self._delta(kind, index, delta) if isinstance(delta, str) else NOTHING

    def _delta(self, kind: str, index: Any, delta: str) -> Delta:
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return Delta(delta)
        if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            return Delta(reasoning=delta)
        if kind == "response.function_call_arguments.delta" and index in self._calls:
            return Delta(tools=(ToolPiece(self._calls[index], delta),))
        return NOTHING

    def _added(self, index: int, item: Any) -> Delta:
        if isinstance(item, dict) and item.get("type") == "function_call":
            self._calls[index] = len(self._calls)
            call_id, name = str(item.get("call_id") or ""), str(item.get("name") or "")
            return Delta(tools=(ToolPiece(self._calls[index], "", call_id, name),))
        return NOTHING

    def _done(self, index: int, item: Any) -> Delta:
        self._items[index] = item
        if isinstance(item, dict) and item.get("type") == "reasoning" and item.get("encrypted_content"):
            summary = [str(part.get("text")) for part in item.get("summary") or () if isinstance(part, dict)]
            block = {"type": "reasoning", "text": "\n\n".join(summary), "encrypted": item["encrypted_content"]}
            if summary:
                block["summary"] = summary
            return Delta(block={**block, "id": str(item.get("id") or "")})
        return NOTHING

    def completion(self, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The whole answer. Raises what `completion_of` raises."""
        output = self._whole.get("output")
        if not output:  # some servers leave it out of the last event
            output = [self._items[index] for index in sorted(self._items)]
        return completion_of({**self._whole, "output": output}, model_s, weight_version)
