"""One local Ray for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.rays import SharedRay
from tests.ray.running import running_ray


@pytest.fixture(scope="package")
def shared_ray() -> Iterator[SharedRay]:
    with running_ray() as ray:
        yield ray
