"""Which rollout a call belongs to, as the `x-rollout-seed` header of a call to a scripted or recorded model."""

from __future__ import annotations

from urllib.parse import quote, unquote

from rollout_engine.types import CallContext

SEED_HEADER = "x-rollout-seed"
_PARTS = 6


def seed_header(context: CallContext) -> str:
    """seed/round/task_id/model/attempt/turn, the texts quoted as in a URL: plain ASCII. The solution stays here."""
    # surrogatepass: a task id that holds half a surrogate pair still has a header of its own.
    task_id = quote(context.task_id, safe="", errors="surrogatepass")
    model = quote(context.model, safe="", errors="surrogatepass")
    return f"{context.seed}/{context.round}/{task_id}/{model}/{context.attempt}/{context.turn}"


def parse_seed_header(value: str) -> CallContext:
    """The inverse of `seed_header`, without a solution. Raises ValueError."""
    parts = value.split("/")
    if len(parts) != _PARTS:
        raise ValueError(f"{SEED_HEADER} has {len(parts)} parts, not seed/round/task_id/model/attempt/turn")
    seed, round_, task_id, model, attempt, turn = parts
    return CallContext(
        seed=int(seed),
        round=int(round_),
        task_id=unquote(task_id, errors="surrogatepass"),
        model=unquote(model, errors="surrogatepass"),
        attempt=int(attempt),
        turn=int(turn),
    )
