"""`rollout show`: the overview, lists, and one rollout as a person reads it.

One test: .venv/bin/pytest tests/cli/test_show.py -k turn
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import StopReason, Turn
from tests.cli.inside import Inside
from tests.cli.rollout import COMMAND, FAST, Done, environment, rollout, write_tasks

LONG = "word " * 2000


@pytest.fixture
def shown(inside: Inside, finished: tuple[Path, Done]) -> Inside:
    inside.go(finished[0])
    return inside


def test_the_overview_draws_every_attempt(shown: Inside) -> None:
    done = shown("show", "a")
    assert done.code == 0
    [line] = [line for line in done.out.splitlines() if line.startswith("sum-3 ")]
    marks = line.split()[1:]
    assert [len(mark) for mark in marks] == [4, 4]
    assert set("".join(marks)) <= set("✓✗")
    assert "✓ passed" in done.out


def test_a_task_lists_its_rollouts_strongest_model_first(shown: Inside) -> None:
    lines = [line.split() for line in shown("show", "a", "sum-3").out.splitlines() if line.startswith("sum-3")]
    assert [(line[1], line[2]) for line in lines] == [(m, str(k)) for m in ("strong", "weak") for k in range(4)]


def test_a_pattern_chooses_tasks_and_flags_narrow_it(shown: Inside) -> None:
    done = shown("show", "a", "sum-[12]", "--model", "weak", "--attempt", "1", "--json")
    rows = done.document["rollouts"]
    assert [row["rollout_id"] for row in rows] == ["0/weak/1/sum-1", "0/weak/1/sum-2"]


def test_one_rollout_is_told_turn_by_turn(shown: Inside) -> None:
    done = shown("show", "a", "sum-3", "--model", "strong", "--attempt", "0")
    for text in ("0/strong/0/sum-3", "completed (finished)", "▌ user", "What is 3 + 3?", "▌ assistant  turn 0",
                 "▌ verifier", "compare=numeric", "solution  6"):  # fmt: skip
        assert text in done.out
    assert done.out.index("▌ user") < done.out.index("▌ assistant") < done.out.index("▌ verifier")


def test_one_rollout_as_json_has_its_turns_and_its_task(shown: Inside) -> None:
    found = shown("show", "a", "sum-3", "--model", "strong", "--attempt", "0", "--json").document
    [turn] = found["turns"]
    assert [message["role"] for message in turn["messages"]] == ["user", "assistant"]
    assert found["final_answer"] == turn["messages"][1]["content"]
    assert found["task"]["solution"] == "6"


def test_long_texts_are_clipped_unless_full(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1, prompt=LONG)
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST)
    clipped, full = inside("show", "a", "sum-0").out, inside("show", "a", "sum-0", "--full").out
    assert "8,500 more characters; --full shows them" in clipped
    assert full.count("word") == 2000


def test_a_failed_rollout_says_why_and_shows_its_prompt(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1)
    (inside.folder / "answers.jsonl").write_text('{"task_id": "other", "content": "1"}\n')
    inside("run", "tasks.jsonl", "-m", "old=replay:answers.jsonl", "-o", "a", "-q", *FAST)
    done = inside("show", "a", "sum-0")
    for text in ("failed", "model:ModelMissingAnswer", "would fail again", "null, which is not 0", "What is 0 + 0?"):
        assert text in done.out
    assert "sum-0   !" in inside("show", "a").out


def test_many_attempts_are_counted(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1)
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-k", "30", "-o", "a", "-q", *FAST)
    assert "✓30" in inside("show", "a").out
    assert "… and" not in inside("show", "a", "sum-0").out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nope",), "no such rollout"),
        (("--model", "nope"), "it has strong, weak"),
        (("--attempt", "9"), "it has 0 to 3"),
    ],
)
def test_what_is_not_there_is_said(arguments: tuple[str, ...], text: str, shown: Inside) -> None:
    done = shown("show", "a", *arguments)
    assert done.code == 2
    assert text in done.err
    assert done.out == ""


def test_text_that_looks_like_markup_is_shown_as_it_is(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1, prompt="[bold]x[/bold] [/] :smile:", task_id="[red]t[/red]")
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST)
    assert "[bold]x[/bold] [/] :smile:" in inside("show", "a", "--model", "a").out
    assert "[red]t[/red]" in inside("show", "a").out
    assert "[red]t[/red]" in inside("rewards", "a").out


def test_what_a_model_says_is_never_obeyed_by_the_terminal(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1)
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m bell"
    (inside.folder / "answers.jsonl").write_text(json.dumps({"task_id": "sum-0", "content": evil}) + "\n")
    inside("run", "tasks.jsonl", "-m", "old=replay:answers.jsonl", "-k", "2", "-o", "a", "-q", *FAST)
    for arguments in (("sum-0",), ("sum-0", "--attempt", "0"), ("sum-0", "--attempt", "0", "--full")):
        shown = inside("show", "a", *arguments).out
        assert "␛]0;owned␇␛[2J" in shown
        assert not set(shown) & {"\x1b", "\x07", "\x9b"}


def test_text_that_cannot_be_encoded_is_escaped(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 1)
    assert rollout("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST, cwd=tmp_path).code == 0
    done = rollout("show", "a", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.code, done.err) == (0, "")
    assert "\\u2713" in done.out


def test_a_reader_that_has_seen_enough_is_no_error(finished: tuple[Path, Done]) -> None:
    argv = [*COMMAND, "rewards", "a", "--json"]
    with subprocess.Popen(
        argv, cwd=finished[0], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


class Helped:
    """An agent whose helper makes a call too, and that leaves evidence as a program does."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for index, role in enumerate(("sub", "agent")):
            done = await model.complete(task.messages())
            calls = {"tool_calls": [call, call]} if role == "sub" else {}
            on_turn(Turn(index, [*task.messages(), {**done.message, **calls}], done, role))
        report = model.report  # type: ignore[attr-defined]
        report.exit_code = 3
        report.evidence = json.dumps(
            {"program": "helped", "stderr": "a\nits last word", "notes": ["odd"], "seconds": 1}
        )
        return StopReason.FINISHED


