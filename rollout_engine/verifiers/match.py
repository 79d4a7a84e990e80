"""The `match` verifier: compares what a pattern finds in the final answer with what the task expects.

    {"type": "match", "pattern": "A: *(.*)", "compare": "numeric", "expected": "42", "ignore_case": false}

pattern     a regular expression (of the package `regex`). Its last match in the answer counts, of that the last
            group that took part, or the whole match where the pattern has no groups. None: the whole answer.
compare     exact     text, without the white space around it
            numeric   exact decimals, after dropping `,`, `$` and one trailing dot: 1,000.0 is 1000
            set       items of a JSON list, or else separated by commas and white space (by commas and line
                      ends only, where an expected item itself holds white space); compared as text, in any
                      order, repetitions ignored; brackets around the whole are dropped
            default: numeric for an expected number, set for a list, exact for text
ignore_case for pattern and comparison

No answer, no match, or no number where one is expected is a wrong answer: score 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeVar

import regex
from pydantic import ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr

from rollout_engine.errors import InputError, VerifierTimeout
from rollout_engine.problems import checked
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Spec, Task
from rollout_engine.threads import in_own_thread
from rollout_engine.types import Isolation, Score, Trajectory

T = TypeVar("T")
Compare = Literal["exact", "numeric", "set"]

SHORT_ANSWER_CHARS = 32 * 1024
"""Longer answers are verified in a thread, without the interpreter's lock."""
SHORT_LIMIT_S = 0.005
"""A pattern that takes longer than this on the event loop backtracks badly, and goes on in a thread."""
SHORT_MATCHES = 1_000
"""So does one with more matches than this."""

RIGHT, WRONG = Score(1.0, True), Score(0.0, False)


class MatchSpec(Spec):
    """The fields of a task's `verifier` of type match."""

    model_config = ConfigDict(allow_inf_nan=False)
    type: Literal["match"] = "match"
    expected: StrictStr | StrictInt | StrictFloat | list[StrictStr | StrictInt | StrictFloat]
    pattern: StrictStr | None = None
    compare: Compare | None = None
    ignore_case: StrictBool = False


class Match:
    """Verifies final answers against one task's expectation, in microseconds where the answer is short."""

    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0) -> None:
        """Raises InputError naming the field that cannot be used."""
        fields = checked(MatchSpec, spec, "verifier")
        self._timeout_s = timeout_s
        self._pattern = None if fields.pattern is None else _compiled(fields.pattern, fields.ignore_case)
        self._equals = _comparison(fields)

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        answer = trajectory.final_answer
        if answer is None:
            return WRONG
        if len(answer) <= SHORT_ANSWER_CHARS:
            with suppress(TimeoutError):
                return self._verdict(answer, SHORT_LIMIT_S, SHORT_MATCHES, concurrent=False)
        try:
            return await in_own_thread(lambda: self._verdict(answer, self._timeout_s, None, concurrent=True), "match")
        except TimeoutError as error:
            raise VerifierTimeout(
                f"the pattern did not come to an end on an answer of {len(answer)} characters "
                f"within {self._timeout_s} s of CPU time"
            ) from error

    def _verdict(self, answer: str, limit_s: float, max_matches: int | None, *, concurrent: bool) -> Score:
        """Raises TimeoutError. `regex` counts its limit in the CPU time of the process."""
        if self._pattern is None:
            return RIGHT if self._equals(answer) else WRONG
        last = None
        for count, last in enumerate(self._pattern.finditer(answer, timeout=limit_s, concurrent=concurrent)):  # noqa: B007
            if count == max_matches:
                raise TimeoutError
        capture = None if last is None else _capture(last)
        return RIGHT if capture is not None and self._equals(capture) else WRONG


def _capture(found: regex.Match[str]) -> str | None:
    groups = found.groups()
    if not groups:
        return str(found.group())
    return next((group for group in reversed(groups) if group is not None), None)


def _compiled(pattern: str, ignore_case: bool) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise InputError(
            f"{pattern!r} is no regular expression: {error}",
            "verifier.pattern",
            "escape what is meant literally; the syntax is that of the package `regex`",
        ) from error


def _comparison(spec: MatchSpec) -> Callable[[str], bool]:
    """The test that a capture has to pass."""
    expected = spec.expected
    default: Compare = "set" if isinstance(expected, list) else "exact" if isinstance(expected, str) else "numeric"
    compare = spec.compare or default
    if compare == "set":
        items = expected if isinstance(expected, list) else _items(str(expected), spaced=False)
        return _same_set([str(item).strip() for item in items], spec.ignore_case)
    if isinstance(expected, list):
        raise InputError(f"a list cannot be compared as {compare}", "verifier.expected", 'use "compare": "set"')
    if compare == "exact":
        return _same_text(str(expected), spec.ignore_case)
    number = _number(str(expected))
    if number is None:
        raise InputError(f"{expected!r} is no number", "verifier.expected", 'give a number, or "compare": "exact"')
    return lambda text: _number(text) == number


def _same_text(expected: str, ignore_case: bool) -> Callable[[str], bool]:
    wanted = expected.strip()
    if not ignore_case:
        return lambda text: text.strip() == wanted
    folded = wanted.casefold()
    return lambda text: text.strip().casefold() == folded


def _number(text: str) -> Decimal | None:
    """The decimal that a text means, or None. Never raises."""
    digits = text.replace(",", "").replace("$", "").strip().removesuffix(".")
    if "_" in digits:  # Decimal reads them as Python does, people do not write them
        return None
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _same_set(expected: list[str], ignore_case: bool) -> Callable[[str], bool]:
    fold: Callable[[str], str] = str.casefold if ignore_case else str
    wanted = frozenset(map(fold, expected))
    spaced = any(len(item.split()) > 1 for item in wanted)
    return lambda text: frozenset(map(fold, _items(text, spaced=spaced))) == wanted


def _items(text: str, *, spaced: bool) -> list[str]:
    text = text.strip()
    if text.startswith("["):
        with suppress(ValueError, RecursionError):
            return [item.strip() if isinstance(item, str) else json.dumps(item) for item in json.loads(text)]
    if text and text[0] + text[-1] in ("[]", "{}", "()"):
        text = text[1:-1]
    if spaced:
        return [item for part in text.replace("\n", ",").split(",") if (item := part.strip())]
    return text.replace(",", " ").split()
