"""What verifier code may look like and what its answers mean, in the warm verifier and in a fresh interpreter.

make one T=tests/verifiers/test_code.py
"""

from __future__ import annotations

from typing import Any

import pytest

from rollout_engine.errors import InputError, SandboxUnavailable, VerifierBadReturn, VerifierError
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Isolation, Score, Trajectory, Turn
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import takes_sandbox
from rollout_engine.verifiers.code.source import parse
from rollout_engine.verifiers.workshop import Workshop


def task_of(code: str, *, trusted: bool = True, **fields: Any) -> Task:
    verifier = {"type": "code", "code": code, **fields}
    return Task(task_id="t", prompt="What is 6 * 7?", verifier=verifier, environment={"trusted": trusted})  # type: ignore[arg-type]


def trajectory(answer: str | None = "42") -> Trajectory:
    message = {"role": "assistant", "content": answer}
    prompt = {"role": "user", "content": "What is 6 * 7?"}
    return Trajectory((Turn(0, [prompt, message], Completion(message, "stop")),), answer)


async def verdict(workshop: Workshop, code: str, answer: str | None = "42", **fields: Any) -> Score:
    task = task_of(code, **fields)
    verifier = make_verifier(task.verifier or {}, timeout_s=60, workshop=workshop)
    assert verifier.isolation is Isolation.FRESH
    return await verifier.verify(task, trajectory(answer), None)


HELPER_FIRST = """
def parse(text):
    return 0.25

def verify(env, final_answer=None):
    return 1.0 if parse(final_answer) == 0.25 else 0.0
"""
HELPER_AFTER = """
import os.path

def verify(env, final_answer=None):
    return check(final_answer)

def check(text):
    return float(os.path.basename("/a/" + text) == "42")
"""
CLASS = """
from dataclasses import dataclass

@dataclass
class Finding:
    score: float

def verify(env, final_answer=None):
    return Finding(0.5)
"""
FLEET = """
from fleet.verifiers import verifier
import fleet

@verifier(key="x")
def whatever(env, final_answer: str | None = None) -> float:
    return TASK_SUCCESSFUL_SCORE if final_answer == "42" else TASK_FAILED_SCORE
"""
CONVERSATION = """
import json

def verify(env, final_answer, conversation):
    json.dumps(conversation)
    return [m["role"] for m in conversation] == ["user", "assistant"] and conversation[1]["content"] == final_answer
"""


class TestMeaning:
    @pytest.mark.parametrize(
        ("code", "score"),
        [
            (HELPER_FIRST, 1.0),
            (HELPER_AFTER, 1.0),
            (CLASS, 0.5),
            (FLEET, 1.0),
            (CONVERSATION, 1.0),
            ("async def verify(env, final_answer=None):\n    return 0.75", 0.75),
            ("def verify(env):\n    async def later():\n        return 1\n    return later()", 1.0),
            ("def validate_task(env, final_answer=None, conversation=None):\n    return final_answer == '42'", 1.0),
            ("def check(env, a):\n    return a == '42'\n\ndef other(x):\n    return 0", 1.0),
            ("def verify(final_answer):\n    return final_answer == '42'", 1.0),
            ("def verify(conversation, env, answer):\n    return answer == '42' and len(conversation) == 2", 1.0),
            ("def verify(env, *, final_answer, conversation=()):\n    return final_answer == '42'", 1.0),
            ("def verify(env, final_answer):\n    return {'score': 0.5, 'components': {'a': True, 'b': -3}}", 0.5),
            ("def verify():\n    return 7", 7.0),
            ("def verify(env):\n    return -0.5", -0.5),
            ("from fractions import Fraction\ndef verify(env):\n    return Fraction(1, 4)", 0.25),
            ("def verify(env, a):\n    return normalized_contains('Forty-Two!', 'it is fortytwo. yes')", 1.0),
            (
                "def verify(env, a):\n    return contains_number('1,042.5', '1042.5') and extract_numbers(a) == [42]",
                1.0,
            ),
            ("def verify(env, a):\n    return IgnoreConfig(tables={'t'}).should_ignore_table('t')", 1.0),
            ("def verify(env, a):\n    return bool(re.match(r'4.', a) and json and string.digits)", 1.0),
            ("if True:\n    X = 1\ndef verify(env):\n    return sum(X for _ in range(3))", 3.0),
            ("from __future__ import annotations\ndef verify(env: Missing) -> Nothing:\n    return 1", 1.0),
        ],
    )
    async def test_the_score(self, workshop: Workshop, code: str, score: float) -> None:
        assert (await verdict(workshop, code)).value == score

    async def test_components_and_passed(self, workshop: Workshop) -> None:
        code = "def verify(env):\n    return {'score': 0.9, 'components': {'a': 1, 2: True}, 'passed': False}"
        assert await verdict(workshop, code) == Score(0.9, False, {"a": 1.0, "2": 1.0})

    async def test_no_answer_is_none(self, workshop: Workshop) -> None:
        code = "def verify(env, final_answer=None):\n    return final_answer is None"
        assert (await verdict(workshop, code, None)).value == 1.0