def test_an_agent_program_is_told_by_role_tool_and_log(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1)
    agent = f"{__name__}:Helped"
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "--agent", agent, "-o", "a", "-q", *FAST)
    shown = inside("show", "a", "sum-0").out
    for text in ("1 by sub, 1 by agent; look 2×", "turn 0 by sub", "→ look({})", "agent program  helped", "exit code 3",
                 "note      odd", "│ its last word"):  # fmt: skip
        assert text in shown, shown
    found = inside("show", "a", "sum-0", "--json").document
    assert found["calls"] == {"turns": {"sub": 1, "agent": 1}, "tools": {"look": 2}}
    assert [turn["role"] for turn in found["turns"]] == ["sub", "agent"]
    assert found["evidence"]["stderr"].endswith("its last word")


COMPOSITE = {
    "type": "composite",
    "components": {
        "right": {"verifier": {"type": "match", "expected": "0"}, "weight": 3},
        "style": {
            "verifier": {"type": "hybrid", "rule": {"type": "match", "expected": "x"}, "judge": {"type": "judge"}}
        },
        "lost": {"verifier": {"type": "tests.verifiers.test_combined:Says", "raises": "ValueError"}, "optional": True},
        "hooked": {"verifier": {"type": "tests.test_hooks:Verifier", "does": {"cleanup": "raises"}}, "weight": 0},
    },
}
JUDGES = """
trusted_code = ["tests.*"]
[judges.grader]
kind = "scripted"
price_prompt = 1e3
price_completion = 1e3
options = { skill = 0.0, wrong = '{"score": 0.5, "reason": "a little dry"}', tokens = 9 }
"""


def test_a_verdict_is_told_with_its_parts_its_judges_and_its_hooks(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1, verifier=COMPOSITE)
    (inside.folder / "run.toml").write_text(JUDGES)
    inside("run", "tasks.jsonl", "--config", "run.toml", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST)
    shown = inside("show", "a", "sum-0").out
    for text in (
        "isolation pure: in the engine",
        "right = 1  (match, weight 3)",
        "style = 0.5  (hybrid, weight 1)",
        "style.rule = 0  (match)",
        "style.judge = 0.5  (judge)",
        "lost = – left out, it came to no finding  (tests.verifiers.test_combined:Says, weight 1)",
        "judge     1 call, ",
        "│ [style] [judge] {",
        "a little dry",
        "Verifier.cleanup: ValueError: oh no",
    ):
        assert text in shown, shown
    found = inside("show", "a", "sum-0", "--json").document
    assert (found["judge_calls"], found["judge_completion_tokens"], found["score"]) == (1, 9, 0.875)
    assert found["judge_cost_usd"] == (found["judge_prompt_tokens"] + 9) / 1e3
    assert [part["name"] for part in found["components"]] == [
        "right", "style", "style.rule", "style.judge", "lost", "hooked",
    ]  # fmt: skip
    assert found["components"][4]["value"] is None
    assert "a little dry" in found["verifier_output"]
    assert found["hook_errors"] == ["Verifier.cleanup: ValueError: oh no"]
    assert found["calls"] == {"turns": {"agent": 1}, "tools": {}}


def test_what_a_verifiers_command_printed_is_shown_and_never_obeyed(inside: Inside) -> None:
    script = {"type": "script", "command": r"seq 30; printf '\033[2Jdone' >&2"}
    write_tasks(inside.folder / "tasks.jsonl", 1, verifier=script, environment={"trusted": True})
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "--sandbox", "local", "-o", "a", "-q", *FAST)
    shown, full = (inside("show", "a", "sum-0", *more).out for more in ((), ("--full",)))
    assert "isolation fresh: a clean sandbox" in shown
    assert "│ ␛[2Jdone" in shown
    assert "\x1b" not in shown
    assert "│ 11\n" not in shown
    assert "│ 11\n" in full
