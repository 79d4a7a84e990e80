"""Reads a TOML file together with the lines of its keys, so that an error can name the line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from rollout_engine.errors import InputError

KeyPath = tuple[str, ...]

_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_AT_LINE = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The tables of a file, and for each table and key the line where it stands. Raises InputError."""
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text), key_lines(text)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", str(path), "name a TOML file") from error
    except UnicodeDecodeError as error:
        raise InputError("this is no UTF-8", str(path), "save the file as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        found = _AT_LINE.fullmatch(str(error))
        where = f"{path}:{found[2]}:{found[3]}" if found else str(path)
        message = found[1] if found else str(error)
        raise InputError(f"this is no TOML: {message}", where, "see https://toml.io") from error


def key_lines(text: str) -> dict[KeyPath, int]:
    """The lines of the tables and keys of a valid document. Keys of inline tables are found with their table."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            quote = "" if line.count(quote) % 2 else quote
            continue
        if line.lstrip().startswith("["):
            header = _path(line)
            if header:
                table = header
                lines.setdefault(table, number)
        elif found := _KEY.match(line):
            path = table + _path(f"{found[1]}=0")
            for length in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:length], number)
        quote = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
    return lines


def _path(line: str) -> KeyPath:
    """The key path of one table header or one `key=0`; empty where the line is neither (an array's part)."""
    try:
        tables: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(tables, dict) and tables:
        key, tables = next(iter(tables.items()))
        path.append(key)
        tables = tables[0] if isinstance(tables, list) else tables
    return tuple(path)
