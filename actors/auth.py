"""Ray's token authentication, made explicit: a driver that does not say so cannot join a cluster that has it.

A local cluster looks after itself (Ray gives it a token). For one that we join, token mode is switched on where a
token is found and RAY_AUTH_MODE is not set; where it is set, it is respected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def resolve_address(address: str) -> str:
    """`auto` is RAY_ADDRESS where that is set (a job's driver has it), else `local`."""
    return os.environ.get("RAY_ADDRESS") or "local" if address == "auto" else address


def prepare_auth(address: str) -> Callable[[], None]:
    """Switches token mode on for a cluster that is joined. Returns what undoes the change of the environment."""
    before = os.environ.get(MODE)
    if address != "local" and before is None and has_token():
        os.environ[MODE] = "token"
        reread_ray_config()
    return lambda: _restore(before)


def has_token() -> bool:
    """Whether a token is found in one of the places where Ray looks for it."""
    return bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH) or (Path.home() / ".ray" / "auth_token").is_file())


def reread_ray_config() -> None:
    """Ray reads the mode when it is imported, which has happened by now, and keeps the first token that it reads.

    A version without these reads both later.
    """
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    except ImportError:
        return
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(MODE, None)
    else:
        os.environ[MODE] = before
