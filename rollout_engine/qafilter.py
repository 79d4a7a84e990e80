"""Keeps rows of a data set whose number lies within bounds: a column of their own, or one of a table by task_id."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field, model_validator

from rollout_engine.errors import InputError
from rollout_engine.specs import Spec

KEY = "task_id"


class FilterSpec(Spec):
    """One `[[filter]]` of a data set's TOML file."""

    column: str
    file: str | None = None
    """A Parquet file with a column task_id, such as a run's groups.parquet or rewards.parquet; None: the rows'."""
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    """Only rows of `file` with these values, as {"model": "weak", "round": 0}."""
    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _bounds(self) -> FilterSpec:
        if self.min is None and self.max is None:
            raise ValueError("a filter needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: nothing could pass")
        if self.where and self.file is None:
            raise ValueError("`where` chooses rows of a `file`, and there is none")
        return self


class Filter:
    """A filter with what it needs in memory."""

    def __init__(self, spec: FilterSpec) -> None:
        """Raises InputError where the table cannot be read, lacks a column, or names a task twice."""
        self.column, self._spec = spec.column, spec
        self._table = None if spec.file is None else by_task(read_columns(spec), spec)

    @property
    def joins(self) -> bool:
        """Whether the number comes from a table."""
        return self._table is not None

    def value_of(self, task_id: str) -> float | None:
        """The table's number for a task; None: null, or no such task."""
        return None if self._table is None else self._table.get(task_id)

    def keeps(self, value: float | None) -> bool:
        """Whether the number is there and within the bounds, both inclusive."""
        low, high = self._spec.min, self._spec.max
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    def number(self, value: Any, where: str) -> float | None:
        """A cell as a number; null and NaN are none. Raises InputError for anything else."""
        if value is None:
            return None
        if not isinstance(value, int | float):
            raise InputError(f"column {self.column!r} is {value!r:.60}, not a number", where, "filter by a number")
        return None if math.isnan(value) else float(value)


def read_columns(spec: FilterSpec) -> list[dict[str, Any]]:
    """The rows of the table, of the columns that matter. Raises InputError."""
    import pyarrow.parquet as pq

    path = Path(spec.file or "")
    needed = [KEY, spec.column, *spec.where]
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in needed:
                if name not in names:
                    raise InputError(
                        f"there is no column {name!r} (columns: {', '.join(names)})", str(path), "name one of them"
                    )
            rows: list[dict[str, Any]] = file.read(list(dict.fromkeys(needed))).to_pylist()
            return rows
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}", str(path), "name a run's groups.parquet or rewards.parquet"
        ) from error
    except pa.ArrowException as error:
        raise InputError(f"is no Parquet file: {error}", str(path), "name a run's groups.parquet") from error


def by_task(rows: list[dict[str, Any]], spec: FilterSpec) -> Mapping[str, float | None]:
    """Task id -> number, of the rows that are meant. Raises InputError where a task has more than one."""
    table: dict[str, float | None] = {}
    for row in rows:
        if any(row[name] != value for name, value in spec.where.items()):
            continue
        task_id, value = row[KEY], row[spec.column]
        if task_id in table:
            raise InputError(
                f"task {task_id!r} has more than one row",
                str(spec.file),
                'say which one counts: where = { model = "NAME", round = 0 }',
            )
        if value is not None and not isinstance(value, int | float):
            raise InputError(
                f"column {spec.column!r} holds {value!r:.60}, not numbers", str(spec.file), "filter by a number"
            )
        table[task_id] = None if value is None or math.isnan(value) else float(value)
    if not table:
        raise InputError(
            f"no row has {spec.where}" if spec.where else "the table is empty", str(spec.file), "correct `where`"
        )
    return table
