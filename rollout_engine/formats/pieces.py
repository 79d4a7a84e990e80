"""A whole answer as the pieces of a streamed one."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_engine.formats.parts import Said
from rollout_engine.models.sse import pieces_of
from rollout_engine.types import Completion, Delta


def deltas_of(completion: Completion) -> Iterator[Delta]:
    """Thoughts, the text in a bounded number of pieces, calls; without the completion itself."""
    for delta in Said().rest(completion):
        if delta.content:
            yield from map(Delta, pieces_of(delta.content))
        else:
            yield delta
