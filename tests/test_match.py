"""The `match` verifier: what counts as the answer, how it is compared, and that no pattern holds anything up."""

from __future__ import annotations

import asyncio
import threading
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.errors import InputError, VerifierTimeout
from rollout_engine.specs import Task
from rollout_engine.types import Isolation, Score, Trajectory
from rollout_engine.verifiers import check_verifier, make_verifier
from rollout_engine.verifiers.match import Match

TASK = Task(task_id="t", prompt="p", verifier={"type": "match", "expected": ""})
BACKTRACKS = r"(a|aa)+$"
"""Exponential even in the `regex` package."""


def verdict(answer: str | None, expected: Any, pattern: str | None = None, **fields: Any) -> bool:
    spec = {"type": "match", "expected": expected, "pattern": pattern, **fields}
    score = asyncio.run(Match(spec).verify(TASK, Trajectory(final_answer=answer), None))
    assert score in (Score(1.0, True), Score(0.0, False))
    return bool(score.value)


@pytest.mark.parametrize(
    ("answer", "pattern", "expected", "right"),
    [
        ("A: 1\nA: 2", r"A: (\d)", "2", True),  # the last match
        ("A: 1\nA: 2", r"A: (\d)", "1", False),
        ("key=v", r"(\w+)=(\w+)", "v", True),  # its last group
        ("only left", r"(left)|(right)", "left", True),  # that took part
        ("42!", r"\d+", "42", True),  # the whole match without groups
        (" 42\n", None, "42", True),  # the whole answer without a pattern
        ("no capture", r"A: (.*)", "", False),  # wrong, even where nothing is expected
        ("b", r"(a)?b", "", False),
        ("A: ", r"A: (.*)", "", True),
        (None, None, "", False),  # no answer at all
        (None, ".*", "", False),
        ("", None, "", True),
    ],
)
def test_which_part_of_the_answer_counts(answer: str | None, pattern: str | None, expected: str, right: bool) -> None:
    assert verdict(answer, expected, pattern) is right


@pytest.mark.parametrize("text", ["1000", "1,000", "$1,000.00", "1000.", " 1000 ", "1e3", "+1000", "$ 1,000", "1000.0"])
def test_ways_to_write_a_number(text: str) -> None:
    assert verdict(text, "1000", compare="numeric")
    assert verdict(text, 1000)
    assert verdict(text, 1000.0)


@pytest.mark.parametrize("text", ["", ".", "$", "a thousand", "1000 apples", "1_000", "nan", "inf", "--1000"])
def test_what_is_no_number_is_wrong(text: str) -> None:
    assert not verdict(text, "1000", compare="numeric")


def test_decimals_are_exact() -> None:
    assert verdict("0.1", 0.1)
    assert verdict("1.0", "1", compare="numeric")
    assert not verdict("0.30000000000000001", "0.3", compare="numeric")
    assert not verdict("1e999999999", "1e999999998", compare="numeric")
    assert not verdict("1e99999999999999999999", "1", compare="numeric")
    assert verdict("-$5", -5)


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_every_decimal_equals_itself(number: Decimal) -> None:
    assert verdict(f"A: {number}", str(number), r"A: (.*)", compare="numeric")


@given(st.text(), st.sampled_from(["exact", "numeric", "set"]))
def test_no_answer_makes_it_raise(answer: str, compare: str) -> None:
    verdict(answer, "1", r"(\S+)?\s*$", compare=compare)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("b, a", ["a", "b"], True),
        ("a b a", ["a", "b"], True),
        ('["b", "a"]', ["a", "b"], True),
        ("[b, a]", ["a", "b"], True),
        ("{1, 2}", [1, 2], True),
        ("[2, 1]", [1, 2], True),
        ("a", ["a", "b"], False),
        ("a, b, c", ["a", "b"], False),
        ("a; b", ["a", "b"], False),
        ("", [], True),
        ("a b", "b, a", True),
        ("Paris, New York", ["New York", "Paris"], True),
        ("New York\nParis", ["New York", "Paris"], True),
        ("New York", ["New York"], True),
        ("York New", ["New York"], False),
        ("[" * 100_000, ["a"], False),
    ],
)
def test_sets(answer: str, expected: Any, right: bool) -> None:
    assert verdict(answer, expected, compare="set") is right


