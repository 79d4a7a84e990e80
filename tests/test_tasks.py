"""Loading tasks: what is accepted, what is refused and how it is said, and that a file is only streamed."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine import taskfile
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.problems import MAX_PROBLEMS
from rollout_engine.sandboxes import sandbox_spec
from rollout_engine.specs import EnvironmentSpec, Task
from rollout_engine.tasks import (
    TaskSource,
    check_task,
    check_tasks,
    iter_tasks,
    read_tasks,
    resolve,
    select,
)

MATCH = {"type": "match", "pattern": "A: (.*)", "compare": "numeric", "expected": "4"}
CONFIG = RunConfig(environments={"web": EnvironmentSpec(image="web:1", env={"A": "env", "B": "env"})})


def row(task_id: str = "", **fields: Any) -> dict[str, Any]:
    return {"prompt": "2+2?", "verifier": MATCH, **({"task_id": task_id} if task_id else {}), **fields}


def write(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    lines = [each if isinstance(each, bytes) else each.encode() if isinstance(each, str) else json.dumps(each).encode()
             for each in rows]  # fmt: skip
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def refusal(path: Path, config: RunConfig = CONFIG, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        check_tasks(path, config, **options)
    return str(caught.value).replace(str(path), path.name)


class TestReading:
    @pytest.fixture
    def rows(self) -> list[dict[str, Any]]:
        return [
            row("a", files={"x.txt": "1"}, limits={"max_turns": 3}, metadata={"level": 1}),
            row("b", prompt=[{"role": "user", "content": "hi"}], solution={"script": "echo"}, env_key="web"),
            row("c", setup=["true"], environment={"image": "i", "env": {"K": "V"}}, solution="4"),
        ]

    def test_jsonl_gzip_and_parquet_give_the_same_tasks(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        plain = write(tmp_path / "tasks.jsonl", *rows)
        zipped = tmp_path / "tasks.jsonl.gz"
        zipped.write_bytes(gzip.compress(plain.read_bytes()))
        table = tmp_path / "tasks.parquet"
        nested = ("verifier", "files", "metadata", "environment", "limits")
        columns: list[dict[str, Any]] = [
            {
                **{name: each.get(name) for name in ("task_id", "setup", "env_key")},
                **{name: json.dumps(each[name]) if name in each else None for name in nested},
            }
            for each in rows
        ]
        prompt = pa.array([json.dumps(each["prompt"]) for each in rows])
        pq.write_table(pa.Table.from_pylist(columns).append_column("prompt", prompt), table, row_group_size=2)
        expected = [Task.model_validate(each) for each in rows]
        assert list(read_tasks(plain)) == list(read_tasks(zipped)) == expected
        from_table = list(read_tasks(table))
        assert [task.files for task in from_table] == [task.files for task in expected]
        assert [task.environment for task in from_table] == [task.environment for task in expected]
        assert check_tasks(plain, CONFIG).digest == check_tasks(zipped, CONFIG).digest

    def test_a_parquet_file_of_structs(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        kinds = pa.schema(
            [
                ("task_id", pa.string()),
                ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
                ("verifier", pa.struct([(name, pa.string()) for name in (*MATCH, "unused")])),
                ("files", pa.map_(pa.string(), pa.string())),
                ("limits", pa.struct([("max_turns", pa.int32()), ("agent_s", pa.float64())])),
                ("solution", pa.struct([("script", pa.string())])),
                ("__index_level_0__", pa.int64()),
            ]
        )
        message = [{"role": "user", "content": "2+2?"}]
        first = {"task_id": "a", "prompt": message, "verifier": MATCH, "files": {"x": "1"}, "limits": {"max_turns": 2}}
        second = {"task_id": "b", "prompt": message, "verifier": MATCH, "limits": {"max_turns": None}}
        third = {"task_id": "c", "prompt": message, "verifier": MATCH, "solution": {"script": "echo"}}
        path = tmp_path / "tasks.parquet"
        pq.write_table(pa.Table.from_pylist([first, second, third], schema=kinds), path)
        assert list(read_tasks(path)) == [
            Task.model_validate(each) for each in (first, {**second, "limits": {}}, third)
        ]
        assert check_tasks(path, CONFIG).count == 3

    def test_formats_are_told_by_content(self, tmp_path: Path) -> None:
        odd = tmp_path / "tasks.txt"
        odd.write_bytes(gzip.compress(b"\xef\xbb\xbf\n \n" + json.dumps(row("a")).encode()))
        assert [task.task_id for task in read_tasks(odd)] == ["a"]

    def test_a_task_without_an_id_is_named_by_its_content(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", row(), row(prompt="3+3?"))
        names = [task.task_id for task in read_tasks(path)]
        assert names == [task.task_id for task in read_tasks(path)]
        assert len(set(names)) == 2
        assert all(name.startswith("task-") for name in names)

    def test_a_check_and_a_reading_hold_only_a_few_bytes_of_each_task(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", *(row(f"task-{number}", prompt="x" * 2000) for number in range(2000)))
        check_tasks(path, CONFIG)
        tracemalloc.start()
        try:
            check_tasks(path, CONFIG)
            assert sum(1 for _ in read_tasks(path)) == 2000
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()


class TestCheck:
    def test_what_it_counts(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", row("web-1", env_key="web:2"), row("math-1"), row("math-2", setup=["true"]))
        whole = check_tasks(path, CONFIG)
        assert (whole.count, whole.total, whole.sandboxed) == (3, 3, 2)
        chosen = check_tasks(path, CONFIG, pattern="math-*", limit=1)
        assert (chosen.count, chosen.total, chosen.sandboxed) == (1, 3, 0)
        assert chosen.digest == check_tasks(write(tmp_path / "u.jsonl", row("math-1")), CONFIG).digest != whole.digest

    @pytest.mark.parametrize(
        ("bad", "said"),
        [
            ({"promt": "x"}, ["t.jsonl:2: field 'promt': unknown field", "did you mean 'prompt'"]),
            ({"colour": 1}, ["t.jsonl:2: field 'colour': unknown field", "known fields: task_id, prompt"]),
            ({"prompt": 5}, ["field 'prompt': must be text or a list, found 5"]),
            ({"prompt": ""}, ["field 'prompt': must be text of at least 1 characters"]),
            ({"prompt": []}, ["prompt is an empty list"]),
            ({"prompt": [{"role": "user"}, 3]}, ["field 'prompt.1': must be an object, found 3"]),
            ({"prompt": [{"content": "x"}]}, ["field 'prompt.0.role': a message needs a role"]),
            ({"verifier": None}, ["t.jsonl:2: a task needs a verifier"]),
            ({"verifier": "match"}, ["field 'verifier': must be an object, found 'match'"]),
            ({"verifier": {"type": "match", "expected": 1, "pattern": "("}}, ["field 'verifier.pattern'", "'('"]),
            ({"verifier": {"type": "magic"}}, ["field 'verifier.type': unknown verifier 'magic'", "known: "]),
            ({"verifier_code": "x"}, ["give verifier or verifier_code, not both"]),
            ({"env_key": "desktop"}, ["field 'env_key': env_key 'desktop' names no environment (known: web)"]),
            ({"environment": {}, "env_key": "web"}, ["give environment or env_key"]),
            ({"environment": {"memory": 5}}, ["field 'environment.memory': unknown field", "did you mean 'memory_mb'"]),
            ({"environment": {"network": "on"}}, ["must be one of 'none' or 'host', found 'on'"]),
            ({"limits": {"max_turns": 0}}, ["field 'limits.max_turns': must be greater than 0, found 0"]),
            ({"limits": {"agent_s": "long"}}, ["field 'limits.agent_s': must be a number, found 'long'"]),
            ({"limits": {"max_turns": True, "agent_s": None}}, []),
            ({"services": [{"name": "db"}]}, ["field 'services.0.command': a required field is missing"]),
            ({"tools": [{"name": "t"}]}, ["field 'tools.0': tool 't' needs exactly one of"]),
            ({"solution": {"answer": "x"}}, ["solution is a string"]),
            ({"solution": 5}, ["field 'solution': must be text or an object, found 5"]),
            ({"files": {"../x": ""}}, ["field 'files': '../x' is no path inside the workspace"]),
            ({"task_id": "x" * 600}, ["field 'task_id': must be text of at most 512 characters, found 'xxx"]),
            ({"on_verifier_error": "one"}, ["must be one of 'null' or 'zero'"]),
        ],
    )
    def test_what_is_wrong_is_said_with_line_and_field(
        self, tmp_path: Path, bad: dict[str, Any], said: list[str]
    ) -> None:
        path = write(tmp_path / "t.jsonl", row("good"), {**row("bad"), **bad})
        if not said:
            check_tasks(path, CONFIG)
            return
        message = refusal(path)
        assert message.startswith("t.jsonl:2")
        assert "pydantic" not in message
        for part in said:
            assert part in message

    def test_a_missing_prompt(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", {"verifier": MATCH})
        assert refusal(path) == "t.jsonl:1: field 'prompt': a required field is missing"

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (b'{"prompt": "x",}', "t.jsonl:1:16: this is no JSON"),
            (b'{"prompt": "x"', "t.jsonl:1:15: this is no JSON"),
            (b'{"prompt": "\xff"}', "t.jsonl:1:13: this is no UTF-8"),
            (b"[", "one JSON object per line, not one array"),
            (b"[1]", "t.jsonl:1: a task is a JSON object"),
            (b"null", "t.jsonl:1: a task is a JSON object"),
            (b"[" * 100_000, "t.jsonl:1"),
            (b'{"a":' * 100_000, "t.jsonl:1"),
            (b'{"prompt": "\\ud800", "verifier": {"type": "match", "expected": "1"}}', "t.jsonl:1"),
        ],
    )
    def test_lines_that_are_no_tasks(self, tmp_path: Path, line: bytes, said: str) -> None:
        assert said in refusal(write(tmp_path / "t.jsonl", line))

    @given(st.binary(max_size=60))
    def test_any_bytes_give_a_task_or_an_input_error(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "any.jsonl"
        path.write_bytes(data)
        with pytest.raises(InputError):
            check_tasks(path, CONFIG)

    @pytest.mark.parametrize("content", [b"", b"\n\n  \n", gzip.compress(b"")])
    def test_an_empty_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "t.jsonl").write_bytes(content)
        assert "the file holds no task" in refusal(tmp_path / "t.jsonl")

    def test_no_such_file(self, tmp_path: Path) -> None:
        assert "t.jsonl: cannot be read: No such file" in refusal(tmp_path / "t.jsonl")
        assert "Is a directory" in refusal(tmp_path)

    def test_damaged_files(self, tmp_path: Path) -> None:
        zipped = tmp_path / "t.jsonl.gz"
        zipped.write_bytes(gzip.compress(json.dumps(row("a")).encode() * 100)[:-20])
        assert "gzip stream is damaged" in refusal(zipped)
        table = tmp_path / "t.parquet"
        table.write_bytes(b"PAR1 and then nothing")
        assert "Parquet file cannot be read" in refusal(table)

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(taskfile, "MAX_LINE_BYTES", 1 << 20)
        path = write(tmp_path / "t.jsonl", row("a"), b"x" * (2 << 20))
        assert "t.jsonl:2: a line of more than 1 MiB" in refusal(path)

    def test_duplicates_name_both_lines(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", row("a"), row("b"), "", row("a"), row(prompt="same"), row(prompt="same"))
        message = refusal(path)
        assert "t.jsonl:4: field 'task_id': 'a' is also the task of t.jsonl:1" in message
        assert "is also the task of t.jsonl:5" in message
        assert "(2 problems)" in message

    def test_several_problems_are_listed_at_once_but_not_all_of_a_thousand(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", *(row(f"t{number}", prompt=number) for number in range(1000)))
        message = refusal(path)
        assert message.count("field 'prompt'") == MAX_PROBLEMS
        assert f"({MAX_PROBLEMS} problems, and there may be more)" in message

    def test_one_task_may_have_several_problems(self, tmp_path: Path) -> None:
        message = refusal(write(tmp_path / "t.jsonl", {"prompt": 1, "verifier": 2, "limits": 3}))
        assert "'prompt'" in message
        assert "'verifier'" in message
        assert "'limits': must be an object, found 3" in message

    def test_a_pattern_that_selects_nothing(self, tmp_path: Path) -> None:
        assert "no task_id matches 'x*'" in refusal(write(tmp_path / "t.jsonl", row("a")), pattern="x*")

    def test_parquet_problems_name_the_row(self, tmp_path: Path) -> None:
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"prompt": ["ok", None], "verifier": [json.dumps(MATCH)] * 2}), path)
        assert refusal(path) == "t.parquet: row 2: field 'prompt': a required field is missing"
        pq.write_table(pa.table({"prompt": ["ok"], "verifier": ["{"]}), path)
        assert "t.parquet: row 1: field 'verifier': this text is no JSON" in refusal(path)

    def test_tasks_that_do_not_fit_the_runs_sandbox(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", row("a", env_key="web"))
        none = CONFIG.model_copy(update={"sandbox": "none"})
        assert "field 'env_key': the task needs a sandbox, and the run has none" in refusal(path, none)
        local = CONFIG.model_copy(update={"sandbox": "local"})
        check_tasks(path, local)
        with pytest.raises(InputError, match="requires its limits"):
            check_task(Task.model_validate(row(environment={"require_limits": True})), local)

    @pytest.mark.parametrize(
        "verifier",
        [
            {"type": "script", "command": "true"},
            {"type": "composite", "components": {"a": {"verifier": {"type": "script", "command": "true"}}}},
        ],
    )
    def test_a_verifier_that_needs_a_sandbox_is_told_before_it_costs_a_call(self, verifier: dict[str, Any]) -> None:
        task = Task.model_validate(row(verifier=verifier))
        check_task(task, CONFIG)
        with pytest.raises(InputError, match="the verifier needs a sandbox, and the run has none"):
            check_task(task, RunConfig(sandbox="none"))
        with pytest.raises(InputError, match="needs an image, directory or tar"):
            check_task(task, RunConfig(sandbox="docker"))

    def test_code_that_would_run_without_isolation_is_told_before_it_costs_a_call(self) -> None:
        code = {"type": "code", "code": "def verify(env):\n    return env.exists('a')"}
        local = RunConfig(sandbox="local")
        with pytest.raises(InputError, match="would run without isolation"):
            check_task(Task.model_validate(row(verifier=code)), local)
        check_task(Task.model_validate(row(verifier=code, environment={"trusted": True})), local)

    def test_the_verifier_of_a_task_without_a_sandbox_has_its_variables(self) -> None:
        script = {"type": "script", "command": "test $DATA_KEY = crm"}
        task = Task.model_validate(row(verifier=script, data_key="crm", env_variables={"B": "task"}))
        resolved = check_task(task, CONFIG)
        assert not resolved.needs_sandbox
        assert sandbox_spec(resolved).env == {"DATA_KEY": "crm", "B": "task"}

    def test_a_tool_of_a_name_that_the_agent_has_itself_is_refused(self) -> None:
        task = Task.model_validate(row(tools=[{"name": "shell", "command": "true"}]))
        check_task(task, CONFIG)
        with pytest.raises(InputError, match="a shell of its own"):
            check_task(task, CONFIG.model_copy(update={"agent": "tool_loop"}))

    def test_a_root_is_one_and_docker_has_none_of_its_own(self) -> None:
        plain = Task.model_validate(row(environment={}))
        docker = RunConfig(sandbox="docker")
        with pytest.raises(InputError, match="needs an image, directory or tar"):
            check_task(plain, docker)
        check_task(Task.model_validate(row(environment={"image": "a"})), docker)
        check_task(plain, RunConfig(sandbox="docker", sandbox_options={"docker": {"image": "a"}}))

    @pytest.mark.parametrize(
        ("environment", "said"),
        [
            ({"image": "a", "tar": "/b.tar"}, "field 'environment': a sandbox has one root: give image or tar"),
            ({"workdir": "here"}, "field 'environment.workdir': must be text that matches ^/, found 'here'"),
            ({"user": ""}, "field 'environment.user': must be text of at least 1 characters"),
            ({"processes": 10**8}, "field 'environment.processes': must be at most 4194304"),
        ],
    )
    def test_an_environment_that_cannot_be_is_refused(
        self, tmp_path: Path, environment: dict[str, Any], said: str
    ) -> None:
        assert said in refusal(write(tmp_path / "t.jsonl", row("a", environment=environment)))

    def test_a_range_of_scores_is_not_empty(self, tmp_path: Path) -> None:
        code = {"type": "code", "code": "def verify(env):\n    return 1", "score_range": [1, 0]}
        assert "verifier.score_range" in refusal(write(tmp_path / "t.jsonl", row("a", verifier=code)))


class TestSources:
    async def taken(self, source: TaskSource) -> list[str]:
        return [task.task_id async for task in iter_tasks(source)]

    async def test_lists_generators_files_and_asynchronous_ones(self, tmp_path: Path) -> None:
        rows = [row(f"t{number}") for number in range(600)]
        names = [f"t{number}" for number in range(600)]

        async def later() -> AsyncIterator[dict[str, Any]]:
            for each in rows:
                yield each

        assert await self.taken(rows) == names
        assert await self.taken(tuple(Task.model_validate(each) for each in rows)) == names
        assert await self.taken(each for each in rows) == names
        assert await self.taken(later()) == names
        assert await self.taken(write(tmp_path / "t.jsonl", *rows)) == names
        assert await self.taken(str(tmp_path / "t.jsonl")) == names
        assert await self.taken([]) == []

    async def test_a_slow_source_gives_its_tasks_as_they_come_and_blocks_nobody(self) -> None:
        go_on = threading.Event()

        def slow() -> Iterator[Task]:
            yield Task.model_validate(row("first"))
            yield Task.model_validate(row("second"))
            assert go_on.wait(60)
            yield Task.model_validate(row("third"))

        def one_at_a_time() -> Iterator[Task]:
            for task in slow():
                threading.Event().wait(0.03)
                yield task

        tasks = iter_tasks(one_at_a_time())
        assert [(await anext(tasks)).task_id for _ in range(2)] == ["first", "second"]
        third = asyncio.ensure_future(anext(tasks))
        await asyncio.sleep(0.05)
        assert not third.done()
        go_on.set()
        assert (await third).task_id == "third"

    async def test_a_wrong_one_is_named_and_those_before_it_are_given(self) -> None:
        tasks = iter_tasks([row("a"), row("b"), row("c", promt="x")])
        assert [(await anext(tasks)).task_id for _ in range(2)] == ["a", "b"]
        with pytest.raises(InputError, match="task number 3: field 'promt': unknown field"):
            await anext(tasks)

    async def test_an_error_of_the_source_passes_through_after_its_tasks(self) -> None:
        def failing() -> Iterator[dict[str, Any]]:
            yield row("a")
            raise ZeroDivisionError

        tasks = iter_tasks(failing())
        assert (await anext(tasks)).task_id == "a"
        with pytest.raises(ZeroDivisionError):
            await anext(tasks)

    async def test_a_file_that_is_not_read_to_its_end_is_closed(self, tmp_path: Path) -> None:
        tasks = iter_tasks(write(tmp_path / "t.jsonl", *(row(f"t{number}") for number in range(2000))))
        await anext(tasks)
        await tasks.aclose()  # type: ignore[attr-defined]

    async def test_one_task_is_no_list_of_tasks(self) -> None:
        for wrong in (row("a"), Task.model_validate(row("a"))):
            with pytest.raises(InputError, match="this is one task"):
                await self.taken(wrong)  # type: ignore[arg-type]


def test_select() -> None:
    tasks = [Task.model_validate(row(name)) for name in ("web-1", "math-1", "web-2", "web-3")]
    assert [task.task_id for task in select(tasks, pattern="web-*", limit=2)] == ["web-1", "web-2"]
    assert [task.task_id for task in select(tasks, limit=1)] == ["web-1"]
    assert len(list(select(tasks))) == 4


class TestResolve:
    def test_an_env_key_becomes_an_environment(self) -> None:
        task = Task.model_validate(
            row("a", env_key="web:3", env_variables={"B": "task"}, data_key="crm", data_version="v2")
        )
        resolved = resolve(task, CONFIG)
        assert resolved.environment is not None
        assert resolved.environment.image == "web:1"
        assert resolved.environment.env == {"A": "env", "B": "task", "DATA_KEY": "crm", "DATA_VERSION": "v2"}
        assert (resolved.env_key, resolved.task_id, resolved.needs_sandbox) == (None, "a", True)
        assert resolve(resolved, RunConfig()) == resolved
        assert Task.model_validate_json(resolved.model_dump_json(exclude_defaults=True)) == resolved

    def test_a_plain_task_stays_as_it_is(self) -> None:
        task = Task.model_validate(row("a", env_variables={"A": "1"}))
        assert resolve(task, CONFIG) is task

    def test_variables_of_a_task_with_files_make_an_environment(self) -> None:
        resolved = resolve(Task.model_validate(row("a", setup=["true"], env_variables={"A": "1"})), CONFIG)
        assert resolved.environment == EnvironmentSpec(env={"A": "1"})

    def test_an_unknown_key(self) -> None:
        with pytest.raises(InputError, match=r"\[environments.desk\]"):
            resolve(Task.model_validate(row("a", env_key="desk")), CONFIG)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"verifier": {"type": "tests.rig:Anything"}}, "verifier.type"),
        ({"tools": [{"name": "t", "function": "os:system"}]}, "tools.0.function"),
    ],
)
def test_a_task_names_code_of_the_host_only_where_the_config_trusts_it(fields: dict[str, Any], where: str) -> None:
    task = Task.model_validate({"prompt": "x", "verifier": {"type": "match", "expected": "x"}, **fields})
    with pytest.raises(InputError) as caught:
        check_task(task, RunConfig(trusted_code=("mypkg.*",)))
    assert caught.value.where == where
    assert "trusted_code" in caught.value.fix


def test_code_that_the_config_trusts_may_be_named() -> None:
    tools = [{"name": "t", "function": "math:sqrt"}]
    task = Task.model_validate({"prompt": "x", "verifier": {"type": "match", "expected": "x"}, "tools": tools})
    assert check_task(task, RunConfig(trusted_code=("math:*",))).tools
