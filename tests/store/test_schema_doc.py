"""docs/schema.md names every column of every table with its type. Run: pytest tests/store/test_schema_doc.py"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from rollout_engine.rewards import GROUPS, REWARDS
from rollout_engine.schema import ROLLOUTS, SCHEMA_VERSION, TURNS

DOC = (Path(__file__).parents[2] / "docs" / "schema.md").read_text()


def short(kind: pa.DataType) -> str:
    """As the page writes it."""
    if pa.types.is_timestamp(kind):
        return "timestamp"
    text = str(kind).replace("element: ", "").replace("item: ", "")
    text = re.sub(r"struct<.*>", "struct", text)
    text = re.sub(r" \('.*'\)", "", text)
    return text.removesuffix(">") + ">" if text.startswith("list<struct") else text


@pytest.mark.parametrize(
    ("table", "schema"), [("rollouts", ROLLOUTS), ("turns", TURNS), ("groups", GROUPS), ("rewards", REWARDS)]
)
def test_the_page_has_each_column_with_its_type(table: str, schema: pa.Schema) -> None:
    section = DOC.split(f"\n## {table}\n")[1].split("\n## ")[0].replace("&lt;", "<").replace("&gt;", ">")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| [^|]*\|$", section, re.MULTILINE)
    assert rows == [(field.name, short(field.type)) for field in schema]


def test_the_page_names_the_version() -> None:
    assert f"`rollout_engine.schema_version` (now `{SCHEMA_VERSION}`)" in DOC
