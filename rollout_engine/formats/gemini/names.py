"""Google's JSON takes a field's name in either spelling: thoughtSignature or thought_signature."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LOW = re.compile(r"_([a-z])")


def camel(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with its own names in the first spelling; what they hold stays as it is."""
    if not any("_" in name for name in data):
        return data
    return {_LOW.sub(lambda found: found[1].upper(), name): value for name, value in data.items()}