def test_case() -> None:
    assert not verdict("ANSWER: Yes", "yes", "ANSWER: (.*)")
    assert verdict("Answer: YES", "yes", "ANSWER: (.*)", ignore_case=True)
    assert verdict("B A", ["a", "b"], ignore_case=True)


def test_exact_compares_numbers_as_written() -> None:
    assert verdict("42", 42, compare="exact")
    assert not verdict("42.0", 42, compare="exact")


@pytest.mark.parametrize(
    ("spec", "field", "said"),
    [
        ({}, "verifier.type", "missing"),
        ({"type": 3}, "verifier.type", "text"),
        ({"type": "mach"}, "verifier.type", "did you mean 'match'"),
        ({"type": "no_such_module:make"}, "verifier.type", "cannot import"),
        ({"type": "match"}, "verifier.expected", "missing"),
        ({"type": "match", "expected": None}, "verifier.expected", "found null"),
        ({"type": "match", "expected": True}, "verifier.expected", "found true"),
        ({"type": "match", "expected": "x", "pattern": "(a"}, "verifier.pattern", "no regular expression"),
        ({"type": "match", "expected": "x", "patern": "a"}, "verifier.patern", "did you mean 'pattern'"),
        ({"type": "match", "expected": "x", "compare": "fuzzy"}, "verifier.compare", "one of 'exact', 'numeric'"),
        ({"type": "match", "expected": "x", "compare": "numeric"}, "verifier.expected", "no number"),
        ({"type": "match", "expected": ["x"], "compare": "exact"}, "verifier.expected", "list"),
        ({"type": "match", "expected": float("nan")}, "verifier.expected", "finite"),
    ],
)
def test_bad_specs_name_their_field(spec: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_verifier(spec)
    assert caught.value.where == field
    assert said in str(caught.value)


def test_it_is_pure() -> None:
    assert make_verifier({"type": "match", "expected": "1"}).isolation is Isolation.PURE


async def test_a_pattern_that_backtracks_meets_the_limit_and_holds_up_nobody() -> None:
    verifier = make_verifier({"type": "match", "expected": "a", "pattern": BACKTRACKS}, timeout_s=0.3)
    pauses: list[float] = []

    async def beat() -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.001)
            pauses.append(time.thread_time() - start)

    heart = asyncio.create_task(beat())
    with pytest.raises(VerifierTimeout, match=r"0\.3 s"):
        await verifier.verify(TASK, Trajectory(final_answer="a" * 60 + "b"), None)
    heart.cancel()
    assert len(pauses) > 5
    assert max(pauses) < 0.05


async def test_a_cancelled_verdict_ends_at_once() -> None:
    verifier = make_verifier({"type": "match", "expected": "a", "pattern": BACKTRACKS}, timeout_s=2.0)
    before = set(threading.enumerate())
    verdict = asyncio.create_task(verifier.verify(TASK, Trajectory(final_answer="a" * 60 + "b"), None))
    await asyncio.sleep(0.05)
    verdict.cancel()
    with pytest.raises(asyncio.CancelledError):
        await verdict
    assert set(threading.enumerate()) - before, "and the search, which nobody can end, goes on"


@pytest.mark.parametrize("answer", ["word " * 500_000 + "A: 7", "7" * 40_000 + " A: 7", "1 " * 10_000 + "A: 7"])
async def test_long_answers_are_verified_too(answer: str) -> None:
    verifier = make_verifier({"type": "match", "expected": 7, "pattern": r"(?:A: )?(\d+)"})
    assert (await verifier.verify(TASK, Trajectory(final_answer=answer), None)).passed


async def test_a_short_verdict_takes_microseconds() -> None:
    verifier = make_verifier({"type": "match", "expected": "12", "pattern": r"A:\s*(.*)", "compare": "numeric"})
    trajectory = Trajectory(final_answer="so the total is 3*4=12\n" * 5 + "A: $12.")
    best = 1.0
    for _ in range(200):
        start = time.thread_time()
        for _ in range(100):
            await verifier.verify(TASK, trajectory, None)
        best = min(best, (time.thread_time() - start) / 100)
    assert best < 15e-6
