"""What is said against verifier code before it runs.

make one T=tests/test_staticcheck.py
"""

from __future__ import annotations

import pytest

from rollout_engine.specs import Task
from rollout_engine.staticcheck import StaticLimits, check_code, static_reasons

GOOD = """
import json

def parse(text):
    return json.loads(text)

def verify(env, final_answer=None):
    rows = parse(env.read_file("out.json"))
    if len(rows) != 3:
        return 0.0
    return 1.0 if rows[0] == "a" else 0.5
"""


@pytest.mark.parametrize(
    "code",
    [
        GOOD,
        "def verify(env, final_answer=None):\n    return final_answer == '42'",
        "async def validate_task(env):\n    return env.exec('make test').ok",
        "def verify(env, a):\n    if a != '42':\n        raise ValueError('wrong')\n    return 1.0",
        "def verify(env, a=None):\n    return TASK_SUCCESSFUL_SCORE if a == '1' else TASK_FAILED_SCORE",
        "def verify(*args):\n    return len(args[1]) == 2",
    ],
)
def test_good_code_passes(code: str) -> None:
    assert check_code(code) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def verify(env:", "is no Python"),
        ("x = 1", "defines no verifier function"),
        ("def verify(env, a, b, c):\n    return a == b", "needs c, which no verifier gets"),
        ("def verify(env, *, key):\n    return key in env.files()", "needs key"),
        ("def verify(env):\n    yield env.exec('x').ok", "is a generator"),
        ("def verify(env):\n    return 1", "looks at none of its inputs"),
        ("def verify(env, a):\n    x = 'a' == 'a'\n    return x", "looks at none of its inputs"),
        ("def verify(env, a):\n    print(a)\n    return 1.0", "always returns 1.0"),
        ("def verify(env, a):\n    if a:\n        return 1\n    return True", "always returns 1.0"),
        ("def verify(env, a):\n    print(a)\n    return {'score': 0.5}", "always returns 0.5"),
        ("def verify(env, a):\n    print(a)", "never returns a score"),
        ("def verify(env, a):\n    if a:\n        return\n    return None", "never returns a score"),
        ("import os\ndef verify(env, a):\n    return os.path.exists(a)", "imports os"),
        ("def verify(env, a):\n    from subprocess import run\n    return run(a)", "imports subprocess"),
        ("from . import x\ndef verify(env, a):\n    return x(a)", "relative import"),
        ("def verify(env, a):\n    return eval(a)", "uses eval"),
        ("def verify(env, a):\n    return a.__class__.__bases__ == 1", "uses __bases__"),
        ("def verify(env, a):\n    return a in [" + "1, " * 700 + "]", "syntax nodes"),
        ("def verify(env, a): pass\n" + "#" * 300_000, "bytes"),
    ],
)
def test_a_reason_is_named(code: str, said: str) -> None:
    reasons = check_code(code)
    assert any(said in reason for reason in reasons), reasons


def test_all_reasons_are_named_at_once() -> None:
    reasons = check_code("import os\nimport socket\ndef verify(env, a):\n    return 1.0")
    assert reasons == [
        "it imports os: use env instead",
        "it imports socket: use env instead",
        "verify looks at none of its inputs",
        "verify always returns 1.0",
    ]


def test_only_verifiers_with_code_are_judged() -> None:
    def task(verifier: dict[str, str]) -> Task:
        return Task(task_id="t", prompt="?", verifier=verifier)

    assert static_reasons(task({"type": "match", "expected": "4"})) == ()
    assert static_reasons(task({"type": "code", "code": GOOD})) == ()
    assert static_reasons(task({"type": "code", "code": "x = 1"})) == ("defines no verifier function",)


def test_limits_can_be_others() -> None:
    code = "import os\ndef verify(env, a):\n    return os.path.exists(a)"
    assert check_code(code, StaticLimits(blocked_imports=frozenset())) == []
    assert check_code(GOOD, StaticLimits(max_nodes=10)) != []
