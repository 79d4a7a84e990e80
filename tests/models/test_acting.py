"""Scripted models that act: scripts cut into pieces, right and wrong attempts, the same in any process.

.venv/bin/pytest tests/models/test_acting.py
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.config import ModelSpec
from rollout_engine.models import make_client
from rollout_engine.models.acting import FUTILE
from rollout_engine.models.pieces import pieces_of_script
from rollout_engine.models.scripted import ScriptedModel, ScriptedOptions
from rollout_engine.models.server import ModelServer
from rollout_engine.models.server_call import tasks_of
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.specs import Task
from rollout_engine.types import CallContext, Message, Sampling, ToolSpec

from .conftest import ask, client, context, openai_spec

SHELL = (ToolSpec("shell", "", {}),)
SCRIPT = "echo 1 > a\necho 2 > b\ncat a b > c"
PROMPT: list[Message] = [{"role": "user", "content": "Do it."}]


def script_context(attempt: int = 0, turn: int = 0, script: str | None = SCRIPT) -> CallContext:
    return context(solution=None, attempt=attempt, turn=turn)._replace(script=script)


def conversation(model: ScriptedModel, attempt: int = 0, prompt: list[Message] = PROMPT) -> list[str]:
    """What a model runs, and its last words."""
    messages, said = list(prompt), list[str]()
    for turn in range(50):
        message = model.play(messages, Sampling(), SHELL, script_context(attempt, turn)).answer.message
        calls = message.get("tool_calls")
        if not calls:
            return [*said, str(message["content"])]
        said.append(json.loads(calls[0]["function"]["arguments"])["command"])
        messages += [message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "[exit code 0]"}]
    raise AssertionError("it does not end")


def scripted(**options: Any) -> ScriptedModel:
    return ScriptedModel(ScriptedOptions(**options))


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (1, [SCRIPT]),
        (2, ["echo 1 > a", "echo 2 > b\ncat a b > c"]),
        (3, ["echo 1 > a", "echo 2 > b", "cat a b > c"]),
        (4, ["ls -la", "echo 1 > a", "echo 2 > b", "cat a b > c"]),
    ],
)
def test_the_script_is_run_in_so_many_calls(turns: int, said: list[str]) -> None:
    assert conversation(scripted(turns=turns)) == [*said, "Done."]


def test_a_wrong_attempt_takes_as_many_calls_and_claims_to_be_done() -> None:
    attempts = [conversation(scripted(skill=0, turns=3), attempt) for attempt in range(100)]
    assert all(len(said) == 4 and said[-1] == "Done." for said in attempts)
    assert {said[-2] for said in attempts} == set(FUTILE)


def test_skill_is_the_rate_of_right_attempts() -> None:
    n = 2000
    right = sum(conversation(scripted(skill=0.3), attempt)[0] == SCRIPT for attempt in range(n))
    assert abs(right / n - 0.3) <= 4 * (0.3 * 0.7 / n) ** 0.5


def test_examples_in_the_prompt_are_no_turns() -> None:
    examples: list[Message] = [
        {"role": "user", "content": "Say a."},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Do it."},
    ]
    assert conversation(scripted(turns=3), prompt=examples) == conversation(scripted(turns=3))


def test_without_a_shell_or_a_script_it_talks() -> None:
    here = script_context()
    plain = here._replace(script=None, solution="42")
    assert scripted().play(PROMPT, Sampling(), SHELL, plain).answer.message["content"] == "42"
    other = (ToolSpec("browser", "", {}),)
    assert scripted(skill=0).play(PROMPT, Sampling(), other, here).answer.message["content"]


@pytest.mark.parametrize(
    ("tool", "argument"), [("bash", "command"), ("Bash", "command"), ("exec_command", "cmd"), ("shell", "command")]
)
def test_it_acts_by_the_shell_of_any_agent_program(tool: str, argument: str) -> None:
    schema = {"properties": {argument: {}, "why": {}, "timeout": {}}, "required": [argument, "why"]}
    tools = (ToolSpec("edit", "", {}), ToolSpec(tool, "", schema))
    [call] = scripted().play(PROMPT, Sampling(), tools, script_context()).answer.message["tool_calls"]
    assert call["function"]["name"] == tool
    assert set(json.loads(call["function"]["arguments"])) == {argument, "why"}


def test_faults_and_tokens_are_those_of_any_answer() -> None:
    play = scripted().play(PROMPT, Sampling(logprobs=True), SHELL, script_context())
    assert play.answer.finish_reason == "tool_calls"
    assert play.answer.usage.completion_tokens == len(play.answer.logprobs or ()) > len(SCRIPT)
    empty = scripted(p_empty=1.0).play(PROMPT, Sampling(), SHELL, script_context()).answer.message
    assert empty == {"role": "assistant", "content": ""}


async def test_it_acts_the_same_over_http() -> None:
    task = Task(task_id="t", prompt="Do it.", verifier={"type": "match"}, solution={"script": SCRIPT})
    solutions, prompts = tasks_of([task])
    assert solutions == {"t": {"script": SCRIPT}}
    here = make_client(ModelSpec(name="m", kind="scripted", options={"skill": 0.5}))
    models = {"m1": ModelSpec(name="m1", kind="scripted", options={"skill": 0.5})}
    async with (
        ModelServer(models, solutions=solutions, prompts=prompts) as server,
        client(openai_spec(server.url, seed_header=True)) as there,
    ):
        for attempt in range(10):
            where = script_context(attempt)
            near = await ask(here, where, messages=PROMPT, tools=SHELL)
            assert (await ask(there, where, messages=PROMPT, tools=SHELL)).message == near.message


async def test_a_server_process_knows_scripts() -> None:
    with ServerProcess({"m1": ModelSpec(name="m1", kind="scripted")}, solutions={"t": {"script": SCRIPT}}) as server:
        async with client(openai_spec(server.url, seed_header=True)) as there:
            completion = await ask(there, script_context(script=None), messages=PROMPT, tools=SHELL)
    assert json.loads(completion.message["tool_calls"][0]["function"]["arguments"]) == {"command": SCRIPT}


# -- pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "pieces"),
    [
        ("a\nb", ["a", "b"]),
        ("# why\na\n\nb\n", ["a", "b"]),
        ("cat > f <<'EOF'\nx\n\nif [\nEOF\nb", ["cat > f <<'EOF'\nx\n\nif [\nEOF", "b"]),
        ("cat <<-END | sort\n\tx\n\tEND\nb", ["cat <<-END | sort\n\tx\n\tEND", "b"]),
        ("cat <<A <<B\n1\nA\n2\nB\nb", ["cat <<A <<B\n1\nA\n2\nB\nb"]),
        ("a\nfor x in 1 2; do\n  b\ndone\nc", ["a", "for x in 1 2; do\n  b\ndone\nc"]),
        ("a\nx=1\necho $x", ["a", "x=1\necho $x"]),
        ("a\ncd sub\nb", ["a", "cd sub\nb"]),
        ("a\nb && cd sub\nb", ["a", "b && cd sub\nb"]),
        ("a\necho 'x\ny'\nb", ["a", "echo 'x\ny'\nb"]),
        ("a |\nb\nc", ["a |\nb\nc"]),
        ("a \\\n  -b\nc", ["a \\\n  -b\nc"]),
        ("a && {\nb\n}\nc", ["a && {\nb\n}\nc"]),
        ("", []),
    ],
)
def test_pieces_stand_alone(script: str, pieces: list[str]) -> None:
    assert pieces_of_script(script, 99) == pieces


LINES = st.sampled_from(
    [
        "echo a >> out",
        "cat >> out <<'EOF'\n$x `y` '\nEOF",
        "for i in 1 2; do echo $i >> out; done",
        "if true; then\n  echo t >> out\nfi",
        "x=1; echo $x >> out",
        "mkdir -p d && cd d && echo here >> ../out && cd ..",
        "echo 'two\nlines' >> out",
        "printf '%s\\n' b \\\n  c >> out",
        'echo "$x" >> out',
        "y=$(cat out | wc -l)",
        "echo $y >> out  # how many",
        "",
    ]
)


@settings(max_examples=25)
@given(st.lists(LINES, max_size=6), st.integers(1, 8))
def test_pieces_do_together_what_the_script_does(tmp_path_factory: Any, lines: list[str], count: int) -> None:
    def output(scripts: list[str]) -> bytes:
        folder: Path = tmp_path_factory.mktemp("run")
        for script in scripts:
            subprocess.run(["sh", "-c", script], cwd=folder, check=False, capture_output=True)
        return (folder / "out").read_bytes() if (folder / "out").exists() else b""

    script = "\n".join(lines)
    pieces = pieces_of_script(script, count)
    assert len(pieces) <= count
    assert output(pieces) == output([script])
