"""What every model client keeps to, whatever its kind and however it is reached.

.venv/bin/pytest tests/models/test_contract.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_engine.config import KEY_VARIABLES, ModelSpec
from rollout_engine.errors import ModelMissingAnswer, ModelTimeout
from rollout_engine.models import ModelClient, make_client
from rollout_engine.models.server import ModelServer
from rollout_engine.types import Sampling

from .conftest import ask, ask_stream, context

ANSWERS = {"easy": "42", "odd/täsk %": 'a "quoted"\n\u2028 answer'}
LONG = "a long answer " * 500


def scripted_spec() -> ModelSpec:
    return ModelSpec(name="m", kind="scripted", options={"skill": 1.0, "latency_ms": 1}, call_retries=0)


def replay_spec(folder: Path) -> ModelSpec:
    file = folder / "answers.jsonl"
    rows = [{"task_id": task_id, "content": content} for task_id, content in {**ANSWERS, "long": LONG}.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ModelSpec(name="m", kind="replay", file=str(file), call_retries=0)


@contextlib.asynccontextmanager
async def over_http(spec: ModelSpec, kind: str = "openai") -> AsyncIterator[ModelClient]:
    async with ModelServer({"m": spec}, solutions={**ANSWERS, "long": LONG}) as server:
        made = make_client(
            ModelSpec.model_validate(
                {
                    "name": "m",
                    "kind": kind,
                    "model": "m",
                    "base_url": server.url,
                    "seed_header": True,
                    "call_retries": 0,
                }
            )
        )
        yield made
        await made.close()


KINDS = ["scripted", "replay", *(f"{local} over {kind}" for local in ("scripted", "replay") for kind in KEY_VARIABLES)]


@pytest.fixture(params=KINDS)
async def model(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ModelClient]:
    kind: str = request.param
    spec = scripted_spec() if kind.startswith("scripted") else replay_spec(tmp_path)
    if " over " in kind:
        async with over_http(spec, kind.rpartition(" ")[2]) as made:
            yield made
    else:
        made = make_client(spec)
        yield made
        await made.close()


@pytest.mark.parametrize("task_id", ANSWERS)
async def test_answers_the_task_that_the_context_names(model: ModelClient, task_id: str) -> None:
    completion = await ask(model, context(task_id, solution=ANSWERS[task_id]))
    assert completion.message == {"role": "assistant", "content": ANSWERS[task_id]}
    assert completion.finish_reason == "stop"
    assert completion.model_s >= 0
    assert completion.prompt_token_ids is completion.completion_token_ids is completion.logprobs is None


async def test_streams_the_same_answer_and_ends_with_the_whole(model: ModelClient) -> None:
    whole = await ask(model, context("long", solution=LONG))
    *pieces, last = await ask_stream(model, context("long", solution=LONG))
    assert len(pieces) > 1
    assert "".join(piece.content for piece in pieces) == LONG
    assert all(piece.completion is None for piece in pieces)
    assert last.completion is not None
    assert (last.completion.message, last.completion.usage) == (whole.message, whole.usage)


async def test_many_calls_at_once_get_their_own_answers(model: ModelClient) -> None:
    asked = ["easy", "odd/täsk %"] * 50
    got = await asyncio.gather(*(ask(model, context(task_id, solution=ANSWERS[task_id])) for task_id in asked))
    assert [completion.message["content"] for completion in got] == [ANSWERS[task_id] for task_id in asked]


async def test_a_missing_answer_is_an_error_that_names_the_task(model: ModelClient) -> None:
    with pytest.raises(ModelMissingAnswer, match="'nowhere'"):
        await ask(model, context("nowhere", solution=None))
    with pytest.raises(ModelMissingAnswer, match="'nowhere'"):
        await ask_stream(model, context("nowhere", solution=None))


async def test_a_deadline_that_has_passed_is_a_timeout(model: ModelClient) -> None:
    with pytest.raises(ModelTimeout):
        await ask(model, context("easy"), within_s=-1)


async def test_closing_twice_is_harmless(model: ModelClient) -> None:
    await ask(model, context("easy"))
    await model.close()
    await model.close()


async def test_token_data_comes_along_where_it_is_asked_for() -> None:
    in_process = make_client(scripted_spec())
    async with over_http(scripted_spec()) as served:
        sampling = Sampling(logprobs=True)
        here = await ask(in_process, context("easy"), sampling=sampling)
        there = await ask(served, context("easy"), sampling=sampling)
        streamed = (await ask_stream(served, context("easy"), sampling=sampling))[-1].completion
    assert streamed is not None
    assert here.completion_token_ids == list(b"42")
    assert len(here.logprobs or ()) == 2
    for other in (there, streamed):
        assert other.prompt_token_ids == here.prompt_token_ids
        assert other.completion_token_ids == here.completion_token_ids
        assert other.logprobs == here.logprobs
        assert other.usage == here.usage
