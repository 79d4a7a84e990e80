"""The state of a run that is stuck, as text: for a file of the run directory, and an excerpt for a person.

It names rollouts, hosts, models and what is awaited; it holds no prompt, no answer, no key and no local variable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rollout_engine.board import Board, Peer
from rollout_engine.breaker import Breaker
from rollout_engine.errors import describe
from rollout_engine.waiting import Waiting, stuck_longest

ANSWER_S = 10.0
"""The longest that the hosts are asked what they wait for."""
MAX_HOSTS = 200
"""Hosts that a dump tells of."""
MAX_TASKS = 100
"""The driver's own asyncio tasks that it tells of."""
MAX_FRAMES = 12
"""Of each of them, the innermost frames."""
MAX_CHAIN = 100
"""Coroutines that await each other which are followed."""
_AWAITS = ("cr_await", "gi_yieldfrom", "ag_await")
MAX_CHARS = 1_000_000
EXCERPT_LINES = 24
"""What a person is shown at once."""


class HostState(NamedTuple):
    """What a host said when it was asked."""

    host: str
    node: str
    lines: list[str]
    waiting: list[Waiting]


async def ask_hosts(peers: Iterable[Peer]) -> list[HostState]:
    """All at the same time, in bounded time; one that does not answer is told of, too."""
    return list(await asyncio.gather(*(_ask(peer) for peer in list(peers)[:MAX_HOSTS])))


async def _ask(peer: Peer) -> HostState:
    link, waiting = peer.link, list[Waiting]()
    facts = [f"{link.running} running, {link.free_slots} slots free"]
    try:
        async with asyncio.timeout(ANSWER_S):
            waiting = await peer.handle.waiting_for()
    except TimeoutError:
        facts.append(f"does not answer (asked for {ANSWER_S:g} s)")
    except Exception as error:
        facts.append(f"does not answer ({describe(error)})")
    if link.silent_since is not None:
        silent = asyncio.get_running_loop().time() - link.silent_since
        facts.append(f"its exchange has failed for {silent:.0f} s")
    return HostState(link.host_id, peer.handle.node_id, facts, waiting)


def text_of(board: Board, why: str, hosts: list[HostState]) -> str:
    """The whole dump."""
    sections = {
        f"{why}\n{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} epoch {board.epoch}": [],
        "driver": list(_driver_lines(board)),
        "breakers": list(_breaker_lines(board)),
        "leases": board.budgets.describe(),
        "hosts": [line for state in hosts for line in _host_lines(state)],
        "the driver's tasks": list(_task_lines()),
    }
    text = "\n\n".join(
        "\n  ".join([title, *(lines or ["-"] * bool(index))]) for index, (title, lines) in enumerate(sections.items())
    )
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 2] + "…\n"


def excerpt(board: Board, hosts: list[HostState]) -> str:
    """What most likely says why: the driver in a few words, what is broken, and who has waited longest."""
    lines = [*_driver_lines(board), *_breaker_lines(board)]
    lines += [f"{state.host}: {fact}" for state in hosts for fact in state.lines[1:]]
    where = {row.key: state.host for state in hosts for row in state.waiting}
    rows = stuck_longest(row for state in hosts for row in state.waiting)
    lines += [f"{where[row.key]}: {row}" for row in rows]
    more = len(lines) - EXCERPT_LINES
    return "\n".join(f"  {line}" for line in lines[:EXCERPT_LINES]) + (f"\n  ... and {more} more" if more > 0 else "")


def _driver_lines(board: Board) -> Iterator[str]:
    scheduler = board.scheduler
    yield f"{scheduler.pending} rollouts wait for a host, {scheduler.held_count} are held by {len(board.peers)} hosts"
    if board.commits.waiting_bytes:
        yield f"{board.commits.waiting_bytes:,} bytes of rows wait for the disk"
    for submission in board.submissions:
        if submission.stream is not None and submission.stream.unread_rows:
            yield f"{submission.stream.unread_rows:,} rows of round {submission.round} wait to be read"
        if not submission.exhausted:
            yield f"round {submission.round} still has tasks to come"
    if board.draining:
        yield "draining: nothing more is started"
    if board.spent:
        yield board.spent


def _breaker_lines(board: Board) -> Iterator[str]:
    models = zip(board.config.model_names, board.scheduler.breakers, strict=True)
    shut = [(f"model {name}", breaker) for name, breaker in models if breaker.state != "closed"]
    shut += [(str(subject), breaker) for subject, breaker in board.scheduler.circuits.shut()]
    return (_breaker_line(name, breaker) for name, breaker in shut[:MAX_HOSTS])


def _breaker_line(name: str, breaker: Breaker) -> str:
    return f"{name} is {breaker.state.value} (pause {breaker.trips}): it keeps failing with {breaker.kind}"


def _host_lines(state: HostState) -> Iterator[str]:
    yield f"{state.host} on node {state.node}: {'; '.join(state.lines)}"
    yield from (f"  {row}" for row in state.waiting)


def _task_lines() -> Iterator[str]:
    for task in list(asyncio.all_tasks())[:MAX_TASKS]:
        yield task.get_name()
        yield from _frames(task.get_coro())


def _frames(work: Any) -> list[str]:
    """Where a coroutine is, and what it awaits, outermost first; asyncio's own account stops at the first."""
    lines: list[str] = []
    while work is not None and len(lines) < MAX_CHAIN:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None) or getattr(work, "ag_frame", None)
        if frame is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        work = next((each for name in _AWAITS if (each := getattr(work, name, None)) is not None), None)
    return lines[-MAX_FRAMES:]
