"""Arrow schemas of every table, and the only conversion between records and RecordBatches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_engine.types import Completion, Message, RolloutRecord, Turn, Usage

SCHEMA_VERSION = "1"
METADATA = {"rollout_engine.schema_version": SCHEMA_VERSION}

_time = pa.timestamp("us", tz="UTC")

MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("extra", pa.string()),
    ]
)
"""content: text, or JSON where `extra` says so; tool_calls: JSON; extra: JSON of every other field."""

TURN = pa.struct(
    [
        ("index", pa.int32()),
        ("role", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("usage", pa.struct([("prompt", pa.int64()), ("completion", pa.int64()), ("cached", pa.int64())])),
        ("model_s", pa.float64()),
        ("env_s", pa.float64()),
        ("parent", pa.int32()),
        ("kept", pa.int32()),
    ]
)

_FACTS: list[tuple[str, pa.DataType]] = [
    ("round", pa.int32()),
    ("task_id", pa.string()),
    ("model", pa.string()),
    ("attempt", pa.int32()),
    ("retries", pa.int32()),
    ("generation", pa.int32()),
    ("status", pa.string()),
    ("stop_reason", pa.string()),
    ("score", pa.float64()),
    ("passed", pa.bool_()),
    ("score_components", pa.map_(pa.string(), pa.float64())),
    ("failure_boundary", pa.string()),
    ("failure_type", pa.string()),
    ("failure_message", pa.string()),
    ("retryable", pa.bool_()),
    ("verifier_isolation", pa.string()),
    ("limits_enforced", pa.string()),
    ("oom_kills", pa.int32()),
    ("num_turns", pa.int32()),
    ("prompt_tokens", pa.int64()),
    ("completion_tokens", pa.int64()),
    ("cost_usd", pa.float64()),
    ("thrown_prompt_tokens", pa.int64()),
    ("thrown_completion_tokens", pa.int64()),
    ("thrown_cost_usd", pa.float64()),
    ("judge_prompt_tokens", pa.int64()),
    ("judge_completion_tokens", pa.int64()),
    ("judge_cost_usd", pa.float64()),
    ("final_answer", pa.string()),
    ("queued_at", _time),
    ("started_at", _time),
    ("ended_at", _time),
    ("queue_s", pa.float64()),
    ("start_s", pa.float64()),
    ("agent_s", pa.float64()),
    ("verify_s", pa.float64()),
    ("close_s", pa.float64()),
    ("host_id", pa.string()),
    ("node_id", pa.string()),
    ("sandbox", pa.string()),
    ("weight_version_start", pa.string()),
    ("weight_version_end", pa.string()),
    ("agent_exit_code", pa.int32()),
    ("evidence", pa.string()),
    ("trace_file", pa.string()),
    ("trace_offset", pa.int64()),
    ("trace_sha256", pa.string()),
    ("hook_errors", pa.list_(pa.string())),
]

LOG = pa.schema([("key", pa.int64()), *_FACTS, ("turns", pa.list_(TURN))], metadata=METADATA)
"""One row of the commit log. `key` is the dense number of the rollout in the plan."""

ROLLOUTS = pa.schema(
    [("run_id", pa.string()), ("rollout_id", pa.string()), ("group_id", pa.string()), *_FACTS], metadata=METADATA
)
TRACE = pa.schema(list(TURN), metadata=METADATA)
"""One row of a trace file: a turn of the one rollout that the trace belongs to."""

TURNS = pa.schema([("rollout_id", pa.string()), *TRACE], metadata=METADATA)

_values = attrgetter(*LOG.names)
"""A record's columns, in their order."""

IDENTITY = ("round", "task_id", "model", "attempt")
"""The columns from which rollout_id and group_id are made."""

_MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_TIMES = frozenset({"queued_at", "started_at", "ended_at"})
_EXTRA_CONTENT = "__content__"


def _message_row(message: Message) -> dict[str, Any]:
    content = message.get("content")
    row: dict[str, Any] = {"role": message.get("role"), "content": content}
    if len(message) > 2 or (content is not None and not isinstance(content, str)):
        extra = {name: value for name, value in message.items() if name not in _MESSAGE_FIELDS}
        if content is not None and not isinstance(content, str):
            row["content"] = json.dumps(content)
            extra[_EXTRA_CONTENT] = "json"
        if message.get("tool_calls") is not None:
            row["tool_calls"] = json.dumps(message["tool_calls"], separators=(",", ":"))
        row["tool_call_id"] = message.get("tool_call_id")
        row["extra"] = json.dumps(extra, separators=(",", ":")) if extra else None
    return row


def message_of(row: dict[str, Any]) -> Message:
    """The message that `_message_row` stored."""
    extra = json.loads(row["extra"]) if row.get("extra") else {}
    content = row["content"]
    if extra.pop(_EXTRA_CONTENT, None) == "json":
        content = json.loads(content)
    message: Message = {"role": row["role"], "content": content}
    if row.get("tool_calls") is not None:
        message["tool_calls"] = json.loads(row["tool_calls"])
    if row.get("tool_call_id") is not None:
        message["tool_call_id"] = row["tool_call_id"]
    return {**message, **extra}


