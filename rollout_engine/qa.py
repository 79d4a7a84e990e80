"""Tasks out of a data set: rows of a JSONL or Parquet file become questions with answers, as a TOML file says.

    rows = "questions.parquet"         # next to this file, or absolute
    question = "problem"               # its columns
    answer = "answer"
    id = "id"                          # left out: the hash of the task's content
    before = "Solve this.\\n\\n"         # put around the question, as they are: nothing in them is filled in
    after = "\\n\\nPut the answer in \\\\boxed{}."
    answer_pattern = "#### (.*)"       # the last match in the answer column is the answer
    solution = "\\boxed{{answer}}"     # how a right answer reads, for scripted models and `tasks check`
    [verifier]                         # `expected` is the answer, in every verifier that takes one and has none
    type = "math"
    [[filter]]                         # only rows within the bounds (both inclusive)
    file = "../runs/a/groups.parquet"  # joined by task_id; left out: a column of the rows themselves
    column = "pass_rate"
    where = { model = "weak" }         # which rows of the file
    min = 0.1
    max = 0.9

`tasks = "tasks.jsonl"` in place of rows, question and answer takes tasks as they are, and only filters them.
A column that is not there is an error. A row whose value is null, or that the joined file does not know, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import regex
from pydantic import Field, ValidationError, model_validator

from rollout_engine.errors import InputError
from rollout_engine.problems import all_of, dotted, problems_of
from rollout_engine.qafilter import Filter, FilterSpec
from rollout_engine.specs import EnvironmentSpec, Spec, Task, TaskLimits
from rollout_engine.taskfile import Row, TaskRows
from rollout_engine.toml import KeyPath, read_toml

EXPECTING = frozenset({"match", "math", "judge"})
"""Types of verifiers whose `expected` is the answer where they have none."""
PATTERN_S = 1.0
"""The longest that `answer_pattern` may take for one row."""


class QaSpec(Spec):
    """The fields of a data set's TOML file. Paths are relative to the working directory, in a file to the file."""

    rows: str | None = None
    question: str = "question"
    answer: str = "answer"
    id: str | None = None
    before: str = ""
    after: str = ""
    system_prompt: str | None = None
    answer_pattern: str | None = None
    solution: str = "{answer}"
    """What scripted models say and `rollout tasks check` tries: {answer} in the form that the verifier reads."""
    verifier: dict[str, Any] = Field(default_factory=lambda: {"type": "match"})
    environment: EnvironmentSpec | None = None
    limits: TaskLimits = TaskLimits()
    tasks: str | None = None
    filter: tuple[FilterSpec, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> QaSpec:
        if (self.rows is None) == (self.tasks is None):
            raise ValueError("give rows (a data set) or tasks (a file of tasks), one of the two")
        others = sorted(self.model_fields_set - {"tasks", "filter"})
        if self.tasks is not None and others:
            raise ValueError(f"with tasks there is nothing but filter; {others[0]} is for rows")
        return self


def qa_tasks(spec: QaSpec) -> Iterator[Task]:
    """The tasks that a data set's description gives, one at a time; for `rollout_engine.run` and `RolloutEngine`.

    Raises InputError: a file that cannot be read, a column that is not there, a row that makes no task.
    """
    return _parsed(QaRows(spec))


def read_spec(path: str | Path) -> QaSpec:
    """The description in a TOML file, with paths that hold from here. Raises InputError that names the lines."""
    path = Path(path)
    fields, lines = read_toml(path)
    try:
        spec = QaSpec.model_validate(fields)
    except ValidationError as error:
        found = problems_of(error, QaSpec, fields)
        raise all_of(
            [InputError(problem.message, _where(path, lines, problem.path), problem.fix) for problem in found]
        ) from error

    def from_here(name: str | None) -> str | None:
        return None if name is None else str(path.parent / name)

    filters = tuple(each.model_copy(update={"file": from_here(each.file)}) for each in spec.filter)
    return spec.model_copy(update={"rows": from_here(spec.rows), "tasks": from_here(spec.tasks), "filter": filters})


def task_rows(path: str | Path) -> TaskRows | QaRows:
    """The tasks of a file: of tasks itself, or a TOML file that describes a data set. Raises InputError."""
    return QaRows(read_spec(path)) if Path(path).suffix == ".toml" else TaskRows(path)


class QaRows:
    """The tasks of a data set as rows of a file of tasks: each with its place, may be iterated again."""

    def __init__(self, spec: QaSpec) -> None:
        """Raises InputError where a file of it cannot be read, or lacks a column."""
        self._spec = spec
        self._rows = TaskRows(spec.rows or spec.tasks or "", nested=spec.tasks is not None)
        self.path = self._rows.path
        self._filters = [Filter(each) for each in spec.filter]
        self._pattern = None if spec.answer_pattern is None else _compiled(spec.answer_pattern)

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            fields = row.data if isinstance(row.data, dict) else self._object(row.number, row.data)
            task = fields if self._spec.tasks is not None else self._task(row.number, fields)
            if all(self._passes(each, row.number, fields, task) for each in self._filters):
                yield Row(row.number, task)

    @property
    def filtered(self) -> bool:
        """Whether rows may be left out."""
        return bool(self._filters)

    def where(self, number: int, field: str = "", column: int | None = None) -> str:
        """As TaskRows says it; fields of the task that come from a column are called by the column."""
        columns = {"prompt": self._spec.question, "solution": self._spec.answer, "task_id": self._spec.id or "task_id"}
        if self._spec.rows is not None:
            field = columns.get(field, field)
        return self._rows.where(number, field, column)

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"this is no JSON: {error}", self.where(number), "write one JSON object per line"
            ) from error
        if not isinstance(data, dict):
            raise InputError("a row is a JSON object", self.where(number), "write one JSON object per line")
        return data

    def _task(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        spec = self._spec
        answer = self._answer(number, row)
        task: dict[str, Any] = {
            "prompt": spec.before + self._text(number, row, spec.question) + spec.after,
            "verifier": expecting(spec.verifier, answer),
            "solution": spec.solution.replace("{answer}", answer),
            "system_prompt": spec.system_prompt,
            "limits": spec.limits.model_dump(exclude_none=True),
        }
        if spec.environment is not None:
            task["environment"] = spec.environment.model_dump(exclude_unset=True)
        if spec.id is not None:
            task["task_id"] = self._text(number, row, spec.id)
        return task

    def _answer(self, number: int, row: Mapping[str, Any]) -> str:
        text = self._text(number, row, self._spec.answer)
        if self._pattern is None:
            return text
        place = self.where(number, self._spec.answer)
        try:
            found = list(self._pattern.finditer(text, timeout=PATTERN_S))
        except TimeoutError:
            raise InputError(
                f"answer_pattern took more than {PATTERN_S:g} s", place, "write a pattern that does not backtrack"
            ) from None
        if not found:
            raise InputError("answer_pattern finds nothing in it", place, "correct the pattern, or the row")
        return next((group for group in reversed(found[-1].groups()) if group is not None), found[-1][0]).strip()

    def _text(self, number: int, row: Mapping[str, Any], column: str) -> str:
        value = cell(row, column, self._rows.where(number))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            found = "null" if value is None else f"{value!r:.60}"
            raise InputError(f"must be text or a number, found {found}", self._rows.where(number, column), "correct it")
        return str(value)

    def _passes(self, each: Filter, number: int, row: Mapping[str, Any], task: Mapping[str, Any]) -> bool:
        if each.joins:
            try:
                return each.keeps(each.value_of(Task.model_validate(task).task_id))
            except ValidationError:
                return True  # whoever reads it says what is wrong with it
        metadata = row.get("metadata")
        columns = row if self._spec.rows is not None else metadata if isinstance(metadata, Mapping) else {}
        return each.keeps(each.number(cell(columns, each.column, self._rows.where(number)), self._rows.where(number)))


def cell(row: Mapping[str, Any], column: str, where: str) -> Any:
    """The value of a column. Raises InputError where the row has no such column; null is a value."""
    if column not in row:
        raise InputError(
            f"there is no column {column!r} (columns: {', '.join(map(str, row)) or 'none'})", where, "name one of them"
        )
    return row[column]


def expecting(verifier: Any, answer: str) -> Any:
    """A verifier's spec whose verifiers, nested ones too, expect the answer where they expect nothing else."""
    if not isinstance(verifier, Mapping):
        return verifier
    filled = dict(verifier)
    if filled.get("type") in EXPECTING and filled.get("expected") is None:
        filled["expected"] = answer
    if filled.get("type") == "hybrid":
        filled |= {name: expecting(filled[name], answer) for name in ("rule", "judge") if name in filled}
    components = filled.get("components")
    if filled.get("type") == "composite" and isinstance(components, Mapping):
        filled["components"] = {
            name: {**each, "verifier": expecting(each.get("verifier"), answer)} if isinstance(each, Mapping) else each
            for name, each in components.items()
        }
    return filled


def _parsed(rows: QaRows) -> Iterator[Task]:
    for row in rows:
        data: Any = row.data
        try:
            yield Task.model_validate(data)
        except ValidationError as error:
            first = problems_of(error, Task, data)[0]
            raise InputError(first.message, rows.where(row.number, first.field), first.fix) from error


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise InputError(
            f"{pattern!r} is no regular expression: {error}", "answer_pattern", "escape what is meant literally"
        ) from error


def _where(path: Path, lines: Mapping[KeyPath, int], field: tuple[str | int, ...]) -> str:
    """`qa.toml:7: field 'filter.0.min'`: the line of the field, or of the nearest table around it."""
    names = tuple(str(part) for part in field if not isinstance(part, int))
    number = next((lines[names[:length]] for length in range(len(names), 0, -1) if names[:length] in lines), None)
    place = str(path) if number is None else f"{path}:{number}"
    return f"{place}: field '{dotted(field)}'" if field else place
