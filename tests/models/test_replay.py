"""Recorded answers: how they are found, and what bad recordings get.

.venv/bin/pytest tests/models/test_replay.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError, ModelMissingAnswer
from rollout_engine.models import check_model, make_client
from rollout_engine.models.recording import load_answers
from rollout_engine.models.replay import Answers
from rollout_engine.schema import ROLLOUTS

from .conftest import ask, context

ROWS: list[dict[str, Any]] = [
    {"task_id": "t", "content": "for all"},
    {"task_id": "t", "content": "attempt 1 of all", "attempt": 1},
    {"task_id": "t", "content": "all of m", "model": "m"},
    {"task_id": "t", "content": "attempt 2 of m", "model": "m", "attempt": 2},
    {"task_id": "t", "content": "all of n", "model": "n"},
    {"task_id": "täsk", "content": "ünïcode\u2028", "attempt": 0},
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def spec(file: Path, **fields: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "kind": "replay", "file": str(file), **fields})


@pytest.fixture(params=["jsonl", "jsonl.gz", "parquet"])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / f"answers.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS, pa.schema(list(_SCHEMA.items()))), file)
    else:
        file.write_bytes(gzip.compress(lines(ROWS)) if request.param.endswith("gz") else lines(ROWS))
    return file


_SCHEMA = {"task_id": pa.string(), "content": pa.string(), "model": pa.string(), "attempt": pa.int64()}


@pytest.mark.parametrize(
    ("task_id", "attempt", "expected"),
    [("t", 0, "all of m"), ("t", 1, "all of m"), ("t", 2, "attempt 2 of m"), ("täsk", 0, "ünïcode\u2028")],
)
async def test_the_nearest_row_answers(recording: Path, task_id: str, attempt: int, expected: str) -> None:
    model = make_client(spec(recording))
    assert (await ask(model, context(task_id, attempt=attempt))).message["content"] == expected


async def test_rows_without_a_model_answer_for_models_that_have_none(recording: Path) -> None:
    model = make_client(spec(recording, name="other"))
    assert (await ask(model, context(attempt=1))).message["content"] == "attempt 1 of all"
    assert (await ask(model, context(attempt=9))).message["content"] == "for all"


async def test_a_model_may_have_another_name_in_its_recording(recording: Path) -> None:
    model = make_client(spec(recording, name="other", model="n"))
    assert (await ask(model, context(attempt=2))).message["content"] == "all of n"


async def test_a_missing_answer_says_which(recording: Path) -> None:
    model = make_client(spec(recording))
    with pytest.raises(ModelMissingAnswer, match=r"'täsk', model 'm', attempt 3 in .*answers"):
        await ask(model, context("täsk", attempt=3))


keys = st.tuples(st.sampled_from("abc"), st.none() | st.sampled_from("mn"), st.none() | st.integers(0, 2))


@given(st.lists(keys, unique=True, max_size=30))
def test_lookup_agrees_with_a_plain_dictionary(rows: list[tuple[str, str | None, int | None]]) -> None:
    known = {key: str(number) for number, key in enumerate(rows)}
    columns = [[key[at] for key in rows] for at in range(3)]
    table = pa.table(
        {
            "task_id": pa.array(columns[0], pa.string()),
            "content": pa.array(list(known.values()), pa.large_string()),
            "model": pa.array(columns[1], pa.string()),
            "attempt": pa.array(columns[2], pa.int32()),
        }
    )
    answers = Answers(table, "x")
    assert answers.doubled() is None
    for task_id in "abcd":
        for model in "mno":
            for attempt in range(4):
                order = [
                    (task_id, model, attempt),
                    (task_id, model, None),
                    (task_id, None, attempt),
                    (task_id, None, None),
                ]
                expected = next((known[key] for key in order if key in known), None)
                assert answers.find(task_id, model, attempt) == expected


def run_directory(folder: Path, rows: list[dict[str, Any]]) -> Path:
    filled = [{"run_id": "r", "rollout_id": str(i), "group_id": "g", "round": 0, **row} for i, row in enumerate(rows)]
    (folder / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(filled, ROLLOUTS), folder / "rollouts" / "part-0.parquet")
    return folder


async def test_an_earlier_run_can_be_replayed(tmp_path: Path) -> None:
    rows = [
        {"task_id": "t", "model": "m", "attempt": 0, "final_answer": "second round", "round": 1},
        {"task_id": "t", "model": "m", "attempt": 0, "final_answer": "first round"},
        {"task_id": "t", "model": "m", "attempt": 1, "final_answer": None},
        {"task_id": "t", "model": "n", "attempt": 1, "final_answer": "of n"},
    ]
    model = make_client(spec(run_directory(tmp_path, rows)))
    assert (await ask(model, context(attempt=0))).message["content"] == "first round"
    with pytest.raises(ModelMissingAnswer):
        await ask(model, context(attempt=1))


@pytest.mark.parametrize(
    ("row", "finding"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"7", "not an object"),
        (b'{"content": "x"}', "task_id is missing"),
        (b'{"task_id": "t"}', "content is missing"),
        (b'{"task_id": 7, "content": "x"}', "task_id is 7"),
        (b'{"task_id": "t", "content": null}', "content is None"),
        (b'{"task_id": "t", "content": "x", "atempt": 0}', "unknown field 'atempt'"),
        (b'{"task_id": "t", "content": "x", "attempt": "0"}', "attempt is '0'"),
        (b'{"task_id": "t", "content": "x", "attempt": -1}', "attempt is -1"),
        (b'{"task_id": "t", "content": "x", "attempt": true}', "attempt is True"),
        (b'{"task_id": "t", "content": "x", "model": 7}', "model is 7"),
        (b'{"task_id": "t", "content": "\xff"}', "not readable"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: bytes, finding: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(ROWS[:1]) + b"\n" + row + b"\n")
    with pytest.raises(InputError, match=finding) as caught:
        check_model(spec(file))
    assert caught.value.where.startswith(str(file))
    if finding != "not readable":  # text is decoded in blocks: the line is the last that was whole
        assert caught.value.where == f"{file}:3"
    assert caught.value.fix


def test_bad_files_are_named(tmp_path: Path) -> None:
    def finding(file: Path) -> str:
        with pytest.raises(InputError) as caught:
            check_model(spec(file))
        assert str(file) in str(caught.value)
        assert caught.value.fix
        return caught.value.message

    empty, cut, folder = tmp_path / "empty", tmp_path / "cut.gz", tmp_path / "folder"
    empty.write_bytes(b"")
    cut.write_bytes(gzip.compress(lines(ROWS) * 100)[:-20])
    folder.mkdir()
    assert "No such file" in finding(tmp_path / "absent.jsonl")
    assert "no answers" in finding(empty)
    assert "not readable" in finding(cut)
    assert "no rollouts/*.parquet" in finding(folder)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    assert "cannot read" in finding(broken)


@pytest.mark.parametrize(
    ("columns", "finding"),
    [
        ({"task_id": ["t"]}, "no column content"),
        ({"task_id": ["t"], "content": [None]}, "row 1: content is null"),
        ({"task_id": ["t"], "content": ["x"], "extra": [1]}, "unknown field 'extra'"),
        ({"task_id": ["t"], "content": ["x"], "attempt": ["one"]}, "column attempt"),
    ],
)
def test_bad_columns_are_named(tmp_path: Path, columns: dict[str, list[Any]], finding: str) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), file)
    with pytest.raises(InputError, match=finding):
        check_model(spec(file))


def test_two_answers_to_one_call_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([*ROWS, {"task_id": "t", "content": "again", "model": "m", "attempt": 2}]))
    with pytest.raises(InputError, match="task_id 't', model 'm', attempt 2"):
        check_model(spec(file))


def test_a_model_that_is_not_in_the_recording_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([{"task_id": "t", "content": "x", "model": name} for name in ("b", "a", "b")]))
    with pytest.raises(InputError, match=r"'m' \(there are: a, b\)"):
        check_model(spec(file))


def test_only_the_models_own_rows_are_held(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([{"task_id": f"t{i}", "content": "x", "model": "mnop"[i % 4]} for i in range(400)]))
    assert len(load_answers(spec(file))) == 100
