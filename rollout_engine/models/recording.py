"""Reads recorded answers: JSONL (also .gz), Parquet, or an earlier run directory. Every row is checked."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models.replay import Answers
from rollout_engine.models.wire import clean

_BATCH_ROWS = 8192
_MAX_ATTEMPT = 2**31
_FIX = 'a row is {"task_id": TEXT, "content": TEXT} and, where they matter, "model": TEXT and "attempt": NUMBER'
_FIX_FILE = "give a JSONL or Parquet file of answers, or a run directory"
_SCHEMA = pa.schema(
    [("task_id", pa.string()), ("content", pa.large_string()), ("model", pa.string()), ("attempt", pa.int32())]
)
_NEEDED = ("task_id", "content")


class Row(NamedTuple):
    """One recorded answer. None for model or attempt: the same answer for all."""

    task_id: str
    content: str
    model: str | None = None
    attempt: int | None = None


def recorded_name(spec: ModelSpec) -> str:
    """The model's name in its recording: `model` where the spec says so, else its own name."""
    return spec.model if spec.model is not None else spec.name


def load_answers(spec: ModelSpec) -> Answers:
    """The recorded answers of one replay model. Raises InputError that names file, line and field."""
    where = f"models.{spec.name}.file"
    if spec.file is None:
        raise InputError("a replay model needs a file of answers", where, f"-m {spec.name}=replay:FILE")
    path, name = Path(spec.file), recorded_name(spec)
    try:
        table = _run_table(path) if path.is_dir() else _file_table(path, name)
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read {path}: {reason}", where, _FIX_FILE) from error
    if not table.num_rows:
        raise InputError("there are no answers in it", str(path), _FIX)
    return _answers_of(table, name, spec, path)


def _answers_of(table: pa.Table, name: str, spec: ModelSpec, path: Path) -> Answers:
    """Keeps the rows of one model: a host may hold several models of one big recording."""
    known = table["model"].unique().to_pylist()
    if None not in known and name not in known:
        there = ", ".join(sorted(known))
        fix = f"-m {spec.name}.model=NAME_IN_THE_FILE"
        raise InputError(f"no row is of model {name!r} (there are: {there})", str(path), fix)
    table = table.filter(pc.or_kleene(table["model"].is_null(), pc.equal(table["model"], name)))
    answers = Answers(table, str(path))
    doubled = answers.doubled()
    if doubled is not None:
        row = table.slice(doubled[0], 1).to_pylist()[0]
        which = ", ".join(f"{key} {row[key]!r}" for key in ("task_id", "model", "attempt") if row[key] is not None)
        raise InputError(f"two rows answer {which}", str(path), "keep one of them, or number them with `attempt`")
    return answers


def _file_table(path: Path, name: str) -> pa.Table:
    with path.open("rb") as file:
        magic = file.read(4)
    return _parquet_table(path) if magic == b"PAR1" else _jsonl_table(path, name, packed=magic[:2] == b"\x1f\x8b")


def _jsonl_table(path: Path, name: str, *, packed: bool) -> pa.Table:
    """Rows of other models are checked; of each such model only one is kept, for the list of names."""
    batches: list[pa.RecordBatch] = []
    rows: list[Row] = []
    others: set[str] = set()
    for row in _jsonl_rows(path, packed):
        if row.model in (None, name):
            rows.append(row)
        elif row.model not in others:
            others.add(str(row.model))
            rows.append(row)
        if len(rows) >= _BATCH_ROWS:
            batches.append(_batch(rows))
            rows = []
    return pa.Table.from_batches([*batches, _batch(rows)], _SCHEMA)


def _batch(rows: list[Row]) -> pa.RecordBatch:
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(_SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _jsonl_rows(path: Path, packed: bool) -> Iterator[Row]:
    number = 0
    try:
        with _open_text(path, packed) as file:
            for line in file:
                number += 1
                if line.strip():
                    yield _row(line, f"{path}:{number}")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"not readable from here on: {error}", f"{path}:{number + 1}", _FIX_FILE) from error


def _open_text(path: Path, packed: bool) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8")


def _row(line: str, where: str) -> Row:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where, _FIX) from error
    if not isinstance(data, dict):
        raise InputError(f"a JSON {type(data).__name__}, not an object", where, _FIX)
    _known_fields(data, where)
    task_id, content, model, attempt = (data.get(field.name) for field in _SCHEMA)
    for name, value in (("task_id", task_id), ("content", content), ("model", model)):
        if not (isinstance(value, str) or (name == "model" and value is None)):
            raise InputError(f"{name} is {_found(data, name)}, not a text", where, _FIX)
    if not (attempt is None or (type(attempt) is int and 0 <= attempt < _MAX_ATTEMPT)):
        raise InputError(f"attempt is {_found(data, 'attempt')}, not a number from 0", where, _FIX)
    return Row(clean(str(task_id)), clean(str(content)), model and clean(str(model)), attempt)


def _known_fields(names: Any, where: str) -> None:
    # Strict: "atempt" would otherwise silently give the same answer to all attempts.
    unknown = sorted(set(names) - set(_SCHEMA.names))
    if unknown:
        raise InputError(f"unknown field {unknown[0]!r}", where, _FIX)


def _found(data: dict[str, Any], name: str) -> str:
    return f"{data[name]!r:.80}" if name in data else "missing"


def _parquet_table(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _known_fields(names, str(path))
        for name in _NEEDED:
            if name not in names:
                raise InputError(f"there is no column {name}", str(path), _FIX)
        return _cast(file.read(), path)


def _cast(table: pa.Table, path: Path) -> pa.Table:
    columns = []
    for field in _SCHEMA:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            columns.append(table[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise InputError(f"column {field.name}: {error}", str(path), _FIX) from error
        if field.name in _NEEDED and columns[-1].null_count:
            row = pc.index(columns[-1].is_null(), True).as_py() + 1
            raise InputError(f"row {row}: {field.name} is null", str(path), _FIX)
    return pa.table(columns, schema=_SCHEMA)


def _run_table(path: Path) -> pa.Table:
    """The final answers of an earlier run; of several rounds of a task, the first one's."""
    files = sorted((path / "rollouts").glob("*.parquet"))
    if not files:
        fix = f"give the directory of a run that has ended, or end it: rollout resume {path}"
        raise InputError("there is no rollouts/*.parquet in it", str(path), fix)
    wanted = ["task_id", "final_answer", "model", "attempt", "round"]
    table = pa.concat_tables([pq.read_table(file, columns=wanted) for file in files])
    table = table.filter(table["final_answer"].is_valid())
    table = table.set_column(1, "content", table["final_answer"].cast(pa.large_string())).sort_by("round")
    keys = ["task_id", "model", "attempt"]
    table = table.group_by(keys, use_threads=False).aggregate([("content", "first")])
    return _cast(table.rename_columns([*keys, "content"]), path)
