"""One rollout as a person reads it: how it ended, what was said turn by turn, what the verifier found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollout_engine.commands import text
from rollout_engine.commands.components import components_of
from rollout_engine.commands.console import make_console
from rollout_engine.commands.evidence_view import parsed_evidence, print_evidence
from rollout_engine.commands.verdict_view import print_verdict, score_line
from rollout_engine.errors import RunError, describe
from rollout_engine.specs import Task
from rollout_engine.store import RunDir
from rollout_engine.types import Message, Turn

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CLIP_CHARS = 1_500
"""Of one message; --full shows all."""
ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
STATUS_STYLES = {"completed": "green", "truncated": "yellow", "failed": "red", "cancelled": "yellow"}
MAX_TOOLS = 16
PHASES = ("queue", "start", "agent", "verify", "close")


def rollout_document(run: RunDir, row: dict[str, Any]) -> dict[str, Any]:
    """The row, its turns, its task, and what is counted of them: what --json prints and a person sees."""
    document: dict[str, Any] = {**row, "score_components": dict(row["score_components"] or ())}
    document["evidence"] = parsed_evidence(row["evidence"])
    try:
        document["turns"] = [_turn(turn) for turn in run.turns(row["rollout_id"])]
    except RunError as error:
        document["turns"], document["turns_error"] = [], describe(error)
    document["task"] = _task(run, row["round"], row["task_id"])
    document["calls"] = {"turns": Counter(turn["role"] for turn in document["turns"]), "tools": _tools(document)}
    verifier = (document["task"] or {}).get("verifier")
    document["components"] = [part._asdict() for part in components_of(verifier, document["score_components"])]
    return document


def _turn(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "index": turn.index,
        "role": turn.role,
        "messages": turn.messages,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "model_s": completion.model_s,
        "env_s": turn.env_s,
    }


def _task(run: RunDir, round: int, task_id: str) -> dict[str, Any] | None:
    """The task as it was planned; its files and setup are left out."""
    plan = run.plan()
    try:
        slot = plan.find(round, task_id)
        task = Task.model_validate_json(plan.body(slot)) if slot is not None else None
    finally:
        plan.close()
    wanted = {"prompt", "system_prompt", "verifier", "solution", "limits", "metadata", "on_verifier_error"}
    return task.model_dump(include=wanted, exclude_defaults=True) if task is not None else None


def print_rollout(run: RunDir, document: dict[str, Any], *, full: bool) -> None:
    console = make_console()
    _head(console, document)
    turns = document["turns"]
    if not turns and document["task"] is not None:
        # A rollout that failed before its first answer has no turn that holds its prompt.
        task = Task.model_construct(**document["task"])
        for message in task.messages():
            _message(console, message, full)
    for turn in turns:
        for message in turn["messages"]:
            _message(console, message, full, turn)
    print_evidence(console, document)
    if "turns_error" in document:
        console.print(f"its turns cannot be read: {document['turns_error']}", style="red")
    print_verdict(console, document, full=full)


def _head(console: Console, row: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(text.safe(row["rollout_id"]), "bold"))
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(row):
        table.add_row(name, value)
    console.print(table)


def _facts(row: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    from rich.text import Text

    status = Text(row["status"], STATUS_STYLES.get(row["status"], ""))
    if row["stop_reason"]:
        status.append(f" ({row['stop_reason']})", "default")
    again = [f"{row[name]} {name}" for name in ("retries", "generation") if row[name]]
    yield "status", Text.assemble(status, f"  {', '.join(again)}" if again else "")
    yield "score", score_line(row)
    if row["failure_type"] is not None:
        may = "may succeed if run again" if row["retryable"] else "would fail again"
        yield (
            "failure",
            Text(
                f"{row['failure_boundary']}:{row['failure_type']} ({may})\n{text.safe(row['failure_message'])}", "red"
            ),
        )
    seconds = (row["ended_at"] - row["started_at"]).total_seconds()
    phases = ", ".join(f"{name} {text.took(row[f'{name}_s'])}" for name in PHASES if row[f"{name}_s"])
    yield "time", f"{text.took(seconds)}  from {row['started_at']:%Y-%m-%d %H:%M:%S} UTC  ({phases or 'no phase'})"
    tokens = f"{text.whole(row['prompt_tokens'])} prompt + {text.whole(row['completion_tokens'])} completion"
    cost = f"  {text.money(row['cost_usd'])}" if row["cost_usd"] is not None else ""
    yield "tokens", f"{tokens}  in {text.plural(row['num_turns'], 'turn')}{cost}"
    thrown = row["thrown_prompt_tokens"] + row["thrown_completion_tokens"]
    if thrown:
        yield "thrown", f"{text.whole(thrown)} tokens of tries that infrastructure failed"
    if called := _called(row["calls"]):
        yield "calls", called
    limits = f", limits by {row['limits_enforced']}" if row["limits_enforced"] else ""
    kills = f", {text.plural(row['oom_kills'], 'command')} out of memory" if row["oom_kills"] else ""
    host = f"{row['host_id']} on node {row['node_id'][:12]}" if row["host_id"] else "no host"
    yield "where", f"{host}, sandbox {row['sandbox']}{limits}{kills}"
    if row["hook_errors"]:
        yield "hooks", Text("\n".join(text.one_line(error, 300) for error in row["hook_errors"]), "red")


def _tools(document: dict[str, Any]) -> Counter[str]:
    """How often each tool was called."""
    tools: Counter[str] = Counter()
    for turn in document["turns"]:
        calls = turn["messages"][-1].get("tool_calls") if turn["messages"] else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            tools[str((function or {}).get("name", "?"))] += 1
    return tools


def _called(calls: dict[str, Counter[str]]) -> str:
    """Turns by role where there are several, and how often each tool was called."""
    roles, tools = calls["turns"], calls["tools"]
    said = [", ".join(f"{count} by {role}" for role, count in roles.items())] if set(roles) - {"agent"} else []
    named = [f"{text.one_line(name, 40)} {count}×" for name, count in tools.most_common(MAX_TOOLS)]
    return "; ".join([*said, *([", ".join(named)] if named else [])])


def _message(console: Console, message: Message, full: bool, turn: dict[str, Any] | None = None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    role = str(message.get("role"))
    note = ""
    if turn is not None and role == "assistant":
        calls = f"turn {turn['index']}" + (f" by {turn['role']}" if turn["role"] != "agent" else "")
        note = f"  {calls}, {text.took(turn['model_s'])}, {turn['finish_reason']}"
    if message.get("tool_call_id"):
        note += f"  of call {message['tool_call_id']}"
    console.print()
    console.print(Text.assemble((f"▌ {role}", f"bold {ROLE_STYLES.get(role, '')}".strip()), (note, "dim")))
    body = _content(message)
    if body:
        console.print(
            Padding(Text(text.safe(body if full else text.clip(body, CLIP_CHARS))), (0, 0, 0, 2), expand=False)
        )
    for call in message.get("tool_calls") or ():
        console.print(Padding(_call(call, full), (0, 0, 0, 2), expand=False))


def _content(message: Message) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
        for part in parts
    )


def _call(call: Any, full: bool) -> RenderableType:
    from rich.text import Text

    function = call.get("function") or {} if isinstance(call, dict) else {}
    arguments = str(function.get("arguments", call))
    shown = text.safe(arguments if full else text.clip(arguments, CLIP_CHARS))
    return Text.assemble(("→ ", "cyan"), (text.safe(str(function.get("name", "?"))), "bold cyan"), f"({shown})")
