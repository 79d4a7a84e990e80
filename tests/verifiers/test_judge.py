"""Judges: what of a reply is believed, how often they are asked again, and what becomes of one that cannot be asked.

make one T=tests/verifiers/test_judge.py
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import rollout_engine
from rollout_engine.config import ModelSpec
from rollout_engine.configcheck import check_config
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, VerifierBadReturn, VerifierUnavailable
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.specs import Task
from rollout_engine.tasks import check_task
from rollout_engine.types import RolloutRecord, Score, Trajectory
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.verdict import parse_verdict
from tests.helpers import make_config, scripted
from tests.rig import answer, bench, chat_server, served, task_of

JUDGED = {"type": "judge", "expected": "42"}


class TestReplies:
    @pytest.mark.parametrize(
        ("reply", "score"),
        [
            ('{"verdict": "correct"}', Score(1.0, True)),
            ('{"verdict": "incorrect", "reason": "no"}', Score(0.0, False)),
            (' \n{"score": 0.25}\n', Score(0.25)),
            ('{"score": 1, "verdict": "incorrect"}', Score(1.0, False)),
            ('```json\n{"verdict": "correct"}\n```', Score(1.0, True)),
            ('```\n{"score": 0}\n```', Score(0.0)),
        ],
    )
    def test_one_object_with_a_verdict_a_score_or_both(self, reply: str, score: Score) -> None:
        assert parse_verdict(reply) == score

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            "correct",
            '"correct"',
            "[]",
            "1",
            "null",
            "{}",
            '{"reason": "fine"}',
            'Sure: {"verdict": "correct"}',
            '{"verdict": "correct"} {"verdict": "incorrect"}',
            '{"verdict": "incorrect", "verdict": "correct"}',
            '{"verdict": "Correct"}',
            '{"verdict": true}',
            '{"verdict": null}',
            '{"score": "1"}',
            '{"score": true}',
            '{"score": null}',
            '{"score": NaN}',
            '{"score": Infinity}',
            '{"score": 1e999}',
            '{"score": 1.01}',
            '{"score": -0.01}',
            '{"score": 1, "confidence": 1}',
            '```json\n{"score": 1}\n``` done',
            "{" * 100_000,
            '{"score": 1}' + " " * 70_000,
        ],
    )
    def test_anything_else_is_no_verdict(self, reply: str) -> None:
        with pytest.raises(VerifierBadReturn):
            parse_verdict(reply)

    @given(
        st.text()
        | st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5),
            lambda inner: st.dictionaries(st.sampled_from(["score", "verdict", "reason", "x"]), inner, max_size=3),
        ).map(json.dumps)
    )
    def test_no_reply_makes_another_error_or_a_score_out_of_range(self, reply: str) -> None:
        try:
            score = parse_verdict(reply, (-1.0, 2.0))
        except VerifierBadReturn:
            return
        assert math.isfinite(score.value)
        assert -1.0 <= score.value <= 2.0

    @given(st.floats(0, 1), st.sampled_from([None, "correct", "incorrect"]))
    def test_what_is_in_order_is_believed(self, score: float, verdict: str | None) -> None:
        said: dict[str, Any] = {"score": score, "reason": "so"} | ({} if verdict is None else {"verdict": verdict})
        passed = None if verdict is None else verdict == "correct"
        assert parse_verdict(json.dumps(said)) == Score(score, passed)


async def judged(
    reply: Callable[[web.Request], Awaitable[web.StreamResponse]],
    says: str = "It is 42.",
    verifier: dict[str, Any] = JUDGED,
    **fields: Any,
) -> RolloutRecord:
    """The row of a rollout whose judge stands behind a real server."""
    async with chat_server(reply) as url:
        judge = {**served(url, "grader"), "price_prompt": 1e6, "price_completion": 2e6, **fields}
        config = make_config(scripted(tokens=7), judges={"grader": judge})
        async with bench(config) as made:
            return await made.run(task_of(verifier=verifier, solution=says))


def replies(*texts: str, seen: list[Any] | None = None) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A judge that says one after the other, and the last one from then on."""
    left = list(texts)

    async def reply(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append((await request.json())["messages"])
        return answer(left.pop(0) if len(left) > 1 else left[0])

    return reply


class TestOverHttp:
    async def test_a_verdict_and_its_cost_apart_from_the_agents(self) -> None:
        seen: list[Any] = []
        row = await judged(replies('{"verdict": "correct"}', seen=seen))
        assert (row.status, row.score, row.passed, row.verifier_isolation) == ("completed", 1.0, True, "pure")
        assert (row.judge_prompt_tokens, row.judge_completion_tokens, row.judge_cost_usd) == (10, 3, 16.0)
        assert (row.completion_tokens, row.cost_usd) == (7, None)
        assert row.num_turns == 1  # the judge's call is no turn
        ((message,),) = seen
        assert "It is 42." in message["content"]
        assert "Six times seven?" in message["content"]

    async def test_a_reply_that_cannot_be_used_is_asked_for_again(self) -> None:
        seen: list[Any] = []
        row = await judged(replies("I think so", '{"score": 0.5}', seen=seen))
        assert (row.score, row.judge_prompt_tokens) == (0.5, 20)
        assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]
        assert "no JSON" in seen[1][-1]["content"]

    async def test_one_that_never_replies_usably_is_no_finding(self) -> None:
        row = await judged(replies("well"), tries=2)
        assert (row.status, row.score, row.failure_boundary) == ("completed", None, "verifier")
        assert row.failure_type == "VerifierBadReturn"
        assert "gave no usable verdict in 2 tries" in str(row.failure_message)
        assert row.judge_prompt_tokens == 20  # used all the same

    @pytest.mark.parametrize(("status", "kind"), [(500, "ModelServerError"), (401, "ModelAuthError"), (429, "RateLim")])
    async def test_one_that_cannot_be_asked_is_no_finding_and_the_agent_keeps_its_work(
        self, status: int, kind: str
    ) -> None:
        async def broken(request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "no"}}, status=status)

        row = await judged(broken)
        assert (row.status, row.score, row.failure_type) == ("completed", None, "VerifierUnavailable")
        assert kind in str(row.failure_message)
        assert "grader" in str(row.failure_message)

    async def test_one_that_hangs_meets_the_verifiers_limit(self) -> None:
        async def hang(request: web.Request) -> web.Response:
            await request.read()
            await asyncio.sleep(60)
            raise AssertionError

        async with chat_server(hang) as url:
            config = make_config(judges={"grader": served(url, "grader")}, limits={"verify_s": 0.3})
            async with bench(config) as made:
                row = await made.run(task_of(verifier=JUDGED))
        assert (row.score, row.failure_type) == (None, "VerifierTimeout")

    async def test_no_answer_is_wrong_and_nobody_is_asked(self) -> None:
        seen: list[Any] = []
        row = await judged(replies('{"score": 1}', seen=seen), says=" ")
        assert (row.score, seen) == (0.0, [])

    async def test_an_answer_fills_in_nothing_and_a_long_one_is_cut(self) -> None:
        seen: list[Any] = []
        spec = {**JUDGED, "prompt": 'Q {question} A {answer} E {expected} {"score": 1}'}
        await judged(replies('{"score": 1}', seen=seen), says="x" * 50 + "{expected}{rubric}", verifier=spec,
                     max_answer_chars=30)  # fmt: skip
        (((message),),) = seen
        assert "E 42" in message["content"]
        assert '{"score": 1}' in message["content"]
        assert "{expected}{rubric}" in message["content"]
        assert "38 characters left out" in message["content"]

    def test_a_whole_run_with_a_scripted_judge_that_is_at_times_unusable(self, tmp_path: Any) -> None:
        options = {"skill": 0.0, "wrong": '{"score": 1}', "p_empty": 0.3}
        with ServerProcess({"g": ModelSpec(name="g", kind="scripted", options=options)}, solutions={}) as server:
            judge = {**served(server.url, "g"), "seed_header": True, "tries": 6, "price_completion": 1.0}
            tasks = [task_of(task_id=f"t{number}", verifier=JUDGED) for number in range(4)]
            run = rollout_engine.run(
                tasks, [scripted()], k=4, judges={"g": judge}, ray="off", sandbox="none", run_dir=tmp_path / "run"
            )
        rows = run.rollouts.to_pylist()
        assert len(rows) == 16
        assert all(row["score"] == 1.0 for row in rows)
        assert all(row["judge_completion_tokens"] > 0 < row["judge_cost_usd"] for row in rows)

    def test_what_a_judge_costs_counts_towards_the_budget(self, tmp_path: Any) -> None:
        options = {"skill": 0.0, "wrong": '{"score": 1}', "tokens": 1000}
        judge = {"kind": "scripted", "options": options, "price_completion": 1000.0}
        tasks = [task_of(task_id=f"t{number}", verifier=JUDGED) for number in range(60)]
        run = rollout_engine.run(
            tasks, [scripted()], judges={"g": judge}, max_cost_usd=3.0, host={"slots": 1, "prefetch": 0}, ray="off",
            sandbox="none", run_dir=tmp_path / "run",
        )  # fmt: skip
        rows = run.rollouts.to_pylist()
        kinds = {row["failure_type"] for row in rows if row["status"] == "cancelled"}
        assert len(rows) == 60
        assert kinds == {"BudgetSpent"}
        assert sum(row["judge_cost_usd"] or 0 for row in rows) >= 3.0


