"""The dense form of a run's scores, and how rows of the rollouts table fill it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.errors import InputError
from rollout_engine.estimators import Bools, Floats, Ints
from rollout_engine.types import Boundary, Status


class Kind(IntEnum):
    """What became of a planned rollout, as far as rewards are concerned."""

    NONE = 0
    """Planned; there is no row yet."""
    VALID = 1
    """It has a score."""
    VERIFIER_ERROR = 2
    """The agent ended as it should, but its verifier came to no finding."""
    FAILED = 3
    CANCELLED = 4


@dataclass(frozen=True)
class Scores:
    """Every planned rollout of n slots (round x task), m models (strongest first), k attempts; dense."""

    models: tuple[str, ...]
    k: int
    task_ids: pa.StringArray
    """[n]"""
    rounds: npt.NDArray[np.int32]
    """[n]"""
    values: Floats
    """[n, m, k]; NaN where there is no score."""
    passed: Bools
    """[n, m, k]; False where there is no score."""
    kinds: npt.NDArray[np.uint8]
    """[n, m, k] of Kind."""

    def __post_init__(self) -> None:
        shape = (len(self.task_ids), len(self.models), self.k)
        for name in ("values", "passed", "kinds"):
            if getattr(self, name).shape != shape:
                raise ValueError(f"Scores.{name} has shape {getattr(self, name).shape}, not {shape}")
        if self.rounds.shape != shape[:1]:
            raise ValueError(f"Scores.rounds has shape {self.rounds.shape}, not {shape[:1]}")
        if not np.isfinite(self.values[self.kinds == Kind.VALID]).all():
            raise ValueError("Scores.values holds a number that is not finite where Scores.kinds says VALID")


def kind_codes(status: Any, failure_boundary: Any, score: Any) -> npt.NDArray[np.uint8]:
    """Kind of each row from its Arrow columns. A score decides; without one, who came to no finding."""
    status, failure_boundary = text(status), text(failure_boundary)
    valid = flags(pc.is_finite(score))
    ended = flags(pc.is_in(status, pa.array([Status.COMPLETED.value, Status.TRUNCATED.value])))
    verifier = ended & flags(pc.equal(failure_boundary, Boundary.VERIFIER.value))
    cancelled = flags(pc.equal(status, Status.CANCELLED.value))
    cases = [Kind.VALID, Kind.VERIFIER_ERROR, Kind.CANCELLED]
    return np.select([valid, verifier, cancelled], cases, Kind.FAILED).astype(np.uint8)


SCORED = ("round", "task_id", "model", "attempt", "generation", "status", "failure_boundary", "score", "passed")
"""The columns of ROLLOUTS that `scores_from_rollouts` reads."""


def scores_from_rollouts(table: pa.Table, models: Sequence[str], k: int, pass_threshold: float = 1.0) -> Scores:
    """Scores of a ROLLOUTS table, slots sorted by round and task id, whatever the order of the rows.

    Where a rollout has several rows a valid one wins, the first of them; else the one of the highest generation.
    `pass_threshold` decides rows whose `passed` is null. Raises InputError on rows of another model or attempt.
    """
    table = table.combine_chunks()
    task_ids, rounds, slot = _slots(table)
    model = to_numpy(pc.fill_null(pc.index_in(text(table["model"]), pa.array(list(models), pa.string())), -1))
    attempt = to_numpy(table["attempt"]).astype(np.int64)
    _check_cells(table, model, attempt, k)
    shape = (len(task_ids), len(models), k)
    cell = (slot * len(models) + model) * k + attempt
    kinds = kind_codes(table["status"], table["failure_boundary"], table["score"])
    score = to_numpy(pc.fill_null(table["score"], math.nan))
    passed = flags(pc.coalesce(table["passed"], pc.greater_equal(table["score"], pass_threshold)))
    rows = _by_precedence(kinds == Kind.VALID, to_numpy(table["generation"]))
    cell, valid = cell[rows], kinds[rows] == Kind.VALID

    def dense(column: npt.NDArray[Any], empty: float) -> npt.NDArray[Any]:
        out = np.full(math.prod(shape), empty, column.dtype)
        out[cell] = column  # where a cell comes twice, the last row stays
        return out.reshape(shape)

    values = dense(np.where(valid, score[rows], math.nan), math.nan)
    return Scores(tuple(models), k, task_ids, rounds, values, dense(valid & passed[rows], 0), dense(kinds[rows], 0))


def _slots(table: pa.Table) -> tuple[pa.StringArray, npt.NDArray[np.int32], Ints]:
    """Task id and round of each slot, and the slot of each row."""
    encoded = pc.dictionary_encode(text(table["task_id"])).combine_chunks()
    names = encoded.dictionary
    order = to_numpy(pc.sort_indices(names)).astype(np.int64)
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    width = max(len(names), 1)
    code = to_numpy(table["round"]).astype(np.int64) * width + rank[to_numpy(encoded.indices)]
    distinct, slot = np.unique(code, return_inverse=True)
    return names.take(pa.array(order[distinct % width])), (distinct // width).astype(np.int32), slot.reshape(-1)


def _check_cells(table: pa.Table, model: Ints, attempt: Ints, k: int) -> None:
    bad = (model < 0) | (attempt < 0) | (attempt >= k)
    if bad.any():
        row = int(np.argmax(bad))
        name, number = table["model"][row].as_py(), table["attempt"][row].as_py()
        raise InputError(
            f"model {name!r}, attempt {number} is not planned",
            where=f"row {row} of the rollouts table",
            fix=f"name every model of the table, and a k above its highest attempt (k is {k})",
        )


def _by_precedence(valid: Bools, generation: Ints) -> Ints:
    """Row numbers, weakest claim first: no score by generation, then scores from the last row to the first."""
    without = np.flatnonzero(~valid)
    without = without[np.argsort(generation[without], kind="stable")]
    return np.concatenate([without, np.flatnonzero(valid)[::-1]])


def to_numpy(column: Any) -> npt.NDArray[Any]:
    """A column without nulls."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(column.to_numpy(zero_copy_only=False))


def text(column: Any) -> Any:
    """A column of strings, also from one that is dictionary-encoded or all null."""
    return pc.cast(column, pa.string())


def flags(column: Any) -> Bools:
    """A boolean column; null counts as False."""
    return to_numpy(pc.fill_null(column, False)).astype(np.bool_)
