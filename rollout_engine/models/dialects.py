"""The kinds of model servers: their addresses, keys and formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote, urlsplit

from rollout_engine.config import KEY_VARIABLES, ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.formats import ANTHROPIC, CHAT, GEMINI, RESPONSES
from rollout_engine.formats.base import Format
from rollout_engine.formats.chat.request import sendable
from rollout_engine.models.http import Urls
from rollout_engine.models.wire import encode, request_body, request_head
from rollout_engine.types import Message, Sampling, ToolSpec

Builder: TypeAlias = Callable[[Sequence[Message], Sampling, Sequence[ToolSpec], bool], bytes]
"""(messages, sampling, tools, stream) -> the body of a request."""


class Dialect:
    """How the servers of one kind are spoken to."""

    def __init__(
        self, format: Format, path: str, key_header: str, key_prefix: str = "", fixed: Mapping[str, str] | None = None
    ) -> None:
        """`path` is that of a call under the base URL."""
        self.format = format
        self._path, self._key_header, self._key_prefix, self._fixed = path, key_header, key_prefix, fixed or {}

    def urls(self, spec: ModelSpec, base_url: str) -> Urls:
        """The addresses under a base URL; a query stays where it belongs."""
        url = under(base_url, self._path)
        return Urls(url, url)

    def headers(self, key: str | None) -> dict[str, str]:
        """What every call carries."""
        return {**self._fixed, **({self._key_header: self._key_prefix + key} if key is not None else {})}

    def builder(self, model: str) -> Builder:
        """Makes the bodies of calls to a model."""
        request = self.format.request

        def build(messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool) -> bytes:
            return encode(request(model, messages, sampling, tools, stream)).encode("ascii")

        return build


class ChatDialect(Dialect):
    """OpenAI's, and that of vLLM, SGLang and most others."""

    def builder(self, model: str) -> Builder:
        # The head of the last request, kept by identity: a host calls with the same sampling and tools all the time.
        kept: list[tuple[object, object, bool, str]] = [(None, None, False, "")]

        def build(messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool) -> bytes:
            known_sampling, known_tools, known_stream, head = kept[0]
            if sampling is not known_sampling or tools is not known_tools or stream is not known_stream:
                head = request_head(model, sampling, tools, stream)
                # Only a tuple is known not to have changed when it comes again.
                if isinstance(tools, tuple):
                    kept[0] = (sampling, tools, stream, head)
            return request_body(head, [sendable(message) for message in messages])

        return build


def under(base_url: str, path: str) -> str:
    """An address under a base URL; a query stays where it belongs."""
    parts = urlsplit(base_url)
    return parts._replace(path=parts.path.rstrip("/") + path, fragment="").geturl()


def clean_key(spec: ModelSpec, api_key: str | None, dialect: Dialect) -> str | None:
    """The key without surrounding blanks (a file's newline). Raises InputError, which does not show it."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            "the API key holds characters that no HTTP header can carry",
            where=f"models.{spec.name}.api_key_env",
            fix=f"check the value of {spec.api_key_env or ' or '.join(KEY_VARIABLES[spec.kind])}",
        )
    return key or None


class GeminiDialect(Dialect):
    """Google's: the model and whether to stream are in the address."""

    def urls(self, spec: ModelSpec, base_url: str) -> Urls:
        path = f"/models/{quote(spec.model or '', safe='')}:"
        stream = under(base_url, path + "streamGenerateContent")
        return Urls(under(base_url, path + "generateContent"), stream + ("&" if "?" in stream else "?") + "alt=sse")


DIALECTS: dict[str, Dialect] = {
    "responses": Dialect(RESPONSES, "/responses", "authorization", "Bearer "),
    "anthropic": Dialect(ANTHROPIC, "/messages", "x-api-key", fixed={"anthropic-version": "2023-06-01"}),
    "gemini": GeminiDialect(GEMINI, "", "x-goog-api-key"),
    "openai": ChatDialect(CHAT, "/chat/completions", "authorization", "Bearer "),
}
