"""A model that repeats recorded answers, found by task, attempt and model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_engine.errors import ModelMissingAnswer
from rollout_engine.models.local import Answer, Play
from rollout_engine.types import CallContext, Message, Sampling, ToolSpec


class Answers:
    """Recorded answers in Arrow columns (task_id, content, model, attempt; null: the same for all).

    A sorted array of hashes finds them: 16 bytes a row besides the text.
    """

    def __init__(self, table: pa.Table, source: str) -> None:
        self.source = source
        self._content, self._task_id = table["content"].combine_chunks(), table["task_id"].combine_chunks()
        hashes = np.fromiter((hash(key) for key in _keys(table)), np.int64, table.num_rows)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes: npt.NDArray[np.int64] = hashes[self._order]

    def __len__(self) -> int:
        return len(self._hashes)

    def doubled(self) -> tuple[int, int] | None:
        """Two rows that answer the same call, if there are any."""
        same = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        return (int(self._order[same[0]]), int(self._order[same[0] + 1])) if len(same) else None

    def find(self, task_id: str, model: str, attempt: int) -> str | None:
        """The recorded answer; rows without model or attempt answer for those that have no row of their own."""
        for key in ((task_id, model, attempt), (task_id, model, None), (task_id, None, attempt), (task_id, None, None)):
            wanted = hash(key)
            at = int(np.searchsorted(self._hashes, wanted))
            if at < len(self._hashes) and self._hashes[at] == wanted:
                row = int(self._order[at])
                # Another key may have the same hash: its text would be a wrong answer to count.
                if self._task_id[row].as_py() == task_id:
                    content: str = self._content[row].as_py()
                    return content
        return None


def _keys(table: pa.Table) -> Iterator[tuple[str, str | None, int | None]]:
    for batch in table.select(["task_id", "model", "attempt"]).to_batches(max_chunksize=8192):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class ReplayModel:
    """Answers with what was recorded for the rollout. `name` is the model's name in the recording."""

    def __init__(self, answers: Answers, name: str) -> None:
        self._answers, self._name = answers, name

    def play(
        self, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], context: CallContext
    ) -> Play:
        content = self._answers.find(context.task_id, self._name, context.attempt)
        if content is None:
            raise ModelMissingAnswer(
                f"no recorded answer for task {context.task_id!r}, model {self._name!r}, attempt {context.attempt} "
                f"in {self._answers.source}"
            )
        return Play(Answer({"role": "assistant", "content": content}))