def _turn_row(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    usage = completion.usage
    return {
        "index": turn.index,
        "role": turn.role,
        "messages": [_message_row(message) for message in turn.messages],
        "prompt_token_ids": completion.prompt_token_ids,
        "completion_token_ids": completion.completion_token_ids,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt": usage.prompt_tokens,
            "completion": usage.completion_tokens,
            "cached": usage.cached_tokens,
        },
        "model_s": completion.model_s,
        "env_s": turn.env_s,
        "parent": turn.parent,
        "kept": turn.kept,
    }


def turn_of(row: dict[str, Any]) -> Turn:
    """The turn that a row of `turns` stored."""
    usage = row["usage"]
    messages = [message_of(message) for message in row["messages"]]
    completion = Completion(
        message=messages[-1] if messages else {},
        finish_reason=row["finish_reason"],
        usage=Usage(usage["prompt"], usage["completion"], usage["cached"]),
        prompt_token_ids=row["prompt_token_ids"],
        completion_token_ids=row["completion_token_ids"],
        logprobs=row["logprobs"],
        model_s=row["model_s"],
    )
    return Turn(row["index"], messages, completion, row["role"], row["env_s"], row.get("parent"), row.get("kept"))


def turns_array(rows: Iterable[Sequence[Turn]]) -> pa.ListArray:
    """One list of turns for each rollout."""
    return pa.array([[_turn_row(turn) for turn in turns] for turns in rows], pa.list_(TURN))


def turns_to_batch(turns: Sequence[Turn]) -> pa.RecordBatch:
    """One rollout's turns as the rows of a trace."""
    return pa.RecordBatch.from_arrays(turns_array([turns]).flatten().flatten(), schema=TRACE)


def batch_to_turns(rows: pa.RecordBatch | pa.Table) -> list[Turn]:
    """The inverse of `turns_to_batch`; further columns are not looked at."""
    return [turn_of(row) for row in rows.to_pylist()]


def _column(name: str, kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    if name == "turns":
        return turns_array(values)
    if name in _TIMES:
        return pa.array([round(value * 1e6) for value in values], pa.int64()).cast(kind)
    if name == "score_components":
        return pa.array([tuple(value.items()) for value in values], kind)
    return pa.array(values, kind)


def records_to_batch(records: Sequence[RolloutRecord]) -> pa.RecordBatch:
    """Rows of the commit log, in the order given."""
    columns = zip(*map(_values, records), strict=True) if records else [()] * len(LOG)
    arrays = [_column(field.name, field.type, values) for field, values in zip(LOG, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=LOG)


def batch_to_records(batch: pa.RecordBatch) -> list[RolloutRecord]:
    """The inverse of `records_to_batch`; turns that live in a trace file are not read."""
    records = []
    times = {name: batch.column(name).cast(pa.int64()).to_pylist() for name in _TIMES}
    for row, values in enumerate(batch.to_pylist()):
        values["turns"] = [turn_of(turn) for turn in values["turns"] or ()]
        values["score_components"] = dict(values["score_components"] or ())
        for name, column in times.items():
            values[name] = column[row] / 1e6
        records.append(RolloutRecord(**values))
    return records


def rollout_id(round: int, task_id: str, model: str, attempt: int) -> str:
    """A rollout's name within its run. Model names hold no slash, so it is unique; the task id may hold any."""
    return f"{round}/{model}/{attempt}/{task_id}"


def group_id(round: int, task_id: str, model: str) -> str:
    """A group's name within its run."""
    return f"{round}/{model}/{task_id}"


def rollout_ids(rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """`rollout_id` of every row, from its IDENTITY columns."""
    text = pa.string()
    return pc.binary_join_element_wise(
        rows.column("round").cast(text),
        rows.column("model"),
        rows.column("attempt").cast(text),
        rows.column("task_id"),
        "/",
    )


def group_ids(rows: pa.RecordBatch | pa.Table) -> pa.Array:
    """`group_id` of every row, from its IDENTITY columns."""
    return pc.binary_join_element_wise(
        rows.column("round").cast(pa.string()), rows.column("model"), rows.column("task_id"), "/"
    )


def log_columns(columns: Sequence[str]) -> list[str]:
    """The columns of the log that columns of ROLLOUTS are made from."""
    made = {"run_id", "rollout_id", "group_id"}
    needed = {name for name in columns if name not in made}
    needed.update(IDENTITY if made.intersection(columns) else ())
    return [name for name in LOG.names if name in needed]


def log_to_rollouts(rows: pa.RecordBatch, run_id: str, columns: Sequence[str]) -> pa.RecordBatch:
    """Rows of the log as rows of ROLLOUTS with these columns."""
    makers = {
        "run_id": lambda: pa.repeat(pa.scalar(run_id), len(rows)),
        "rollout_id": lambda: rollout_ids(rows),
        "group_id": lambda: group_ids(rows),
    }
    arrays = [makers[name]() if name in makers else rows.column(name) for name in columns]
    schema = pa.schema([ROLLOUTS.field(name) for name in columns], metadata=METADATA)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def log_to_turns(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The inline turns of rows of the log as rows of TURNS, in the order of the rows."""
    turns = rows.column("turns")
    ids = rollout_ids(rows).take(pc.list_parent_indices(turns))
    return pa.RecordBatch.from_arrays([ids, *turns.flatten().flatten()], schema=TURNS)


def trace_to_turns(trace: pa.RecordBatch, rollout_id: str) -> pa.RecordBatch:
    """The rows of a trace as rows of TURNS."""
    ids = pa.repeat(pa.scalar(rollout_id), len(trace))
    return pa.RecordBatch.from_arrays([ids, *trace.columns], schema=TURNS)
