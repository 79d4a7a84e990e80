"""What an agent asks for by its method and path. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollout_engine.formats import ANTHROPIC, CHAT, GEMINI, RESPONSES
from rollout_engine.formats.base import Format

_VERSION = re.compile(r"(?:/(?:v1beta|v1alpha|v1|openai|anthropic))*")
_GEMINI = re.compile(r"/(?:publishers/[^/]+/)?models/(.+):(generateContent|streamGenerateContent|countTokens)")

ASK, COUNT, LIST = "ask", "count", "list"


class Route(NamedTuple):
    """One request's meaning."""

    format: Format
    action: str = ASK
    """ask: a completion; count: the tokens of a prompt; list: the models."""
    model: str = ""
    stream: bool = False
    """In the path; the other formats say so in the body."""


def route_of(method: str, path: str, anthropic: bool = False) -> Route | None:
    """What is asked for, None: nothing that is here.

    `path` begins with the API's version, if with any. `anthropic`: the agent sent the header that only that one has.
    """
    version = _VERSION.match(path)
    assert version is not None
    rest = path[version.end() :].rstrip("/")
    if method in ("GET", "HEAD") and rest == "/models":
        return Route(_lists(path, anthropic), LIST)
    if method != "POST":
        return None
    if (exact := _EXACT.get(rest)) is not None:
        return exact
    if found := _GEMINI.fullmatch(rest):
        action = COUNT if found[2] == "countTokens" else ASK
        return Route(GEMINI, action, found[1], found[2] == "streamGenerateContent")
    return None


def _lists(path: str, anthropic: bool) -> Format:
    if path.startswith(("/v1beta", "/v1alpha")):
        return GEMINI
    return ANTHROPIC if anthropic else CHAT


_EXACT = {
    "/chat/completions": Route(CHAT),
    "/responses": Route(RESPONSES),
    "/messages": Route(ANTHROPIC),
    "/messages/count_tokens": Route(ANTHROPIC, COUNT),
}
