"""Reads the rows of a task file, JSONL (also gzipped) or Parquet, one at a time and each with its place."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.errors import InputError
from rollout_engine.problems import dotted

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is taken for a file that is no JSONL."""
PARQUET_ROWS = 256
"""Rows of a Parquet file that are decoded at once."""

_BOM = b"\xef\xbb\xbf"
_NESTED = frozenset(
    {
        *("environment", "env_variables", "files", "setup", "services", "tools"),
        *("workspace", "verifier", "limits", "metadata"),
    }
)
"""Fields that a table may hold as a struct or as JSON text."""


class Row(NamedTuple):
    """One task as it was written: a line of JSON, or the columns of a table."""

    number: int
    """From 1; blank lines are counted, and give no row."""
    data: bytes | dict[str, Any]


class TaskRows:
    """The rows of one file; may be iterated again. What it holds is told by its first bytes, not by its name."""

    def __init__(self, path: str | Path, *, nested: bool = True) -> None:
        """Raises InputError where there is no readable file. `nested` False: rows stay as they are."""
        self.path = Path(path)
        self._nested = _NESTED if nested else None
        with self._named(0), open(self.path, "rb") as file:
            self._magic = file.read(4)

    def __iter__(self) -> Iterator[Row]:
        return self._parquet() if self._magic == b"PAR1" else self._jsonl()

    def where(self, number: int, field: str = "", column: int | None = None) -> str:
        """`tasks.jsonl:17`, or `tasks.jsonl:17:203` with a column, or `tasks.jsonl:17: field 'prompt'`."""
        place = f"{self.path}: row {number}" if self._magic == b"PAR1" else f"{self.path}:{number}"
        if column is not None:
            place += f":{column}"
        return f"{place}: field '{field}'" if field else place

    def _jsonl(self) -> Iterator[Row]:
        number = 0
        with self._named(number), self._open() as file:
            while True:
                number += 1
                with self._named(number):
                    line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"a line of more than {MAX_LINE_BYTES >> 20} MiB",
                        self.where(number),
                        "write one JSON object per line (JSONL), or use Parquet",
                    )
                if number == 1:
                    line = line.removeprefix(_BOM)
                if not line.isspace():
                    yield Row(number, line)

    def _open(self) -> BufferedIOBase:
        return gzip.open(self.path, "rb") if self._magic[:2] == b"\x1f\x8b" else open(self.path, "rb")

    def _parquet(self) -> Iterator[Row]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = 0
        try:
            with self._named(0), pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                    for row in batch.to_pylist(maps_as_pydicts="lossy"):
                        number += 1
                        yield Row(number, self._columns(number, row))
        except pa.ArrowException as error:
            raise InputError(f"this Parquet file cannot be read: {error}", str(self.path), "write it again") from error

    def _columns(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        if self._nested is None:
            return row
        columns = {}
        for name, value in row.items():
            if name in self._nested and isinstance(value, str):
                try:
                    columns[name] = json.loads(value)
                except ValueError as error:
                    raise InputError(
                        f"this text is no JSON: {error}", self.where(number, dotted([name])), "write JSON or a struct"
                    ) from error
            elif not name.startswith("__index_level_"):  # pandas' own
                value = _without_nulls(value)
                if value is not None:
                    columns[name] = value
        return columns

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        where = self.where(number) if number else str(self.path)
        try:
            yield
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise InputError(f"the gzip stream is damaged: {error}", where, "write or copy the file again") from error
        except OSError as error:
            raise InputError(
                f"cannot be read: {error.strerror or error}", where, "name a JSONL or Parquet file of tasks"
            ) from error


def _without_nulls(value: Any) -> Any:
    """Every row of a table has every column: null, and a struct of nothing but nulls, mean absent."""
    if isinstance(value, dict):
        kept = {name: inner for name, each in value.items() if (inner := _without_nulls(each)) is not None}
        return kept or None if value else value
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
