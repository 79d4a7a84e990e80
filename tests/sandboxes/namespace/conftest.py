"""Providers of namespace sandboxes for the tests in this folder: as root, and as an ordinary user."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox

ORDINARY_USER = 61_234
"""An id that nobody has."""


def absent(reason: str) -> None:
    """Skips, except where ROLLOUT_REQUIRE says that everything must be there."""
    if os.environ.get("ROLLOUT_REQUIRE") == "1":
        pytest.fail(f"ROLLOUT_REQUIRE=1: {reason}")
    pytest.skip(reason)


def make(kind: str) -> NamespaceProvider:
    if os.geteuid() != 0:
        if kind == "root":
            absent("needs root")
        return NamespaceProvider()
    return NamespaceProvider(run_as=ORDINARY_USER if kind == "user" else None)


async def working(kind: str) -> NamespaceProvider:
    made = make(kind)
    try:
        await made.facts()
    except SandboxUnavailable as error:
        absent(str(error))
    return made


@pytest.fixture(params=["root", "user"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def provider(kind: str) -> AsyncIterator[NamespaceProvider]:
    made = await working(kind)
    yield made
    await made.close()


@pytest.fixture
async def root_provider() -> AsyncIterator[NamespaceProvider]:
    made = await working("root")
    yield made
    await made.close()


@pytest.fixture
async def box(provider: NamespaceProvider) -> AsyncIterator[NamespaceSandbox]:
    opened = await provider.open(SandboxSpec())
    yield opened
    await opened.close()
