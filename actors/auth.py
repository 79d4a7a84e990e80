"""Ray's token authentication, made explicit: a driver that does not say so cannot join a cluster that has it.

A cluster that we start ourselves gets a token of its own; one that we join is asked with the token that is there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def prepare_auth(address: str) -> tuple[str, Callable[[], None]]:
    """Sets the environment that Ray reads. Returns the address to use and what undoes the change.

    `auto` becomes RAY_ADDRESS where that is set (a job's driver has it), else `local`.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "local"
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    if MODE not in os.environ:
        if address == "local":
            os.environ[MODE], os.environ[TOKEN] = "token", secrets.token_hex(32)
        elif has_token():
            os.environ[MODE] = "token"
    return address, lambda: _restore(before)


def has_token() -> bool:
    """Whether a token is found in one of the places where Ray looks for it."""
    return bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH) or (Path.home() / ".ray" / "auth_token").is_file())


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
