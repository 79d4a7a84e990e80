"""Loads tasks: checks a whole file before anything starts, then streams it; takes Python iterables as well."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from array import array
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from rollout_engine.agents.tools import check_tools
from rollout_engine.chunks import chunks_of
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.problems import MAX_PROBLEMS, all_of, checked, problems_of
from rollout_engine.qa import QaRows, task_rows
from rollout_engine.specs import EnvironmentSpec, Task, task_body
from rollout_engine.taskfile import Row, TaskRows
from rollout_engine.taskplace import check_place, needs_sandbox
from rollout_engine.verifiers import check_verifier
from rollout_engine.verifiers.base import judges_of
from rollout_engine.verifiers.nesting import types_in

TaskSource: TypeAlias = (
    str | Path | Iterable[Task | Mapping[str, Any]] | AsyncIterable[Task | Mapping[str, Any]]
)  # a string is a path

Rows: TypeAlias = TaskRows | QaRows


@dataclass(frozen=True, slots=True)
class TaskFile:
    """What a check found out about a file of tasks."""

    path: str
    count: int
    """Tasks that are selected."""
    total: int
    """Tasks in the file."""
    digest: str
    """Of the selected tasks, in their order; the same for JSONL, gzip and Parquet."""
    sandboxed: int
    """Selected tasks that need a sandbox."""


def check_tasks(
    path: str | Path, config: RunConfig, *, pattern: str | None = None, limit: int | None = None
) -> TaskFile:
    """Checks every line of a task file against the run's config, with 8 bytes of memory a task.

    Raises InputError that lists up to MAX_PROBLEMS problems, each with line, field and what to do.
    """
    rows = task_rows(path)
    problems: list[InputError] = []
    ids, digest, count, sandboxed = array("Q"), hashlib.blake2b(digest_size=16), 0, 0
    chosen = _selection(pattern)
    for task, resolved in _checked(rows, config, problems):
        ids.append(hash(task.task_id) & 0xFFFFFFFFFFFFFFFF)
        if chosen(task.task_id) and (limit is None or count < limit):
            count += 1
            sandboxed += needs_sandbox(resolved, config)
            digest.update(hashlib.blake2b(task_body(task), digest_size=16).digest())
    total = len(ids)
    problems += _duplicates(rows, ids, MAX_PROBLEMS - len(problems))
    if problems:
        raise all_of(problems, MAX_PROBLEMS)
    if count == 0:
        raise _nothing(rows, total, pattern)
    return TaskFile(str(path), count, total, digest.hexdigest(), sandboxed)


def check_task(task: Task, config: RunConfig) -> Task:
    """Finds what only shows against the run's config, and returns the task resolved.

    Raises InputError with the dotted field as its `where`.
    """
    _check_trusted(task, config)
    verifier = check_verifier(task.verifier or {})
    _check_judges(judges_of(verifier), config)
    if isinstance(task.prompt, list):
        for index, message in enumerate(task.prompt):
            if not isinstance(message.get("role"), str):
                raise InputError("a message needs a role", f"prompt.{index}.role", "user, assistant, system or tool")
    for name in task.files:
        if not name or ".." in name.split("/"):
            raise InputError(f"{name!r} is no path inside the workspace", "files", "give a path below the workspace")
    resolved = resolve(task, config)
    if resolved.tools:
        check_tools(resolved.tools, config.agent)
    check_place(resolved, verifier, config, "env_key" if task.env_key else "environment")
    return resolved


def _check_trusted(task: Task, config: RunConfig) -> None:
    """Code that a task names by `module:attribute` would run on the hosts, outside of any sandbox."""
    named = dict(types_in(task.verifier or {}))
    named |= {f"tools.{index}.function": tool.function for index, tool in enumerate(task.tools)}
    for where, path in named.items():
        if (
            isinstance(path, str)
            and ":" in path
            and not any(fnmatch.fnmatch(path, each) for each in config.trusted_code)
        ):
            raise InputError(
                f"the task names {path!r}, which would run on the hosts and is not trusted",
                where,
                f'if you trust it, add it to the config: trusted_code = ["{path}"]',
            )


def _check_judges(names: Iterable[str | None], config: RunConfig) -> None:
    for name in names:
        if config.judge(name) is None:
            known = ", ".join(config.judges) or "none"
            asked = "a judge that it does not name" if name is None else f"the judge {name!r}, which is not there"
            raise InputError(
                f"the verifier asks {asked} (the config's judges: {known})",
                "verifier.judge",
                f"add [judges.{name or 'NAME'}] to the config (--config), with the fields of a model",
            )


def read_tasks(path: str | Path) -> Iterator[Task]:
    """The tasks of a file, one at a time. Raises InputError at the first that is wrong."""
    rows = task_rows(path)
    for row in rows:
        try:
            task = _parse(row.data)
        except ValidationError as error:
            raise _row_problems(rows, row, error)[0] from error
        yield task


async def iter_tasks(source: TaskSource) -> AsyncIterator[Task]:
    """The tasks of a file, a list, a generator or an asynchronous one. Raises InputError at a wrong one."""
    if isinstance(source, AsyncIterable):
        number = 0
        async for each in source:
            number += 1
            yield _as_task(each, number)
        return
    async with aclosing(task_chunks(source)) as chunks:
        async for chunk in chunks:
            for task in chunk:
                yield task


async def task_chunks(
    source: str | Path | Iterable[Task | Mapping[str, Any]], wanted: Callable[[Task], bool] | None = None
) -> AsyncGenerator[list[Task], None]:
    """The tasks of a file or an iterable, some at a time; it may block, for it is read in a thread.

    A task waits at most about `chunks.CHUNK_S` for others. `wanted`: which of them; None: all. It is asked in that
    thread. Raises InputError at a wrong one, after those before it.
    """
    if isinstance(source, Task | Mapping | bytes):
        raise InputError("this is one task", "tasks", "give a list of tasks, an iterable, or the path of a file")
    items = read_tasks(source) if isinstance(source, str | Path) else iter(source)
    async with aclosing(chunks_of(_as_tasks(items, wanted))) as chunks:
        async for chunk in chunks:
            if chunk:
                yield chunk


def select(tasks: Iterable[Task], *, pattern: str | None = None, limit: int | None = None) -> Iterator[Task]:
    """The first `limit` tasks whose id matches a shell pattern (`web-*`)."""
    chosen = _selection(pattern)
    return islice((task for task in tasks if chosen(task.task_id)), limit)


def resolve(task: Task, config: RunConfig) -> Task:
    """The task with env_key and env_variables folded into its environment, so that a host needs no config for it.

    data_key and data_version become the variables DATA_KEY and DATA_VERSION. A task that has no environment and
    needs no sandbox gets none: only its verifier's has the variables. Raises InputError for an unknown env_key.
    """
    data = {"DATA_KEY": task.data_key, "DATA_VERSION": task.data_version}
    variables = {**{name: value for name, value in data.items() if value is not None}, **task.env_variables}
    if task.env_key is None and not (variables and needs_sandbox(task, config)):
        return task if variables == task.env_variables else task.model_copy(update={"env_variables": variables})
    base = task.environment or EnvironmentSpec()
    if task.env_key is not None:
        try:
            base = config.environment(task.env_key)
        except InputError as error:
            raise InputError(error.message, "env_key", error.fix) from error
    environment = base.model_copy(update={"env": {**base.env, **variables}})
    return task.model_copy(update={"environment": environment, "env_key": None, "env_variables": {}})


def _parse(data: bytes | dict[str, Any]) -> Task:
    return Task.model_validate_json(data) if isinstance(data, bytes) else Task.model_validate(data)


def _as_task(each: Any, number: int) -> Task:
    if isinstance(each, Task):
        return each
    try:
        return checked(Task, each)
    except InputError as error:
        field = f": field '{error.where}'" if error.where else ""
        raise InputError(error.message, f"task number {number}{field}", error.fix) from error


def _as_tasks(items: Any, wanted: Callable[[Task], bool] | None) -> Generator[Task, None, None]:
    with closing(items) if hasattr(items, "close") else nullcontext():
        for number, each in enumerate(items, 1):
            task = _as_task(each, number)
            if wanted is None or wanted(task):
                yield task


def _checked(rows: Rows, config: RunConfig, problems: list[InputError]) -> Iterator[tuple[Task, Task]]:
    """The tasks of a file that parse, as written and resolved. Adds what is wrong to `problems`, up to so many."""
    for row in rows:
        if len(problems) >= MAX_PROBLEMS:
            return
        try:
            task = _parse(row.data)
        except ValidationError as error:
            problems += _row_problems(rows, row, error)
            continue
        try:
            resolved = check_task(task, config)
        except InputError as error:
            problems.append(InputError(error.message, rows.where(row.number, error.where), error.fix))
            resolved = task
        yield task, resolved


def _row_problems(rows: Rows, row: Row, error: ValidationError) -> list[InputError]:
    data: Any = row.data
    if isinstance(data, bytes):
        hint = "write one JSON object per line, not one array" if data.lstrip()[:1] == b"[" else "correct the line"
        try:
            data = json.loads(data.rstrip().decode())
        except UnicodeDecodeError as fault:
            return [InputError("this is no UTF-8", rows.where(row.number, column=fault.start + 1), "save it as UTF-8")]
        except json.JSONDecodeError as fault:
            return [InputError(f"this is no JSON: {fault.msg}", rows.where(row.number, column=fault.colno), hint)]
        except RecursionError:
            return [InputError("this JSON is nested too deeply", rows.where(row.number), hint)]
        if not isinstance(data, dict):
            return [InputError("a task is a JSON object", rows.where(row.number), hint)]
    return [
        InputError(problem.message, rows.where(row.number, problem.field), problem.fix)
        for problem in problems_of(error, Task, data)
    ]


def _duplicates(rows: Rows, ids: array[int], at_most: int) -> list[InputError]:
    """Equal task_ids. Hashes tell which to look at; a second pass finds the lines, only where there are any."""
    values = np.sort(np.frombuffer(ids, np.uint64)) if ids else np.empty(0, np.uint64)
    suspects = set(values[1:][values[1:] == values[:-1]].tolist())
    first: dict[str, int] = {}
    problems: list[InputError] = []
    for row in rows if suspects and at_most > 0 else ():
        try:
            task = _parse(row.data)
        except ValidationError:
            continue
        if hash(task.task_id) & 0xFFFFFFFFFFFFFFFF not in suspects:
            continue
        if task.task_id not in first:
            first[task.task_id] = row.number
            continue
        place = rows.where(row.number, "task_id")
        problems.append(
            InputError(
                f"{task.task_id!r} is also the task of {rows.where(first[task.task_id])}",
                place,
                "give each task an id of its own (without one, tasks of the same content are the same)",
            )
        )
        if len(problems) >= at_most:
            break
    return problems


def _nothing(rows: Rows, total: int, pattern: str | None) -> InputError:
    if total == 0 and isinstance(rows, QaRows) and rows.filtered:
        return InputError("no row passes every filter", str(rows.path), "widen the bounds of [[filter]]")
    if total == 0:
        return InputError("the file holds no task", str(rows.path), "write one JSON object per line")
    return InputError(f"no task_id matches {pattern!r}", str(rows.path), f"the file has {total} tasks; try --tasks '*'")


def _selection(pattern: str | None) -> Callable[[str], object]:
    return (lambda _: True) if pattern is None else re.compile(fnmatch.translate(pattern)).match
