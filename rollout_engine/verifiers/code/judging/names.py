"""What verifier code finds in its namespace beside the builtins, as the reference system gives it."""

from __future__ import annotations

TYPE_CHECKING = False  # to import `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any


def normalized_contains(target: object, blob: object) -> bool:
    """Whether a text holds another, apart from case, punctuation and white space."""
    return _normalized(target) in _normalized(blob)


def _normalized(text: object) -> str:
    import string

    return " ".join(str(text).lower().translate(str.maketrans("", "", string.punctuation)).split())


def extract_numbers(text: object) -> list[float]:
    """Every number in a text, as floats; commas between digits are dropped."""
    import re

    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", str(text).replace(",", ""))]


def contains_number(text: object, target: Any) -> bool:
    """Whether a text holds this number."""
    if isinstance(target, str):
        try:
            target = float(target.replace(",", ""))
        except ValueError:
            return False
    import math

    return any(math.isclose(found, float(target), rel_tol=1e-9, abs_tol=1e-9) for found in extract_numbers(text))


class IgnoreConfig:
    """What a comparison of databases leaves out."""

    def __init__(
        self,
        tables: Collection[str] | None = None,
        fields: Collection[str] | None = None,
        table_fields: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.tables, self.fields = set(tables or ()), set(fields or ())
        self.table_fields = dict(table_fields or {})

    def should_ignore_table(self, table: str) -> bool:
        return table in self.tables

    def should_ignore_field(self, table: str, field: str) -> bool:
        return field in self.fields or field in self.table_fields.get(table, ())


NAMES: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "normalized_contains": normalized_contains,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "IgnoreConfig": IgnoreConfig,
    "Environment": object,
}
_MODULES = ("json", "re", "string")


def names_for(used: set[str]) -> dict[str, Any]:
    """What code that uses these names may find: a module only if used, as importing all would double the cost."""
    return {**NAMES, **{name: __import__(name) for name in _MODULES if name in used}}
