"""The format of `plan/E.jsonl`: a header line, then one line per slot, written and read without parsing the task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_engine.errors import RunError
from rollout_engine.store.files import open_regular, reading
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import named

MAX_LINE_BYTES = 256 << 20
"""No task's entry is longer."""
_ENTRY = re.compile(
    rb'^\{"slot":(\d+),"round":(-?\d+),"task_id":("[^"\\\n]*(?:\\.[^"\\\n]*)*"),"digest":"([^"\\\n]*)","task":(.*)\}$'
)
_LINES = re.compile(
    rb'^\{"slot":(\d+),"round":(-?\d+),"task_id":("[^"\\\n]*(?:\\.[^"\\\n]*)*"),"digest":"[^"\\\n]*","task":.*\}$',
    re.MULTILINE,
)
"""The same for many lines, without what only a reader of the task looks at."""
_BLOCK_BYTES = 1 << 20
"""Whole lines of about this size are looked at together."""


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


class Lines(NamedTuple):
    """Entries that follow each other in a file."""

    lengths: npt.NDArray[np.int64]
    """Bytes of each."""
    hashes: list[int]
    """`name_hash` of each."""


def header_line(header: Header) -> bytes:
    return json.dumps(header._asdict(), separators=(",", ":")).encode() + b"\n"


def quoted(task_id: str) -> bytes:
    """The one JSON form of a task id in a plan."""
    return json.dumps(task_id).encode()


def name_hash(round: int, name: bytes) -> int:
    """By what a plan in memory finds a task; differs from process to process."""
    return hash((round, name)) & 0xFFFFFFFF


def entry_line(slot: int, round: int, name: bytes, digest: str, body: bytes) -> bytes:
    return b'{"slot":%d,"round":%d,"task_id":%b,"digest":"%b","task":%b}\n' % (slot, round, name, digest.encode(), body)


def parse_entry(line: bytes) -> PlanEntry | None:
    """None where the line is no entry."""
    found = _ENTRY.match(line)
    if found is None or len(line) != found.end() + 1:
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


def read_lines(path: Path, first_slot: int, stop: int | None) -> Iterator[Lines]:
    """The entries of one file; a torn last line is none. Raises RunError where a line is damaged or a slot missing."""
    slot = first_slot
    with reading(path), open_regular(path) as file:
        file.readline()
        for block in _blocks(file):
            lengths = np.fromiter(map(len, block.split(b"\n")[:-1]), np.int64) + 1
            lengths = lengths if stop is None else lengths[: stop - slot]
            if not len(lengths):
                break
            found = _LINES.findall(block, 0, int(lengths.sum()))
            if [int(number) for number, _, _ in found] != list(range(slot, slot + len(lengths))):
                raise _damaged(path, block, slot, slot - first_slot + 2)
            yield Lines(lengths, [name_hash(int(round), name) for _, round, name in found])
            slot += len(lengths)
    if stop is not None and slot < stop:
        raise RunError(f"{named(path)}: slots {slot} to {stop - 1} are missing, on which a later epoch is built")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file in pieces that end with a line; a last line without an end is left out."""
    rest = b""
    while len(rest) < MAX_LINE_BYTES and (data := file.read(max(_BLOCK_BYTES, len(rest)))):
        whole, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield whole + newline


def _damaged(path: Path, block: bytes, slot: int, number: int) -> RunError:
    """The error that names the first of some lines that is not the entry of its slot."""
    for line in block.splitlines(keepends=True):
        found = parse_entry(line)
        if found is None or found.slot != slot:
            break
        slot, number = slot + 1, number + 1
    return RunError(f"{named(path)}: line {number} is not the entry of slot {slot}")
