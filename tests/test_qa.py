"""Tasks out of data sets: what a row becomes, which rows pass a filter, and what is said of those that make no task.

make one T=tests/test_qa.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout_engine
from rollout_engine.errors import InputError
from rollout_engine.qa import QaSpec, expecting, qa_tasks, read_spec
from rollout_engine.qafilter import Filter, FilterSpec
from rollout_engine.tasks import check_tasks, read_tasks
from tests.cli.rollout import rollout
from tests.helpers import make_config, make_tasks, scripted

ROWS = [
    {"id": 7, "question": "1+1?", "answer": 2, "level": 0.5, "metadata": "no JSON"},
    {"id": 8, "question": "2+2?", "answer": "4", "level": 1.0, "metadata": "{"},
    {"id": 9, "question": "3+3?", "answer": "6", "level": None, "metadata": "x"},
]
HEAD = 'rows = "rows.parquet"\nid = "id"\n'


def write(folder: Path, toml: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The description and its rows, as JSONL and as Parquet."""
    folder.joinpath("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{**row, "answer": str(row.get("answer"))} for row in rows]),
                   folder / "rows.parquet")  # fmt: skip
    path = folder / "qa.toml"
    path.write_text(toml)
    return path


def ids(path: Path) -> list[str]:
    return [task.task_id for task in read_tasks(path)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_becomes_a_task(tmp_path: Path, kind: str) -> None:
    toml = f'rows = "rows.{kind}"\nid = "id"\nbefore = "Solve {{answer}}: "\nafter = " \\\\boxed{{}}"\n'
    path = write(tmp_path, toml + 'system_prompt = "Be brief."\n[limits]\nmax_turns = 2')
    first = next(read_tasks(path))
    assert (first.task_id, first.answer, first.system_prompt) == ("7", "2", "Be brief.")
    assert first.prompt == "Solve {answer}: 1+1? \\boxed{}"  # nothing is filled in: no answer gets into a prompt
    assert first.verifier == {"type": "match", "expected": "2"}
    assert first.limits.max_turns == 2
    assert check_tasks(path, make_config()).count == 3


def test_python_gives_the_same_tasks_and_ids_come_from_the_content(tmp_path: Path) -> None:
    path = write(tmp_path, 'rows = "rows.jsonl"')
    spec = QaSpec(rows=str(tmp_path / "rows.jsonl"))
    assert [task.task_id for task in qa_tasks(spec)] == ids(path)
    assert len(set(ids(path))) == 3
    assert ids(path)[0].startswith("task-")


def test_the_answer_by_a_pattern_and_the_solution_in_its_form(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "#### 1\n#### 1,000 "}]
    path = write(tmp_path, 'rows = "rows.jsonl"\nanswer_pattern = "#### (.*)"\nsolution = "so {answer}."', rows)
    (task,) = read_tasks(path)
    assert (task.verifier or {})["expected"] == "1,000"
    assert task.answer == "so 1,000."


def test_every_verifier_that_takes_an_answer_gets_it() -> None:
    inner = {
        "type": "composite",
        "components": {"a": {"verifier": {"type": "math"}}, "b": {"verifier": {"type": "code"}}},
    }
    filled = expecting({"type": "hybrid", "rule": inner, "judge": {"type": "judge", "expected": "own"}}, "42")
    assert filled["rule"]["components"]["a"]["verifier"] == {"type": "math", "expected": "42"}
    assert filled["rule"]["components"]["b"]["verifier"] == {"type": "code"}
    assert filled["judge"]["expected"] == "own"
    assert "expected" not in inner["components"]["a"]["verifier"]


