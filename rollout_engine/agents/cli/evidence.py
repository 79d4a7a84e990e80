"""What a row keeps of an agent program: its output, how it ended, and what it and the proxy counted. Bounded."""

from __future__ import annotations

import json
from typing import Any

from rollout_engine.agents.cli.ending import Facts
from rollout_engine.agents.cli.program import Heard
from rollout_engine.proxy.roles import AGENT, SUB
from rollout_engine.proxy.rollout_session import Counts, RolloutSession
from rollout_engine.sandboxes.base import JobStatus

MAX_TOOLS = 32
"""Names of tools; a model may call them whatever it likes."""
MAX_NOTE_CHARS = 300
MAX_LOG_CHARS = 1_000
"""Of the log in the message of a failure."""


def evidence(
    name: str, facts: Facts, status: JobStatus, session: RolloutSession, seconds: float, log_bytes: int, secret: str
) -> str:
    """JSON for the row's `evidence`. `secret`, the rollout's token, is taken out of what was printed."""
    calls = {role: _calls(counts) for role, counts in session.counts.items()}
    found: dict[str, Any] = {
        "program": name,
        "ended": facts.ended,
        "seconds": round(seconds, 3),
        "said": facts.heard.failed,
        "calls": calls,
        "usage": _usage(facts.heard, session),
        "notes": [note[:MAX_NOTE_CHARS] for note in facts.notes],
        "stdout": tail(status.stdout, log_bytes),
        "stderr": tail(status.stderr, log_bytes),
    }
    return json.dumps(found).replace(secret, "TOKEN")


def tail(output: bytes, size: int) -> str:
    """The end of an output as text that any column can hold."""
    cut = output[-size:].decode(errors="replace")
    return cut if len(output) <= size else f"[{len(output) - size} bytes before]\n{cut}"


def log_of(status: JobStatus) -> str:
    """The end of what a program printed, for a failure's message: its errors, else its output."""
    said = status.stderr.strip() or status.stdout.strip()
    return said[-MAX_LOG_CHARS:].decode(errors="replace")


def _calls(counts: Counts) -> dict[str, Any]:
    tools = dict(list(counts.tool_calls.items())[:MAX_TOOLS])
    return {"begun": counts.begun, "answered": counts.answered, "tool_calls": tools}


def _usage(heard: Heard, session: RolloutSession) -> dict[str, Any]:
    """What the program counted beside what the proxy did; `agree` is null where the program does not say."""
    both = session.counts[AGENT], session.counts[SUB]
    ours = sum(counts.prompt_tokens for counts in both), sum(counts.completion_tokens for counts in both)
    theirs = heard.prompt_tokens, heard.completion_tokens
    return {
        "program": theirs,
        "proxy": ours,
        "agree": None if None in theirs else theirs == ours,
    }