async def test_a_judges_concurrency_is_kept_to() -> None:
    inside = most = 0
    two = asyncio.Event()

    async def reply(request: web.Request) -> web.Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            two.set()
        await asyncio.wait_for(two.wait(), 60)
        await asyncio.sleep(0.02)
        inside -= 1
        return answer('{"score": 1}')

    async with chat_server(reply) as url:
        judges = {"g": {**served(url, "g"), "max_concurrency": 2}}
        async with RolloutEngine([scripted()], k=12, judges=judges, ray="off", sandbox="none") as engine:
            await engine.finish([task_of(verifier=JUDGED)])
            await engine.close()
            rows = (await asyncio.to_thread(engine.tables)).rollouts
    assert rows.column("score").to_pylist() == [1.0] * 12
    assert most == 2


class TestConfig:
    async def test_outside_of_a_rollout_there_is_nobody_to_ask(self) -> None:
        with pytest.raises(VerifierUnavailable, match="only within a rollout"):
            await make_verifier(JUDGED).verify(task_of(), Trajectory(final_answer="42"), None)

    @pytest.mark.parametrize("judges", [{}, {"a": scripted(), "b": scripted()}])
    def test_a_judge_that_the_config_lacks_is_found_before_the_run(self, judges: dict[str, Any]) -> None:
        config = make_config(judges={name: {**each, "name": name} for name, each in judges.items()})
        with pytest.raises(InputError, match="the verifier asks"):
            check_task(Task(prompt="p", verifier=JUDGED), config)

    def test_the_error_names_the_judges_field(self) -> None:
        with pytest.raises(InputError, match=r"judges\.g\.base_url"):
            check_config(make_config(judges={"g": {"kind": "openai", "model": "x"}}))

    @pytest.mark.parametrize(
        "fields", [{"prompt": "no field"}, {"score_range": [1, 0]}, {"tries": 0}, {"name": "other"}, {"colour": 1}]
    )
    def test_what_cannot_be_used_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="judge"):
            make_config(judges={"g": {"kind": "scripted", **fields}})
