"""Scripted models: known skill, latency and faults, the same in any process and order.

.venv/bin/pytest tests/models/test_scripted.py
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
from typing import Any

import pytest

from rollout_engine.config import ModelSpec
from rollout_engine.errors import (
    InputError,
    ModelBadResponse,
    ModelConnectionError,
    ModelError,
    ModelMissingAnswer,
    ModelRateLimited,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.models import check_model, make_client
from rollout_engine.models.draws import exponential, lognormal, uniforms
from rollout_engine.models.local import Fault
from rollout_engine.models.scripted import WRONG, ScriptedModel, ScriptedOptions
from rollout_engine.types import CallContext, Message, Sampling

from .conftest import MESSAGES, ask, context


def scripted(**options: Any) -> ScriptedModel:
    return ScriptedModel(ScriptedOptions(**options))


def answer(model: ScriptedModel, where: CallContext) -> Any:
    return model.play(MESSAGES, Sampling(), (), where).answer.message["content"]


def passes(model: ScriptedModel, n: int, **fields: Any) -> list[bool]:
    return [answer(model, context(f"t{i}", **fields)) == "42" for i in range(n)]


@pytest.mark.parametrize("skill", [0.0, 0.3, 0.7, 1.0])
def test_gives_the_solution_with_the_given_probability(skill: float) -> None:
    n = 4000
    rate = sum(passes(scripted(skill=skill), n)) / n
    assert abs(rate - skill) <= 4 * (skill * (1 - skill) / n) ** 0.5


def test_an_answer_depends_on_its_rollout_and_on_nothing_else() -> None:
    places = [context(f"t{i}", attempt=a, turn=u) for i in range(20) for a in range(3) for u in range(2)]
    model = scripted(skill=0.5)
    first = {place: answer(model, place) for place in places}
    random.Random(1).shuffle(places)
    assert {place: answer(scripted(skill=0.5), place) for place in places} == first
    for field, other in (("seed", 1), ("round", 1), ("model", "n"), ("attempt", 5), ("turn", 5)):
        moved = [CallContext(**{**_fields(place), field: other}) for place in places]
        assert [answer(model, place) for place in moved] != [first[place] for place in places]


def _fields(place: CallContext) -> dict[str, Any]:
    names = ("seed", "round", "task_id", "model", "attempt", "turn", "solution")
    return {name: getattr(place, name) for name in names}


def test_another_process_draws_the_same() -> None:
    code = (
        "from rollout_engine.models.draws import uniforms; from rollout_engine.types import CallContext;"
        "print(uniforms(CallContext(7, 1, 'tä', 'm', 2, 3), 'answer'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == str(uniforms(CallContext(7, 1, "tä", "m", 2, 3), "answer"))


def test_faults_do_not_move_the_pass_rate() -> None:
    faulty = scripted(skill=0.5, p_500=0.3)
    plain = scripted(skill=0.5)
    for i in range(500):
        play = faulty.play(MESSAGES, Sampling(), (), context(f"t{i}"))
        if play.fault is None:
            assert play.answer.message["content"] == answer(plain, context(f"t{i}"))


def test_faults_come_as_often_as_asked() -> None:
    model = scripted(p_429=0.1, p_500=0.1, p_cut=0.1, p_hang=0.1, p_garbage=0.1, p_empty=0.1)
    plays = [model.play(MESSAGES, Sampling(), (), context(f"t{i}")) for i in range(5000)]
    for fault in Fault:
        assert abs(sum(play.fault is fault for play in plays) / 5000 - 0.1) < 0.02
    empty = [play for play in plays if play.fault is None and play.answer.message["content"] == ""]
    assert abs(len(empty) / 5000 - 0.1) < 0.02


def test_each_try_has_a_fault_draw_of_its_own() -> None:
    model = scripted(p_500=0.5)
    tries = []
    for i in range(400):
        count = 1
        while model.play(MESSAGES, Sampling(), (), context(f"t{i}")).fault is not None:
            count += 1
        tries.append(count)
    assert abs(statistics.mean(tries) - 2.0) < 0.3


def test_the_first_tries_of_each_rollout_fail() -> None:
    model = scripted(fail_first=2)
    for task_id in ("a", "b"):
        faults = [model.play(MESSAGES, Sampling(), (), context(task_id)).fault for _ in range(4)]
        assert faults == [Fault.SERVER_ERROR, Fault.SERVER_ERROR, None, Fault.SERVER_ERROR]
    assert model.play(MESSAGES, Sampling(), (), context("a", turn=1)).fault is None


def test_a_wrong_answer_is_never_the_solution() -> None:
    for wrong, solution in ((WRONG, WRONG), (WRONG, f" {WRONG}\n"), ("no answer", "no answer"), ("42", "42")):
        model = scripted(skill=0, wrong=wrong)
        assert answer(model, context(solution=solution)).strip() != solution.strip()
    assert answer(scripted(skill=0), context()) == WRONG


def test_the_wrong_answer_is_a_template() -> None:
    model = scripted(skill=0, wrong="{task_id} #{attempt}: not {solution}, {other}")
    assert answer(model, context("t", attempt=3)) == "t #3: not 42, {other}"


def test_no_solution_to_give_is_a_missing_answer() -> None:
    with pytest.raises(ModelMissingAnswer, match="'t'"):
        answer(scripted(skill=1), context(solution=None))
    assert answer(scripted(skill=0), context(solution=None)) == WRONG


def test_latencies_have_the_mean_that_was_asked_for() -> None:
    u = [uniforms(context(f"t{i}"), "answer")[1] for i in range(5000)]
    for draws in ([exponential(x, 2.0) for x in u], [lognormal(x, 2.0, 0.5) for x in u]):
        assert abs(statistics.mean(draws) - 2.0) < 0.15
        assert min(draws) >= 0
    assert lognormal(0.5, 0.0, 0.5) == 0.0
    model = scripted(latency_ms=50, latency_dist="exponential")
    assert len({model.play(MESSAGES, Sampling(), (), context(f"t{i}")).latency_s for i in range(9)}) == 9
    assert scripted(latency_ms=50).play(MESSAGES, Sampling(), (), context()).latency_s == 0.05


def test_token_data_grows_turn_by_turn() -> None:
    model = scripted()
    first = model.play(MESSAGES, Sampling(logprobs=True), (), context()).answer
    longer: list[Message] = [*MESSAGES, first.message, {"role": "user", "content": "sure?"}]
    second = model.play(longer, Sampling(logprobs=True), (), context(turn=1)).answer
    assert first.prompt_token_ids is not None
    assert first.completion_token_ids is not None
    assert second.prompt_token_ids is not None
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(known)] == known


def test_tokens_are_as_many_as_asked() -> None:
    for tokens in (1, 50):
        play = scripted(tokens=tokens).play(MESSAGES, Sampling(logprobs=True), (), context())
        assert play.answer.usage.completion_tokens == tokens
        assert len(play.answer.completion_token_ids or ()) == len(play.answer.logprobs or ()) == tokens
    assert scripted(tokens=50).play(MESSAGES, Sampling(), (), context()).answer.usage.completion_tokens == 50


def test_another_policy_may_act_by_tool_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    model = ScriptedModel(ScriptedOptions(), lambda *_: {"role": "assistant", "content": None, "tool_calls": [call]})
    play = model.play(MESSAGES, Sampling(), (), context())
    assert play.answer.finish_reason == "tool_calls"
    assert play.answer.message["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("p_429", ModelRateLimited),
        ("p_500", ModelServerError),
        ("p_cut", ModelConnectionError),
        ("p_hang", ModelTimeout),
        ("p_garbage", ModelBadResponse),
    ],
)
async def test_in_process_faults_are_the_errors_of_the_http_client(option: str, error: type[ModelError]) -> None:
    options, limit_s = {option: 1, "retry_after_s": 2}, 0.1 if option == "p_hang" else 60.0
    spec = ModelSpec(name="m", kind="scripted", options=options, call_retries=0, call_timeout_s=limit_s)
    with pytest.raises(error) as caught:
        await ask(make_client(spec))
    assert type(caught.value) is error
    if isinstance(caught.value, ModelRateLimited):
        assert caught.value.retry_after_s == 2


async def test_in_process_calls_are_tried_again_like_those_over_http() -> None:
    options = {"p_429": 0.5, "retry_after_s": 0}
    model = make_client(ModelSpec(name="m", kind="scripted", options=options, call_retries=20))
    got = await asyncio.gather(*(ask(model, context(f"t{i}")) for i in range(20)))
    assert all(completion.message["content"] == "42" for completion in got)


async def test_a_latency_beyond_the_limit_is_a_timeout() -> None:
    spec = ModelSpec(name="m", kind="scripted", options={"latency_ms": 60_000}, call_timeout_s=0.05)
    with pytest.raises(ModelTimeout):
        await ask(make_client(spec))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"skil": 1}, "options.skil"),
        ({"skill": 1.5}, "options.skill"),
        ({"skill": "often"}, "options.skill"),
        ({"skill": True}, "options.skill"),
        ({"skill": float("nan")}, "options.skill"),
        ({"latency_ms": -1}, "options.latency_ms"),
        ({"latency_ms": float("inf")}, "options.latency_ms"),
        ({"latency_dist": "pareto"}, "options.latency_dist"),
        ({"p_500": 0.6, "p_cut": 0.6}, "options"),
        ({"tokens": 0}, "options.tokens"),
        ({"fail_first": 1.5}, "options.fail_first"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="skill, wrong, latency_ms") as caught:
        check_model(ModelSpec(name="m", kind="scripted", options=options))
    assert caught.value.where == f"models.m.{field}"


def test_options_may_come_as_texts_from_the_command_line() -> None:
    check_model(ModelSpec(name="m", kind="scripted", options={"skill": "0.7", "latency_ms": "50", "wrong": 7}))
