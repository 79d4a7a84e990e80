"""What `rollout show` prints of an agent program: how it ended, what it counted, and the end of its output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollout_engine.commands import text

if TYPE_CHECKING:
    from rich.console import Console

MAX_LINES = 20
"""Of each output; --json has all that is kept."""


def print_evidence(console: Console, row: dict[str, Any]) -> None:
    """Nothing where the agent was no program."""
    from rich.text import Text

    found = row["evidence"]
    if found is None:
        return
    console.print()
    name = text.safe(str(found.get("program", "?")))
    console.print(Text.assemble(("▌ agent program", "bold cyan"), (f"  {name}", "dim")))
    for line in _facts(row, found):
        console.print(Text(f"  {line}"))
    for stream in ("stderr", "stdout"):
        lines = str(found.get(stream) or "").strip().splitlines()
        if lines:
            console.print(Text(f"  the end of its {stream}", "dim"))
        for line in lines[-MAX_LINES:]:
            console.print(Text(f"  │ {text.one_line(line, 300)}"))


def parsed_evidence(evidence: str | None) -> dict[str, Any] | None:
    """A row's `evidence`, read; None: there is none, or somebody has edited it."""
    try:
        found = json.loads(evidence) if evidence else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _facts(row: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    code = row.get("agent_exit_code")
    how = f"exit code {code}" if code is not None else f"ended by the engine ({found.get('ended')})"
    yield f"ended     {how} after {text.took(float(found.get('seconds') or 0.0))}"
    if found.get("said"):
        yield f"said      {text.one_line(str(found['said']), 500)}"
    for role, calls in (found.get("calls") or {}).items():
        if calls.get("begun"):
            tools = ", ".join(f"{text.safe(name)} {count}×" for name, count in calls["tool_calls"].items())
            yield f"{role:<9} {calls['answered']} of {calls['begun']} calls answered{f'; {tools}' if tools else ''}"
    usage = found.get("usage") or {}
    if usage.get("agree") is False:
        yield f"tokens    it counted {_counted(usage['program'])}, the proxy {_counted(usage['proxy'])}"
    for note in found.get("notes") or ():
        yield f"note      {text.one_line(str(note), 300)}"


def _counted(pair: list[int]) -> str:
    return f"{text.whole(pair[0])} prompt + {text.whole(pair[1])} completion"
