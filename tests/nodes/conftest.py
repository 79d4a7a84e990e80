"""One Ray cluster of three nodes on this machine, for all tests of this folder; what a test kills is put back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nodes.three import ThreeNodes, three_nodes


@pytest.fixture(scope="package")
def cluster() -> Iterator[ThreeNodes]:
    """This process is connected to it."""
    with three_nodes(_absent) as nodes:
        yield nodes


def _absent(error: Exception) -> None:
    if os.environ.get("ROLLOUT_REQUIRE") != "1":
        pytest.skip(f"Ray does not start on this machine: {error}")


@pytest.fixture
def three(cluster: ThreeNodes) -> ThreeNodes:
    """Three nodes that are well."""
    cluster.restore()
    return cluster
