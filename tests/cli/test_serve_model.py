"""`rollout serve-model`: a run over HTTP against models that we serve ourselves.

One test: .venv/bin/pytest tests/cli/test_serve_model.py -k http
"""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

from tests.cli.inside import Inside
from tests.cli.rollout import FAST, Running, rollout, write_tasks


def test_a_run_over_http_gives_what_the_models_give_in_process(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl")
    answers = [{"task_id": f"sum-{number}", "content": str(2 * number)} for number in range(3)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    served = ("-m", "weak=scripted:skill=0.5", "-m", "old=replay:answers.jsonl")
    with Running("serve-model", *served, "--tasks", "tasks.jsonl", "--port", "0", cwd=tmp_path) as server:
        url = server.wait_for("serving weak, old at ").split()[-1]
        hint = server.wait_for("-m weak=openai:weak@").split()
        over_http = (*hint, "-m", f"old=openai:old@{url}", "-m", "old.seed_header=true")
        http = rollout("run", "tasks.jsonl", *over_http, "-k", "4", "-o", "a", "--json", *FAST, cwd=tmp_path)
        with urllib.request.urlopen(f"{url}/stats") as stats:
            assert json.load(stats)["calls"] >= 48
        server.interrupt(signal.SIGTERM)
        assert server.end().code == 0
    local = rollout("run", "tasks.jsonl", *served, "-k", "4", "-o", "b", "--json", *FAST, cwd=tmp_path)
    assert http.code == local.code == 1
    assert http.document["failures"] == local.document["failures"] == {"model:ModelMissingAnswer": 12}
    for key in ("valid", "summary"):
        assert http.document[key] == local.document[key]


def test_what_cannot_be_served_is_refused(inside: Inside) -> None:
    for arguments, text in (
        ((), "no model to serve"),
        (("-m", "a=openai:gpt@http://h/v1"), "cannot be served"),
        (("-m", "a=scripted:skill=1"), "name the file of the tasks"),
        (("-m", "a=scripted:skill=1", "--tasks", "nope.jsonl"), "nope.jsonl"),
        (("-m", "a=replay:nope.jsonl"), "nope.jsonl"),
    ):
        done = inside("serve-model", *arguments)
        assert done.code == 2
        assert text in done.err
