"""Reads fields of a request that an agent wrote: the wanted type, or an error that says where and what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a whole number"}
_FOUND_CHARS = 80


class Malformed(ValueError):
    """A request that cannot be understood: answered with a 400. `where` is a path like messages[2].content."""

    def __init__(self, where: str = "", finding: str = "") -> None:
        super().__init__(where, finding)
        self.where, self.finding = where, finding

    def __str__(self) -> str:
        return f"{self.where}: {self.finding}" if self.where else self.finding


def wrong(value: Any, wanted: str, where: str) -> Malformed:
    """The error of a value of a wrong type."""
    found = "null" if value is None else f"{value!r:.{_FOUND_CHARS}}"
    return Malformed(where, f"found {found}, where {wanted} is wanted")


def object_of(value: Any, where: str) -> dict[str, Any]:
    """The value as an object. Raises Malformed, as all of these do."""
    if not isinstance(value, dict):
        raise wrong(value, "an object", where)
    return value


def list_of(value: Any, where: str) -> list[Any]:
    """The value as a list."""
    if not isinstance(value, list):
        raise wrong(value, "a list", where)
    return value


def text_of(value: Any, where: str) -> str:
    """The value as a text."""
    if not isinstance(value, str):
        raise wrong(value, "a text", where)
    return value


def objects_of(value: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each object of a list, with where it is; null is an empty list."""
    for at, item in enumerate(list_of(value, where) if value is not None else ()):
        yield object_of(item, f"{where}[{at}]"), f"{where}[{at}]"


def field_text(data: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    """A field that is a text; without `default` it must be there."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    return text_of(value, f"{where}.{name}" if where else name)


def maybe(data: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """A field that may be absent or null."""
    value = data.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise wrong(value, _NAMES[kind], f"{where}.{name}" if where else name)


def maybe_number(data: Mapping[str, Any], name: str, where: str = "") -> float | None:
    """A field that may be absent or null and else is a number."""
    value = data.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise wrong(value, "a number", f"{where}.{name}" if where else name)


def maybe_texts(data: Mapping[str, Any], name: str, where: str = "") -> tuple[str, ...]:
    """A field that is a text or a list of texts, or absent."""
    value = data.get(name)
    if value is None:
        return ()
    at = f"{where}.{name}" if where else name
    if isinstance(value, str):
        return (value,)
    return tuple(text_of(item, f"{at}[{number}]") for number, item in enumerate(list_of(value, at)))
