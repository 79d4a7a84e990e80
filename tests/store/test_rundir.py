"""Making, opening and resuming a run directory, and what bad ones get. Run: pytest tests/store/test_rundir.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, RunError
from rollout_engine.store import create_run, differences, open_run

from .rows import abandon, batch, make_config, make_run, plan, record, rows_of


def files(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_a_run_is_opened_as_it_was_made(tmp_path: Path) -> None:
    config = make_config(seed=7, environments={"py": {"image": "python:3"}})
    made = create_run(tmp_path / "deep" / "run", config, "my-run", {"tasks": "t.jsonl"})
    run = open_run(made.path)
    assert run.info == made.info
    assert (run.run_id, run.info.config, run.info.status) == ("my-run", config, "running")
    assert run.info.provenance["tasks"] == "t.jsonl"
    assert "pyarrow" in run.info.versions
    assert files(made.path) == ["epochs", "log", "plan", "run.json", "traces"]
    assert run.driver() is None
    assert len(run.rollouts()) == 0
    assert run.rollouts(["rollout_id", "score"]).column_names == ["rollout_id", "score"]


def test_an_existing_run_points_to_resume(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    before = made.layout.run_json.read_bytes()
    with pytest.raises(InputError, match="rollout resume"):
        create_run(made.path, make_config())
    assert made.layout.run_json.read_bytes() == before


def test_what_is_no_place_for_a_run_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    before = files(tmp_path)
    for path in (foreign, tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=path.name) as refused:
            create_run(path, make_config())
        assert refused.value.where
        assert refused.value.fix
    with pytest.raises(InputError, match="no run directory"):
        open_run(foreign)
    with pytest.raises(InputError, match="at least one model"):
        create_run(tmp_path / "new", RunConfig())
    assert files(tmp_path) == before
    with pytest.raises(InputError, match="cannot be"):
        create_run("/proc/nowhere/run", make_config())


def test_an_empty_directory_and_what_a_killed_start_left_are_fine(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123.tmp").write_text("{")
    run = create_run(tmp_path, make_config())
    run.start().close("finished")
    assert files(tmp_path) == ["epochs", "epochs/1.json", "log", "plan", "plan/1.jsonl", "run.json", "traces"]


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_damaged_run_json_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    good = run.layout.run_json.read_text()
    config = json.loads(good)["config"]
    for bad, says in (
        ("", "is damaged"),
        ("[]", "is damaged"),
        (good[:-20], "is damaged"),
        (good.replace('"k": 3', '"k": "x"'), "is damaged: config.k"),
        (good.replace('"k": 3', '"k": 4'), "was edited"),
        (good.replace('"schema_version": "1"', '"schema_version": "9"'), "schema version '9'"),
        ("\udcff", "is damaged"),
    ):
        run.layout.run_json.write_bytes(bad.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match=says) as refused:
            open_run(run.path)
        assert refused.value.where == str(run.layout.run_json)
    run.layout.run_json.write_text(good)
    edited(run.layout.run_json, config={**config, "plan_ahead": 7})
    assert open_run(run.path).info.config.plan_ahead == 7


def test_what_would_mix_results_is_refused_field_by_field(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = run.layout.run_json.read_bytes()
    model = {"name": "strong", "kind": "scripted"}
    changed = make_config(
        k=5,
        models=[{**model, "temperature": 0.5, "options": {"skill": 0.7}}, {"name": "order", "kind": "scripted"}],
        limits={"agent_s": 60},
        environments={"py": {"image": "python:3"}},
    )
    with pytest.raises(InputError) as refused:
        run.adopt(changed)
    lines = [line.strip() for line in refused.value.message.splitlines()[1:]]
    assert 'model_names: ["strong", "weak"] -> ["strong", "order"]' in lines
    assert "models.strong.temperature: null -> 0.5" in lines
    assert "models.strong.options.skill: (absent) -> 0.7" in lines
    assert "k: 3 -> 5" in lines
    assert "limits.agent_s: 1800.0 -> 60.0" in lines
    assert 'environments.py.image: (absent) -> "python:3"' in lines
    assert not [line for line in lines if "weak." in line or "order." in line]
    assert run.layout.run_json.read_bytes() == before


def test_what_mixes_nothing_may_change_on_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    models = [
        {"name": name, "kind": "scripted", "max_concurrency": 3, "price_prompt": 1} for name in ("strong", "weak")
    ]
    changed = make_config(
        models=models,
        ray="off",
        hosts_per_node=2,
        host={"slots": 1},
        store={"segment_bytes": 1000},
        plan_ahead=1,
        rewards={"ordered": False},
        retry={},
        max_cost_usd=3,
        no_progress_s=9,
    )
    assert differences(run.info.config, changed) == []
    run.adopt(changed)
    run.start().close("finished")
    assert open_run(run.path).info.config == changed


def test_a_driver_writes_and_the_next_one_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = run.start()
    plan(writer, 2)
    writer.commit([batch([record(key) for key in range(7)])])
    with pytest.raises(InputError, match="a driver works on this run"):
        open_run(run.path).start()
    writer.record("running", {"images": ["python@sha256:1"]})
    writer.close("interrupted")
    writer.close("finished")

    run = open_run(run.path)
    assert (run.info.status, run.info.provenance["images"]) == ("interrupted", ["python@sha256:1"])
    writer = run.start()
    assert writer.epoch.number == 2
    assert writer.plan.find(0, "task/1") == 1
    assert writer.ledger.todo(range(12)) == [(key, 0) for key in range(7, 12)]
    writer.commit([batch([record(key) for key in range(7, 12)])])
    writer.close("finished")
    assert sorted(rows_of(run, "key")) == [(key,) for key in range(12)]
    assert open_run(run.path).info.status == "finished"


def test_a_superseded_driver_writes_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    old = run.start()
    plan(old, 1)
    old.commit([batch([record(0)])])
    abandon(run, 1)
    new = open_run(run.path).start()
    with pytest.raises(RunError, match="another driver has taken over"):
        old.commit([batch([record(1)])])
    with pytest.raises(RunError, match="another driver has taken over"):
        old.compact()
    assert not run.layout.staging.exists()
    old.close("failed")
    assert open_run(run.path).info.status == "running"
    new.close("finished")
    assert rows_of(run, "key") == [(0,)]


def test_a_plan_of_another_shape_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.start().close("finished")
    path = run.layout.plan_file(1)
    path.write_text(path.read_text().replace('"k":3', '"k":4'))
    with pytest.raises(RunError, match="planned 4 attempts"):
        run.start()
    assert run.driver() is None, "a start that failed holds no epoch"
