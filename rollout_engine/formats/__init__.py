"""Wire formats of models: how agents ask, how servers answer, and the engine's own form in between."""

from __future__ import annotations

from rollout_engine.formats.anthropic import Anthropic
from rollout_engine.formats.base import Format
from rollout_engine.formats.chat import Chat
from rollout_engine.formats.gemini import Gemini
from rollout_engine.formats.responses import Responses

CHAT: Format = Chat()
RESPONSES: Format = Responses()
ANTHROPIC: Format = Anthropic()
GEMINI: Format = Gemini()

FORMATS: dict[str, Format] = {each.name: each for each in (CHAT, RESPONSES, ANTHROPIC, GEMINI)}
