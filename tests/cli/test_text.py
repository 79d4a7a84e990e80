"""Numbers as a person reads them.

One test: .venv/bin/pytest tests/cli/test_text.py -k money
"""

from __future__ import annotations

import pytest

from rollout_engine.commands import text


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1k"), (1319, "1.32k"), (999_999, "1M"), (1.5e6, "1.5M"), (0.25, "0.25")],
)
def test_short(number: float, shown: str) -> None:
    assert text.short(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (0.2, "0:00"), (64, "1:04"), (7389, "2:03:09"), (3 * 86400 + 4 * 3600, "3 d 04 h")],
)
def test_clock(seconds: float | None, shown: str) -> None:
    assert text.clock(seconds) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.003, "3 ms"), (0.9999, "1 s"), (1.239, "1.24 s"), (123, "2:03")])
def test_took(seconds: float, shown: str) -> None:
    assert text.took(seconds) == shown


@pytest.mark.parametrize(
    ("usd", "shown"), [(None, "–"), (0, "$0.00"), (0.00031, "$0.00031"), (0.5, "$0.500"), (1234.5, "$1,234.50")]
)
def test_money(usd: float | None, shown: str) -> None:
    assert text.money(usd) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (float("nan"), "–"), (-0.0001, "0.000"), (0.8125, "0.812")])
def test_score(value: float | None, shown: str) -> None:
    assert text.score(value) == shown


def test_percent_is_100_only_for_all() -> None:
    assert [text.percent(value) for value in (None, 0.0, 0.99999, 1.0)] == ["–", "0 %", "99.9 %", "100 %"]


def test_kinds_names_the_most_frequent_and_counts_the_rest() -> None:
    counts = {"a": 1, "b": 5, "c": 2, "d": 1, "e": 1}
    assert text.kinds(counts) == "b 5, c 2, a 1, and 2 other kinds"


def test_plural() -> None:
    assert [text.plural(count, "retry") for count in (1, 2)] == ["1 retry", "2 retries"]
    assert [text.plural(count, "task") for count in (0, 1, 1319)] == ["0 tasks", "1 task", "1,319 tasks"]


def test_clip_says_how_much_is_left_out() -> None:
    assert text.clip("abcdef", 6) == "abcdef"
    assert text.clip("abcdef", 2) == "ab… [4 more characters; --full shows them]"
    assert text.one_line("a\n b\t" + "c" * 100, 6) == "a b c…"