class TestNoFinding:
    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ("None", "None"),
            ("float('nan')", "not finite"),
            ("float('-inf')", "not finite"),
            ("'1.0'", "not a number"),
            ("[1]", "not a number"),
            ("10**400", "int too large"),
            ("{'reward': 1}", "without `score`"),
            ("{'score': None}", "not a number"),
            ("{'score': 1, 'components': {'a': 'b'}}", "component 'a'"),
            ("{'score': 1, 'components': [1]}", "components"),
            ("{'score': 1, 'passed': 'yes'}", "passed"),
            ("1j", "not a number"),
        ],
    )
    async def test_what_is_no_number_is_no_verdict(self, workshop: Workshop, returned: str, said: str) -> None:
        with pytest.raises(VerifierBadReturn, match=said):
            await verdict(workshop, f"def verify(env):\n    return {returned}")

    async def test_an_error_keeps_its_traceback_and_what_was_printed(self, workshop: Workshop) -> None:
        code = (
            "def verify(env, a):\n    print('looking at', a)\n    return helper(a)\n\ndef helper(a):\n    return {}[a]"
        )
        with pytest.raises(VerifierError) as caught:
            await verdict(workshop, code)
        assert not isinstance(caught.value, VerifierBadReturn)
        for part in ('verifier_code.py", line 3, in verify', "return {}[a]", "KeyError: '42'", "looking at 42"):
            assert part in str(caught.value)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("import sys; sys.exit(0)", "SystemExit"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
            ("import os; os._exit(0)", "ended without a verdict"),
            ("f = lambda: f(); f()", "RecursionError"),
            ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "E"),
            ("import no_such_package", "no_such_package"),
            ("yield 1", "not a number"),
        ],
    )
    async def test_ways_to_end_without_one(self, workshop: Workshop, body: str, said: str) -> None:
        with pytest.raises(VerifierError, match=said):
            await verdict(workshop, f"def verify(env):\n    {body}")

    async def test_a_score_outside_the_declared_range_is_not_clipped(self, workshop: Workshop) -> None:
        code = "def verify(env, a):\n    return float(a)"
        assert (await verdict(workshop, code, "1", score_range=[0, 1])).value == 1.0
        with pytest.raises(VerifierBadReturn, match="7 is not within the declared 0 to 1"):
            await verdict(workshop, code, "7", score_range=[0, 1])


class TestBefore:
    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("def verify(env:\n    return 1", "no Python"),
            ("x = 1", "no verifier function"),
            ("def check(answer):\n    return 1", "no verifier function"),
            ("class V:\n    def verify(self, env):\n        return 1", "no verifier function"),
            ("x = '\0'", "no Python"),
            ("(" * 300 + ")" * 300, "no Python"),
            ("#" * 300_000, "bytes"),
        ],
    )
    def test_code_that_can_never_judge_is_an_input_error(self, code: str, said: str) -> None:
        with pytest.raises(InputError, match=said) as caught:
            make_verifier({"type": "code", "code": code})
        assert caught.value.where == "verifier.code"

    @pytest.mark.parametrize(
        ("code", "uses"),
        [
            ("def verify(env, final_answer=None):\n    return final_answer == 'x'", False),
            ("def verify(env):\n    return env.exec('true').ok", True),
            ("def verify(env, a):\n    def inner():\n        return env\n    return inner()", True),
            ("def verify(e, a):\n    return e.files()", True),
            ("def verify(env, a):\n    return helper(env)\ndef helper(x):\n    return 1", True),
            ("def verify(env, a):\n    return locals()['env']", True),
            ("def verify(*args):\n    return args[0].files()", True),
            ("def verify(env, a):\n    env = 1\n    return 1", False),
            ("def verify(final_answer):\n    return 1", False),
        ],
    )
    def test_whether_it_looks_at_env(self, code: str, uses: bool) -> None:
        assert parse(code).uses_env == uses
        verifier = make_verifier({"type": "code", "code": code, "isolation": "in_place"})
        assert takes_sandbox(verifier) == uses
        assert verifier.isolation is (Isolation.IN_PLACE if uses else Isolation.FRESH)

    async def test_without_isolation_only_trusted_code_runs(self) -> None:
        workshop = Workshop(warm=False)
        with pytest.raises(SandboxUnavailable, match="trusted"):
            await verdict(workshop, "def verify(env):\n    return 1", trusted=False)
        await workshop.close()
