"""Retries: the pure decision, and what a server sees of it.

.venv/bin/pytest tests/models/test_retry.py
"""

from __future__ import annotations

import asyncio
import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.errors import (
    LimitReached,
    ModelAuthError,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelRateLimited,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.models.retry import (
    BACKOFF_BASE_S,
    BACKOFF_MAX_S,
    RETRY_AFTER_MAX_S,
    Failed,
    call_with_retries,
    pause_s,
    retry_after_s,
)

from .conftest import answering, ask, ask_stream, backend, bad, client, good, openai_spec, raw_backend

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        (formatdate(NOW + 12, usegmt=True), 12.0),
        (formatdate(NOW - 12, usegmt=True), 0.0),
        (formatdate(NOW + 12, localtime=False), 12.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, expected: float | None) -> None:
    assert retry_after_s(value, NOW) == expected


@given(st.text())
def test_no_retry_after_breaks_it(value: str) -> None:
    found = retry_after_s(value, NOW)
    assert found is None or (found >= 0 and math.isfinite(found))


RETRIED = [ModelRateLimited("x"), ModelServerError("x"), ModelConnectionError("x")]
NOT_RETRIED = [ModelTimeout("x"), ModelBadResponse("x"), ModelAuthError("x"), LimitReached()]


@given(
    st.sampled_from(RETRIED),
    st.integers(1, 100),
    st.integers(0, 100),
    st.floats(0, 1e6),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.floats(0, 1e4),
)
def test_a_pause_is_bounded_and_never_past_the_deadline(
    error: ModelError, tries: int, retries: int, left_s: float, jitter: float, asked: float | None
) -> None:
    pause = pause_s(Failed(error, asked), tries, retries, left_s, jitter)
    if tries > retries:
        assert pause is None
    if pause is not None:
        assert pause < left_s
        assert pause <= RETRY_AFTER_MAX_S + BACKOFF_BASE_S
        assert asked is None or asked <= pause
        assert asked is not None or BACKOFF_BASE_S / 2 <= pause <= BACKOFF_MAX_S


@pytest.mark.parametrize("error", NOT_RETRIED)
def test_what_would_fail_again_is_not_tried_again(error: ModelError) -> None:
    assert pause_s(Failed(error), 1, 10, 1e6, 0.5) is None


def test_back_off_doubles_and_is_spread() -> None:
    def pauses(jitter: float) -> list[float | None]:
        return [pause_s(Failed(ModelServerError("x")), tries, 9, 1e6, jitter) for tries in (1, 2, 3, 9)]

    assert pauses(0.0) == [0.25, 0.5, 1.0, 15.0]
    assert pauses(0.5) == [0.375, 0.75, 1.5, 22.5]


def test_a_server_that_asks_for_long_is_not_waited_for() -> None:
    assert pause_s(Failed(ModelRateLimited("x", 3600.0), 3600.0), 1, 4, 1e6, 0.5) is None


async def test_the_last_error_is_raised_when_the_tries_are_used_up() -> None:
    errors = [ModelServerError(str(number)) for number in range(3)]
    left = iter(errors)

    async def fail(until: float) -> Failed:
        return Failed(next(left), 0.0)

    with pytest.raises(ModelServerError) as caught:
        await call_with_retries(fail, retries=2, deadline=math.inf, call_timeout_s=5.0)
    assert caught.value is errors[-1]


async def test_each_try_has_its_own_limit_within_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    deadline, untils = loop.time() + 2.0, []

    async def fail(until: float) -> Failed | int:
        untils.append(until)
        return Failed(ModelServerError("x"), 0.0) if len(untils) == 1 else 7

    assert await call_with_retries(fail, retries=2, deadline=deadline, call_timeout_s=1.5) == 7
    assert untils[0] < deadline
    assert await call_with_retries(fail, retries=2, deadline=deadline, call_timeout_s=9.0) == 7
    assert untils[2] == deadline


async def test_a_429_is_tried_again_after_what_it_asks_for() -> None:
    busy = bad(429, headers={"retry-after": "0.05"})
    async with backend(answering(busy, busy, good)) as server, client(openai_spec(server.url, call_retries=2)) as model:
        completion = await ask(model)
    assert completion.message["content"] == "42"
    assert completion.model_s >= 0.1  # the pauses are part of it
    assert len(server.bodies) == 3


async def test_streams_are_tried_again_until_they_begin() -> None:
    down = bad(503, headers={"retry-after": "0"})
    async with backend(answering(down, good)) as server, client(openai_spec(server.url, call_retries=1)) as model:
        assert (await ask_stream(model))[-1].completion is not None
    assert len(server.bodies) == 2


async def test_a_429_that_lasts_carries_what_the_server_asked_for() -> None:
    busy = bad(429, headers={"retry-after": "0.01"})
    async with backend(answering(busy)) as server, client(openai_spec(server.url, call_retries=2)) as model:
        with pytest.raises(ModelRateLimited) as caught:
            await ask(model)
    assert caught.value.retry_after_s == 0.01
    assert len(server.bodies) == 3


async def test_no_try_is_made_that_would_begin_after_the_deadline() -> None:
    busy = bad(429, headers={"retry-after": "30"})
    async with backend(answering(busy)) as server, client(openai_spec(server.url, call_retries=9)) as model:
        with pytest.raises(ModelRateLimited):
            await ask(model, within_s=25.0)
    assert len(server.bodies) == 1


async def test_connection_errors_are_tried_again() -> None:
    async with raw_backend(b"") as url, client(openai_spec(url, call_retries=1)) as model:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ModelConnectionError):
            await ask(model)
        assert asyncio.get_running_loop().time() - began >= BACKOFF_BASE_S / 2
