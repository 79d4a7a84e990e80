"""The secret in the path that belongs to one rollout."""

from __future__ import annotations

import hmac
import re
import secrets

_PREFIX = re.compile(r"/r/([^/]+)(/.*)?")


def new_token() -> str:
    """A rollout's secret: 128 random bits."""
    return secrets.token_hex(16)


def rest_of(path: str, token: str) -> str | None:
    """The path behind /r/TOKEN, None where the token is another. Takes the same time for any wrong token."""
    found = _PREFIX.fullmatch(path)
    given = found[1] if found else ""
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()) or found is None:
        return None
    return found[2] or "/"
