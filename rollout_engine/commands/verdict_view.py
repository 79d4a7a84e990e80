"""What `rollout show` prints of a verdict: the verifier and where it ran, its parts, its judges, what it had to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollout_engine.commands import text
from rollout_engine.commands.components import components_of

if TYPE_CHECKING:
    from rich.console import Console

MAX_LINES = 20
"""Of the verifier's output; --full shows all that is kept."""
PLACES = {
    "pure": "in the engine, without a sandbox",
    "fresh": "a clean sandbox, with the agent's workspace",
    "snapshot": "a clean sandbox, with all files that the agent changed",
    "in_place": "the agent's own sandbox: it could have tampered with it",
}


def print_verdict(console: Console, document: dict[str, Any], *, full: bool) -> None:
    from rich.text import Text

    console.print()
    console.print(
        Text.assemble(("▌ verifier", "bold cyan"), (f"  {document['verifier_isolation'] or 'did not run'}", "dim"))
    )
    for line in (*_verifier(document), *_finding(document), *_judges(document)):
        console.print(Text(f"  {line}"))
    said = (document["verifier_output"] or "").splitlines()
    if said:
        console.print(Text("  the end of its output", "dim"))
    for line in said if full else said[-MAX_LINES:]:
        console.print(Text(f"  │ {text.safe(line) if full else text.one_line(line, 300)}"))


def _verifier(document: dict[str, Any]) -> Iterator[str]:
    task = document["task"] or {}
    verifier = task.get("verifier") or {}
    if verifier:
        yield " ".join(f"{name}={_short(value)}" for name, value in verifier.items())
    if place := PLACES.get(document["verifier_isolation"] or ""):
        yield f"isolation {document['verifier_isolation']}: {place}"
    yield f"answer    {_short(document['final_answer'])}"
    if task.get("solution") is not None:
        yield f"solution  {_short(task['solution'])}"


def _finding(document: dict[str, Any]) -> Iterator[str]:
    yield f"score     {score_line(document)}"
    if document["score"] is not None:
        for part in components_of((document["task"] or {}).get("verifier"), document["score_components"]):
            kind = [] if part.verifier is None else [part.verifier]
            kind += [] if part.weight is None else [f"weight {part.weight:g}"]
            value = f"{part.value:g}" if part.value is not None else f"{text.MISSING} {_absent(part.optional)}"
            about = f"  ({', '.join(kind)})" if kind else ""
            yield f"  {'  ' * part.name.count('.')}{text.safe(part.name)} = {value}{text.safe(about)}"
    if document["failure_boundary"] == "verifier":
        yield f"error     {document['failure_type']}: {text.one_line(document['failure_message'], 500)}"


def _absent(optional: bool) -> str:
    return "left out, it came to no finding" if optional else "not asked"


def _judges(document: dict[str, Any]) -> Iterator[str]:
    if calls := document["judge_calls"]:
        prompt, completion = document["judge_prompt_tokens"], document["judge_completion_tokens"]
        cost = f"  {text.money(document['judge_cost_usd'])}" if document["judge_cost_usd"] is not None else ""
        used = f"{text.whole(prompt)} prompt + {text.whole(completion)} completion tokens{cost}"
        yield f"judge     {text.plural(calls, 'call')}, {used}"


def score_line(row: dict[str, Any]) -> str:
    """`0.5  not passed`; a null is said to be one."""
    if row["score"] is None:
        return f"{text.MISSING} (null, which is not 0)"
    return f"{row['score']:g}  {'passed' if row['passed'] else 'not passed'}"


def _short(value: Any) -> str:
    return text.one_line(value if isinstance(value, str) else json.dumps(value, default=str), 200)
