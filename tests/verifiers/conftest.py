"""Places where verifiers run in these tests: sandboxes as root, as an ordinary user and on docker, and the warm one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.verifiers.code.warm import WarmVerifier
from rollout_engine.verifiers.workshop import Workshop
from tests.sandboxes.backends import ISOLATING, absent, run_as, working


@pytest.fixture(params=ISOLATING)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    made = await working(request.param)
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
