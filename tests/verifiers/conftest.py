"""Places where verifiers run in these tests: sandboxes as root and as an ordinary user, and the warm verifier."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import SandboxProvider, SandboxSpec
from rollout_engine.verifiers.code.warm import WarmVerifier
from rollout_engine.verifiers.workshop import Workshop

ORDINARY_USER = 61_234
"""An id that nobody has."""


def absent(reason: str) -> None:
    """Skips, except where ROLLOUT_REQUIRE says that everything must be there."""
    if os.environ.get("ROLLOUT_REQUIRE") == "1":
        pytest.fail(f"ROLLOUT_REQUIRE=1: {reason}")
    pytest.skip(reason)


def run_as(kind: str) -> int | None:
    if os.geteuid() != 0 and kind == "root":
        absent("needs root")
    return ORDINARY_USER if kind == "user" and os.geteuid() == 0 else None


async def namespaces(kind: str) -> SandboxProvider:
    provider = make_provider("namespace", run_as=run_as(kind))
    try:
        await (await provider.open(SandboxSpec())).close()
    except SandboxUnavailable as error:
        await provider.close()
        absent(str(error))
    return provider


@pytest.fixture(params=["root", "user"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    made = await namespaces(request.param)
    yield made
    await made.close()


@pytest.fixture(params=["root", "user"])
async def warm(request: pytest.FixtureRequest) -> AsyncIterator[WarmVerifier]:
    made = WarmVerifier(run_as=run_as(request.param), memory_bytes=200 * 2**20)
    try:
        await made.start()
    except SandboxUnavailable as error:
        await made.close()
        absent(str(error))
    yield made
    await made.close()


@pytest.fixture(params=["warm", "fresh"])
async def workshop(request: pytest.FixtureRequest) -> AsyncIterator[Workshop]:
    """Pure code runs warm, or in a fresh interpreter as where the warm verifier does not work."""
    made = Workshop(warm=request.param == "warm")
    if request.param == "warm" and await made.warm() is None:
        absent("the warm verifier does not work here")
    yield made
    await made.close()
