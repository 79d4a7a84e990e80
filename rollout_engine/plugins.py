"""Finds an implementation by its name: a built-in, an entry point, or `module:attribute` of the user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from rollout_engine.errors import InputError


def load_attribute(path: str, what: str, where: str = "") -> Any:
    """What `module:attribute` names; the attribute may be dotted. Raises InputError."""
    module_name, _, attribute = path.partition(":")
    fix = f"name an importable {what} as module:attribute; it must be importable on the hosts too"
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"cannot import {module_name!r} for the {what} {path!r}: {error}", where, fix) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InputError(f"{module_name!r} has no attribute {attribute!r}", where, fix) from error
    return found


def find(name: str, known: Mapping[str, str], what: str, *, group: str | None = None, where: str = "") -> Any:
    """The implementation called `name`.

    `known` maps names to `module:attribute`, so that only what is used is imported; `group` is the entry-point
    group in which installed packages may add names. Raises InputError with the known names.
    """
    if name in known:
        return load_attribute(known[name], what, where)
    if ":" in name:
        return load_attribute(name, what, where)
    added = {point.name: point.value for point in metadata.entry_points(group=group)} if group else {}
    if name in added:
        return load_attribute(added[name], what, where)
    names = sorted({*known, *added})
    raise InputError(
        f"unknown {what} {name!r}",
        where,
        f"{did_you_mean(name, names)}known: {', '.join(names)}, or module:attribute of your own",
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`did you mean 'x'? `, or nothing where no word is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""