@pytest.mark.parametrize(
    ("bounds", "left"),
    [("min = 0.5", ["7", "8"]), ("max = 0.5", ["7"]), ("min = 0.6\nmax = 2", ["8"]), ("min = 0.5\nmax = 0.5", ["7"])],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_filter_by_a_column_of_the_rows(tmp_path: Path, kind: str, bounds: str, left: list[str]) -> None:
    path = write(tmp_path, f'rows = "rows.{kind}"\nid = "id"\n[[filter]]\ncolumn = "level"\n{bounds}')
    assert ids(path) == left  # null is within no bounds


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_not_there_is_an_error_that_names_file_and_column(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, f'rows = "rows.{kind}"\n[[filter]]\ncolumn = "levle"\nmin = 0')
    with pytest.raises(InputError, match=rf"rows\.{kind}.*1: there is no column 'levle' \(columns: id, question"):
        check_tasks(path, make_config())
    for field in ("question", "answer", "id"):
        path = write(tmp_path, f'rows = "rows.{kind}"\n{field} = "nope"')
        with pytest.raises(InputError, match="there is no column 'nope'"):
            ids(path)


@given(
    st.none() | st.floats(allow_nan=False), st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
def test_bounds_are_inclusive_and_null_is_outside(value: float | None, low: float | None, high: float | None) -> None:
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        with pytest.raises(ValueError, match=r"filter|above"):
            FilterSpec(column="c", min=low, max=high)
        return
    kept = Filter(FilterSpec(column="c", min=low, max=high)).keeps(value)
    assert kept == (value is not None and (low is None or low <= value) and (high is None or value <= high))


class TestOfAnEarlierRun:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A run of five tasks: `strong` passes all, `weak` passes some of them at times."""
        models = [scripted("strong"), scripted("weak", skill=0.5)]
        rollout_engine.run(make_tasks(5), models, k=4, ray="off", sandbox="none", run_dir=tmp_path / "a")
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text("".join(task.model_dump_json(exclude_defaults=True) + "\n" for task in make_tasks(6)))
        return tmp_path

    def filtered(self, place: Path, **fields: Any) -> list[str]:
        filters = "\n".join(f"{name} = {_toml(value)}" for name, value in fields.items())
        (place / "next.toml").write_text(f'tasks = "tasks.jsonl"\n[[filter]]\n{filters}\n')
        return ids(place / "next.toml")

    def test_its_groups_choose_the_next_tasks(self, place: Path) -> None:
        groups = pq.read_table(place / "a/groups.parquet").to_pylist()
        weak = {row["task_id"]: row["pass_rate"] for row in groups if row["model"] == "weak"}
        wanted = [task_id for task_id, rate in sorted(weak.items()) if 0.1 <= rate <= 0.9]
        where = {"model": "weak"}
        found = self.filtered(place, file="a/groups.parquet", column="pass_rate", where=where, min=0.1, max=0.9)
        assert found == wanted
        assert 0 < len(found) < 5

    def test_its_rewards_choose_them_too(self, place: Path) -> None:
        rewards = {row["task_id"]: row["reward"] for row in pq.read_table(place / "a/rewards.parquet").to_pylist()}
        found = self.filtered(place, file="a/rewards.parquet", column="reward", min=0.2)
        assert found == [task_id for task_id, reward in sorted(rewards.items()) if reward is not None and reward >= 0.2]

    def test_a_task_with_several_rows_is_an_error_that_says_how_to_choose(self, place: Path) -> None:
        with pytest.raises(InputError, match=r"groups\.parquet: task 't0' has more than one row\n.*where"):
            self.filtered(place, file="a/groups.parquet", column="pass_rate", min=0)

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"column": "pass_rat"}, r"groups\.parquet: there is no column 'pass_rat' \(columns: group_id,"),
            ({"column": "pass_rate", "where": {"modle": "weak"}}, "there is no column 'modle'"),
            ({"column": "pass_rate", "where": {"model": "waek"}}, "no row has"),
            ({"column": "group_id", "where": {"model": "weak"}}, "not numbers"),
            ({"column": "pass_rate", "file": "b/groups.parquet"}, r"b/groups\.parquet: cannot be read"),
            ({"column": "pass_rate", "file": "tasks.jsonl"}, r"tasks\.jsonl: is no Parquet file"),
        ],
    )
    def test_what_cannot_be_joined_is_an_error(self, place: Path, fields: dict[str, Any], told: str) -> None:
        with pytest.raises(InputError, match=told):
            self.filtered(place, **{"file": "a/groups.parquet", "min": 0, **fields})

    def test_the_command_line_takes_it_and_a_resume_knows_the_same_tasks(self, place: Path) -> None:
        where = {"model": "weak"}
        left = self.filtered(place, file="a/groups.parquet", column="pass_rate", where=where, max=0.9)
        arguments = ["run", str(place / "next.toml"), "-m", "m=scripted:skill=1", "--ray", "off", "--sandbox", "none"]
        done = rollout(*arguments, "-o", "b", "--json", cwd=place)
        assert done.code == 0
        assert done.document["rows"] == len(left) > 0
        assert rollout("resume", "b", cwd=place).code == 0
        (place / "tasks.jsonl").write_text(next(make_tasks(1)).model_dump_json() + "\n")
        changed = rollout("resume", "b", cwd=place)
        assert changed.code == 2
        assert "not the tasks that the run was started with" in changed.err


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("", "give rows"),
        ('rows = "a"\ntasks = "b"', "one of the two"),
        ('tasks = "b"\nbefore = "x"', "before is for rows"),
        (HEAD + 'colour = "red"', r"qa\.toml:3: field 'colour': unknown field"),
        (HEAD + "question = 3", r"qa\.toml:3: field 'question': must be text"),
        (HEAD + '[[filter]]\ncolumn = "level"', r"qa\.toml:3.*needs min, max or both"),
        (HEAD + '[[filter]]\ncolumn = "level"\nmin = 2\nmax = 1', "nothing could pass"),
        (HEAD + '[[filter]]\ncolumn = "level"\nmin = 9', "no row passes every filter"),
        (HEAD + '[[filter]]\ncolumn = "question"\nmin = 9', r"row 1: column 'question' is '1\+1\?', not a number"),
        (HEAD + 'answer_pattern = "("', "no regular expression"),
        (HEAD + 'answer_pattern = "#+ (.*)"', "row 1: field 'answer': answer_pattern finds nothing"),
        (HEAD + '[verifier]\ntype = "matsh"', "row 1: field 'verifier.type': unknown verifier"),
        (HEAD.replace("rows.parquet", "none.jsonl"), r"none\.jsonl: cannot be read"),
        (HEAD + "= 3", r"qa\.toml:3:1: this is no TOML"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, toml: str, told: str) -> None:
    with pytest.raises(InputError, match=re.compile(told, re.DOTALL)):
        check_tasks(write(tmp_path, toml), make_config())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"question": "q"}', "no column 'answer'"),
        ('{"question": null, "answer": 1}', "field 'question': must be text or a number, found null"),
        ('{"question": ["q"], "answer": 1}', "must be text or a number"),
        ('{"question": "", "answer": 1}', "field 'question'"),
        ("[1]", "a row is a JSON object"),
        ("{", "this is no JSON"),
    ],
)
def test_a_row_that_makes_no_task_is_named_by_its_line(tmp_path: Path, row: str, told: str) -> None:
    path = write(tmp_path, 'rows = "rows.jsonl"')
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": 1}\n\n' + row + "\n")
    with pytest.raises(InputError, match=rf"rows\.jsonl:3.*{re.escape(told)}"):
        check_tasks(path, make_config())


def test_the_bundled_data_set() -> None:
    path = Path(__file__).parents[1] / "examples/tasks/qa.toml"
    assert ids(path) == ["half", "root", "sum", "square"]
    assert read_spec(path).filter[0].column == "level"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)
