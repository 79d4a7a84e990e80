"""A sandbox backend that is there on some nodes only."""

from __future__ import annotations

import os

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider


class OnlyWhereAllowed(LocalProvider):
    """Opens nothing where ROLLOUT_TEST_NO_SANDBOX is set, as a backend does whose kernel or daemon lacks something."""

    async def open(self, spec: SandboxSpec) -> Sandbox:  # type: ignore[override]
        if "ROLLOUT_TEST_NO_SANDBOX" in os.environ:
            raise SandboxUnavailable("this node has none")
        return await super().open(spec)


def only_where_allowed() -> SandboxProvider:
    return OnlyWhereAllowed()
