"""The format of `plan/E.jsonl`: a header line, then one line per slot, written and read without parsing the task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rollout_engine.errors import RunError
from rollout_engine.store.files import open_regular, reading
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import named

MAX_LINE_BYTES = 256 << 20
"""No task's entry is longer."""
_ENTRY = re.compile(
    rb'\{"slot":(\d+),"round":(-?\d+),"task_id":("(?:[^"\\\n]|\\.)*"),"digest":"([^"\\\n]*)","task":(.*)\}\n', re.DOTALL
)


class Header(NamedTuple):
    """The first line: the shape of the key space, and the slot with which this epoch goes on."""

    epoch: int
    first_slot: int
    m: int
    k: int
    models: tuple[str, ...]


class PlanEntry(NamedTuple):
    """One slot of the plan: which task in which round, and the task's body as it was submitted."""

    slot: int
    round: int
    task_id: str
    digest: str
    body: bytes


class Line(NamedTuple):
    """An entry as the file has it; `name` is the task id as JSON."""

    slot: int
    round: int
    name: bytes
    length: int


def header_line(header: Header) -> bytes:
    return json.dumps(header._asdict(), separators=(",", ":")).encode() + b"\n"


def quoted(task_id: str) -> bytes:
    """The one JSON form of a task id in a plan."""
    return json.dumps(task_id).encode()


def entry_line(slot: int, round: int, name: bytes, digest: str, body: bytes) -> bytes:
    return b'{"slot":%d,"round":%d,"task_id":%b,"digest":"%b","task":%b}\n' % (slot, round, name, digest.encode(), body)


def parse_entry(line: bytes) -> PlanEntry | None:
    """None where the line is no entry."""
    found = _ENTRY.fullmatch(line)
    if found is None:
        return None
    slot, round, name, digest, body = found.groups()
    return PlanEntry(int(slot), int(round), json.loads(name), digest.decode(), body)


def read_header(path: Path) -> Header | None:
    """None where the epoch was killed before its header was whole: it planned nothing. Raises RunError."""
    with reading(path), open_regular(path) as file:
        line = file.readline(1 << 20)
        return _header(path, line) if line.endswith(b"\n") else None


def _header(path: Path, line: bytes) -> Header:
    with reading(path):
        fields = json.loads(line)
        header = Header(**{**fields, "models": tuple(fields["models"])})
        if not all(isinstance(number, int) and number >= 0 for number in header[:4]) or f"{header.epoch}" != path.stem:
            raise ValueError("its first line is no plan header")
        return header


def headers(layout: Layout) -> dict[int, Header]:
    """The headers of all epochs that planned, in order. Raises RunError."""
    found = {}
    for path in layout.plan.glob("*.jsonl"):
        if path.stem.isdecimal() and (header := read_header(path)) is not None:
            found[header.epoch] = header
    return dict(sorted(found.items()))


def slot_limits(known: Mapping[int, Header]) -> dict[int, int]:
    """Epoch -> the slot from which a later epoch went on.

    What a superseded driver planned or committed from there on is void: the later epoch gave those numbers to
    other tasks.
    """
    return {header.epoch: later.first_slot for header, later in pairwise(known.values())}


def read_lines(path: Path, first_slot: int, stop: int | None) -> Iterator[Line]:
    """The entries of one file; a torn last line is none. Raises RunError where a line is damaged or a slot missing."""
    slot = first_slot
    with reading(path), open_regular(path) as file:
        file.readline()
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            if slot == stop or not line.endswith(b"\n"):
                break
            found = _ENTRY.fullmatch(line)
            if found is None or int(found[1]) != slot:
                raise RunError(f"{named(path)}: line {slot - first_slot + 2} is not the entry of slot {slot}")
            yield Line(slot, int(found[2]), found[3], len(line))
            slot += 1
    if stop is not None and slot < stop:
        raise RunError(f"{named(path)}: slots {slot} to {stop - 1} are missing, on which a later epoch is built")
