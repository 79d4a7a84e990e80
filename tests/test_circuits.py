"""What is broken is found by what it breaks, paused, probed and given up; what works beside it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.breaker import BreakerState
from rollout_engine.circuits import MAX_SUBJECTS, Circuits, Outcome, Subject, SubjectKind, finding, subjects_of
from rollout_engine.config import RetrySpec
from rollout_engine.errors import AgentError, SandboxAway, SandboxStartError
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.scheduler import Scheduler
from rollout_engine.specs import Task
from rollout_engine.tries import Try, Verdict
from rollout_engine.types import Isolation, KeySpace, RolloutRecord, Score, StopReason, Trajectory, Turn
from tests.helpers import make_config
from tests.rig import task_of
from tests.test_driver import Hosts, assert_each_key_once, driving

RULES = RetrySpec(
    max_retries=0, backoff_s=0.0, breaker_failures=3, breaker_setup_failures=2, breaker_pause_s=1.0, breaker_trips=2
)
GOOD = Outcome(boxed=True)
NO_BOX = Outcome(failed=True, retryable=True, kind="sandbox:SandboxStartError")
NO_SETUP = Outcome(failed=True, kind="setup:SetupError")
NO_VERDICT = Outcome(kind="verifier:ModuleNotFoundError", boxed=True, no_verdict=True)
NO_MODEL = Outcome(failed=True, retryable=True, kind="model:ModelServerError", boxed=True)
NO_AGENT = Outcome(failed=True, retryable=True, kind="agent:AgentError", boxed=True)
NO_TASK = Outcome(failed=True, kind="task:TaskBodyError")
AWAY = Outcome(failed=True, retryable=True, kind="sandbox:SandboxAway")
IMAGE, OTHER = Subject("image", "python:3"), Subject("image", "debian:12")


# -- who is to blame --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "findings"),
    [
        (GOOD, {"model": True, "agent": True, "host": True, "image": True, "setup": True, "verifier": True}),
        (Outcome(), {"model": True, "agent": True, "host": None, "image": None, "setup": None, "verifier": True}),
        (NO_BOX, {"model": None, "agent": None, "host": False, "image": False, "setup": None, "verifier": None}),
        (NO_SETUP, {"model": None, "agent": None, "host": None, "image": None, "setup": False, "verifier": None}),
        (NO_VERDICT, {"model": True, "agent": True, "host": True, "image": True, "setup": True, "verifier": False}),
        (NO_MODEL, {"model": False, "agent": None, "host": True, "image": True, "setup": True, "verifier": None}),
        (NO_AGENT, {"model": None, "agent": False, "host": True, "image": True, "setup": True, "verifier": None}),
        (NO_TASK, {"model": None, "agent": None, "host": None, "image": None, "setup": None, "verifier": None}),
        (AWAY, {"model": None, "agent": None, "host": False, "image": None, "setup": None, "verifier": None}),
        (Outcome(cancelled=True, boxed=True), dict.fromkeys(("model", "agent", "host", "image", "setup", "verifier"))),
    ],
)
def test_a_row_speaks_for_or_against_what_it_depended_on(
    outcome: Outcome, findings: dict[SubjectKind, bool | None]
) -> None:
    assert {kind: finding(kind, outcome) for kind in findings} == findings


def test_a_task_depends_on_its_verifier_its_agent_its_image_and_its_own_setup() -> None:
    task = task_of(task_id="t9", setup=["true"], environment={"image": "python:3"})
    found = set(map(str, subjects_of(task, "cli")))
    assert found == {"verifier match", "agent cli", "image python:3", "the setup of task t9"}
    assert subjects_of(task_of(), "cli") == (Subject("verifier", "match"), Subject("agent", "cli"))


# -- pure decisions ---------------------------------------------------------------------------------------------------


def scheduler_of(tasks: int, *subjects: Subject, k: int = 4) -> Scheduler:
    """One model; every task depends on all subjects."""
    scheduler = Scheduler(KeySpace(1, k), RULES)
    for slot in range(tasks):
        scheduler.add_group([Try(key) for key in scheduler.space.group_keys(slot)], subjects)
    for host in "ab":
        scheduler.join(host)
    return scheduler


def end_all(scheduler: Scheduler, host: str, outcome: Outcome, now: float) -> None:
    for key in list(scheduler.held[host]):
        scheduler.finished(host, key, outcome, now)


def test_a_host_whose_sandboxes_all_fail_gets_one_probe_at_a_time_and_the_other_goes_on() -> None:
    scheduler = scheduler_of(20)
    scheduler.grant("a", 3, 0.0)
    end_all(scheduler, "a", NO_BOX, 0.0)
    assert scheduler.grant("a", 8, 0.5) == []
    assert len(scheduler.grant("b", 8, 0.5)) == 8
    assert len(scheduler.grant("a", 8, 1.0)) == 1, "the pause is over: one probe"
    assert scheduler.grant("a", 8, 1.0) == [], "and no second one beside it"
    end_all(scheduler, "a", NO_BOX, 1.0)
    assert scheduler.grant("a", 8, 2.9) == [], "the pause has doubled"
    assert len(scheduler.grant("a", 8, 3.0)) == 1
    end_all(scheduler, "a", GOOD, 3.0)
    assert len(scheduler.grant("a", 8, 3.0)) == 8
    assert not scheduler.circuits.busy


def test_a_host_is_never_given_up_but_all_of_them_together_are() -> None:
    scheduler = scheduler_of(20)
    now = 0.0
    for _ in range(6):
        scheduler.grant("a", 3, now)
        end_all(scheduler, "a", NO_BOX, now)
        now += 100.0
    assert scheduler.circuits.dead() == []
    assert scheduler.circuits.hopeless(["a", "b"]) is None
    for _ in range(6):
        scheduler.grant("b", 3, now)
        end_all(scheduler, "b", NO_BOX, now)
        now += 100.0
    hopeless = scheduler.circuits.hopeless(["a", "b"])
    assert hopeless is not None
    assert hopeless.kind == "sandbox:SandboxStartError"
    assert scheduler.circuits.hopeless(["a", "b", "new"]) is None


def test_the_longest_pause_of_a_host_is_bounded() -> None:
    scheduler = scheduler_of(60)
    now, pauses = 0.0, []
    for _ in range(8):
        scheduler.grant("a", 3, now)
        end_all(scheduler, "a", NO_BOX, now)
        opening = scheduler.circuits.next_opening()
        if opening is not None and opening > now:
            pauses.append(opening - now)
            now = opening
    assert pauses[:4] == [1.0, 2.0, 4.0, 4.0]
    assert max(pauses) == 4.0


def test_a_host_whose_provider_does_not_answer_gets_probes_and_costs_no_retry() -> None:
    scheduler = scheduler_of(20, IMAGE)
    now, probes = 0.0, 0
    scheduler.grant("a", 3, now)
    end_all(scheduler, "a", AWAY, now)
    assert len(scheduler.grant("b", 8, now)) == 8, "the other host goes on, with what failed there"
    while now < RULES.away_s - 10:
        assert len(scheduler.grant("a", 8, now)) <= 1, "one failure has closed it to all but probes"
        for key in list(scheduler.held["a"]):
            assert scheduler.finished("a", key, AWAY, now) is Verdict.RETRY
            probes += 1
        assert scheduler.circuits.hopeless(["a"]) is None
        now += 1.0
    assert 50 < probes < 60, "after 1, 2, 2, 2, ... seconds"
    scheduler.grant("a", 8, now + 2)
    end_all(scheduler, "a", GOOD, now + 2)
    assert len(scheduler.grant("a", 8, now + 2)) == 8, "it has come back"


def test_a_provider_that_does_not_come_back_is_given_up_in_bounded_time() -> None:
    scheduler = scheduler_of(20)
    scheduler.grant("a", 8, 0.0)
    end_all(scheduler, "a", AWAY, 0.0)
    now, verdict = 0.0, None
    while verdict is not Verdict.COMMIT and now < 10 * RULES.away_s:
        now += 1.0
        for one in scheduler.grant("a", 1, now):
            verdict = scheduler.finished("a", one.key, AWAY, now)
    assert RULES.away_s <= now < RULES.away_s + 10
    assert scheduler.circuits.hopeless(["a"]) is not None, "which ends what is left"


def test_an_image_that_fails_everywhere_is_given_up_and_another_is_untouched() -> None:
    scheduler = Scheduler(KeySpace(1, 4), RULES)
    for slot in range(10):
        keys = scheduler.space.group_keys(slot)
        scheduler.add_group([Try(key) for key in keys], (OTHER if slot % 2 else IMAGE,))
    for host in "ab":
        scheduler.join(host)
    done: Counter[str] = Counter()
    now = 0.0
    for _ in range(100):
        for host in "ab":
            scheduler.grant(host, 3, now)
            for key in list(scheduler.held[host]):
                bad = scheduler.space.slot(key) % 2 == 0
                scheduler.finished(host, key, NO_BOX if bad else GOOD, now)
                done["bad" if bad else "good"] += 1
        for subject, breaker, tries in scheduler.drop_dead():
            assert (subject, breaker.kind) == (IMAGE, "sandbox:SandboxStartError")
            done["dropped"] += len(tries)
        now += 1.0
    assert done["good"] == 20
    assert done["bad"] + done["dropped"] == 20
    assert done["bad"] <= 3 + 3 + 2, "three to open it, what ran beside them, and a probe for each pause"


def test_a_tasks_setup_that_keeps_failing_costs_only_that_task() -> None:
    scheduler = Scheduler(KeySpace(1, 20), RULES)
    for slot in range(2):
        keys = scheduler.space.group_keys(slot)
        scheduler.add_group([Try(key) for key in keys], (Subject("setup", f"t{slot}"),))
    scheduler.join("a")
    now, failed, good, dropped = 0.0, 0, 0, 0
    for _ in range(60):
        for one in scheduler.grant("a", 1, now):
            bad = scheduler.space.slot(one.key) == 0
            scheduler.finished("a", one.key, NO_SETUP if bad else GOOD, now)
            failed, good = failed + bad, good + (not bad)
        dropped += sum(len(tries) for _, _, tries in scheduler.drop_dead())
        now += 1.0
    assert (failed, dropped, good) == (4, 16, 20), "two failures, two probes"
    scheduler.drop_dead()
    assert not scheduler.circuits.busy, "nothing depends on it any more"


def test_a_verifier_is_judged_by_different_tasks_not_by_one_with_many_attempts() -> None:
    verifier = Subject("verifier", "code")
    circuits = Circuits(RULES, 1)
    for key in range(50):
        circuits.ended(key, 0, 0, [verifier], NO_VERDICT, 0.0)
    assert circuits.room([verifier], 0.0) is None
    circuits.ended(50, 1, 0, [verifier], NO_VERDICT, 0.0)
    assert circuits.room([verifier], 0.0) is None
    circuits.ended(51, 2, 0, [verifier], NO_VERDICT, 0.0)
    assert circuits.room([verifier], 0.0) == 0


def test_what_is_remembered_is_bounded() -> None:
    circuits = Circuits(RULES, 1)
    for slot in range(MAX_SUBJECTS + 50):
        circuits.ended(slot, slot, 0, [Subject("setup", str(slot))], NO_SETUP, 0.0)
    assert len(circuits._others) == MAX_SUBJECTS


def test_a_lost_probe_makes_room_for_another() -> None:
    scheduler = scheduler_of(5, IMAGE)
    scheduler.grant("a", 3, 0.0)
    end_all(scheduler, "a", NO_BOX, 0.0)
    assert len(scheduler.grant("b", 8, 1.0)) == 1
    assert scheduler.grant("b", 8, 1.0) == []
    scheduler.lost("b")
    scheduler.join("c")
    assert len(scheduler.grant("c", 8, 1.0)) == 1


OUTCOMES = st.sampled_from([GOOD, NO_BOX, AWAY, NO_SETUP, NO_VERDICT, NO_MODEL, NO_AGENT, Outcome(cancelled=True)])
STEPS = st.lists(
    st.tuples(st.sampled_from(["grant", "end", "end", "lose", "wait"]), st.integers(0, 2), st.integers(0, 9), OUTCOMES),
    max_size=100,
)


@settings(max_examples=200)
@given(STEPS, st.integers(1, 6))
def test_whatever_fails_each_key_ends_once_and_what_is_paused_is_started_by_one_probe_at_most(
    steps: list[tuple[str, int, int, Outcome]], tasks: int
) -> None:
    scheduler = Scheduler(KeySpace(1, 3), RULES)
    for slot in range(tasks):
        subjects = (
            Subject("verifier", "code"),
            Subject("agent", "cli"),
            IMAGE if slot % 2 else OTHER,
            Subject("setup", f"t{slot}"),
        )
        scheduler.add_group([Try(key) for key in scheduler.space.group_keys(slot)], subjects)
    hosts, ended, now = ["h0", "h1", "h2"], Counter[int](), 0.0
    for host in hosts:
        scheduler.join(host)

    def bury() -> None:
        for _, _, tries in scheduler.drop_dead():
            ended.update(one.key for one in tries)
        if scheduler.dead_models() or scheduler.circuits.hopeless(scheduler.held):
            ended.update(one.key for one in scheduler.drop_all())

    for step, which, number, outcome in steps:
        host = hosts[which]
        held = list(scheduler.held[host])
        if step == "grant":
            shut = {subject for subject, each in scheduler.circuits.shut() if now < each.opens_at}
            for one in scheduler.grant(host, number, now):
                group = scheduler._groups[scheduler.space.group(one.key)]
                assert not shut.intersection((*group.subjects, Subject("host", host)))
        elif step == "end" and held:
            if scheduler.finished(host, held[number % len(held)], outcome, now) is Verdict.COMMIT:
                ended[held[number % len(held)]] += 1
        elif step == "lose":
            lost = scheduler.lost(host)
            ended.update(one.key for one in (*lost.given_up, *lost.cancelled))
            hosts[which] = host + "'"
            scheduler.join(hosts[which])
        else:
            now += number
        bury()
        probes = [each.probe for _, each in scheduler.circuits.shut() if each.state is BreakerState.HALF_OPEN]
        all_held = {key for held_by in scheduler.held.values() for key in held_by}
        assert all(probe is None or probe in all_held for probe in probes)
    for _ in range(2000):
        if not scheduler.pending + scheduler.held_count:
            break
        now += 1.0
        for host in hosts:
            scheduler.grant(host, 3, now)
            for key in list(scheduler.held[host]):
                if scheduler.finished(host, key, GOOD, now) is Verdict.COMMIT:
                    ended[key] += 1
        bury()
    assert ended == Counter(dict.fromkeys(range(tasks * 3), 1))


# -- in a run ---------------------------------------------------------------------------------------------------------

RETRY = {"max_retries": 2, "backoff_s": 0.0, "breaker_failures": 4, "breaker_pause_s": 0.1, "breaker_trips": 2}
BOXED: dict[str, Any] = {"environment": {"trusted": True}}


class Fragile(LocalProvider):
    """Local sandboxes; the first `broken` providers of a test make none, and nobody has the image `no-such`.

    All of them are away for the tries from the 10th to the 30th.
    """

    broken: ClassVar[int] = 0
    restarts: ClassVar[bool] = False
    made: ClassVar[int] = 0
    tries: ClassVar[Counter[bool]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._broken = Fragile.made < Fragile.broken
        Fragile.made += 1

    async def open(self, spec: SandboxSpec) -> Any:
        Fragile.tries[self._broken] += 1
        if self._broken:
            raise SandboxStartError("no space left for a sandbox")
        if Fragile.restarts and 10 <= Fragile.tries[False] < 30:
            raise SandboxAway("its daemon is being restarted")
        if spec.image == "no-such":
            raise SandboxStartError("image no-such: not found")
        return await super().open(SandboxSpec(trusted=True, layers=spec.layers))

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        return await super().prepare(SandboxSpec(trusted=True, layers=spec.layers), recipe)


@pytest.fixture(autouse=True)
def _whole() -> None:
    Fragile.broken, Fragile.made, Fragile.tries, Fragile.restarts = 0, 0, Counter(), False
    Needy.installed = False


class Needy:
    """A verifier that needs something that is not installed."""

    isolation = Isolation.PURE
    installed: ClassVar[bool] = False
    raised: ClassVar[int] = 0
    mended_after: ClassVar[int] = 10**9

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        return None

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        if not Needy.installed:
            Needy.raised += 1
            Needy.installed = Needy.raised >= Needy.mended_after
            raise ModuleNotFoundError("No module named 'sympy'")
        return Score(1.0)


class Broken:
    """An agent whose program never works with the tasks that its options name; with no names, with none."""

    def __init__(self, tasks: tuple[str, ...] = ()) -> None:
        self._tasks = tasks

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if not self._tasks or task.task_id in self._tasks:
            raise AgentError("the agent program ended with 1 and made no model call")
        messages = task.messages()
        completion = await model.complete(messages)
        on_turn(Turn(0, [*messages, completion.message], completion))
        return StopReason.FINISHED


def config_of(**fields: Any) -> Any:
    rules = {**RETRY, **fields.pop("retry", {})}
    return make_config(
        sandbox="tests.test_circuits:Fragile",
        retry=rules,
        trusted_code=["tests.*"],
        host={"slots": 4, "prefetch": 0.0},
        **fields,
    )


def kinds(rows: list[RolloutRecord]) -> Counter[tuple[str, str | None, str | None]]:
    return Counter((row.status, row.failure_boundary, row.failure_type) for row in rows)


async def test_a_host_that_makes_no_sandbox_costs_no_rollout_its_row() -> None:
    Fragile.broken = 1
    retry = {"max_retries": 20, "breaker_pause_s": 10.0}  # so that the number of probes is not that of seconds
    async with driving(config_of(k=2, retry=retry), hosts=Hosts(2)) as drive:
        rows = await drive.run([task_of(task_id=f"t{number}", **BOXED) for number in range(40)])
        notes = drive.driver.progress.notes
    assert_each_key_once(rows, 80)
    assert {(row.status, row.score, row.host_id) for row in rows} == {("completed", 1.0, "host-1")}
    assert any("host host-0 is paused (pause 1): it keeps failing with sandbox:SandboxStartError" in n for n in notes)
    assert any(event.kind == "breaker" and "host host-0 is paused" in event.message for event in drive.store.events)
    assert Fragile.tries[True] <= 4 + 4 + 12, "some to find out, then probes"


async def test_where_no_host_makes_a_sandbox_the_run_ends_with_a_row_for_each() -> None:
    Fragile.broken = 2
    async with driving(config_of(k=2, retry={"max_retries": 20}), hosts=Hosts(2)) as drive:
        rows = await drive.run([task_of(task_id=f"t{number}", **BOXED) for number in range(40)])
        notes = drive.driver.progress.notes
    assert_each_key_once(rows, 80)
    assert kinds(rows).keys() <= {("failed", "sandbox", "CircuitOpen"), ("failed", "sandbox", "SandboxStartError")}
    assert kinds(rows)["failed", "sandbox", "CircuitOpen"] > 60
    assert {row.score for row in rows} == {None}
    assert any("sandboxes were given up on every host (host-0, host-1)" in note for note in notes)


async def test_a_daemon_that_is_restarted_costs_no_row() -> None:
    Fragile.restarts = True
    retry = {"max_retries": 0, "breaker_pause_s": 0.02}
    async with driving(config_of(k=2, retry=retry), hosts=Hosts(2)) as drive:
        rows = await drive.run([task_of(task_id=f"t{number}", **BOXED) for number in range(20)])
        notes = drive.driver.progress.notes
    assert_each_key_once(rows, 40)
    assert {(row.status, row.score) for row in rows} == {("completed", 1.0)}
    assert sum(row.retries for row in rows) == 20
    assert any("host host-0 is paused (pause 1): it keeps failing with sandbox:SandboxAway" in note for note in notes)


async def test_an_image_that_nobody_has_is_given_up_and_says_so_in_its_rows() -> None:
    images = ["no-such", "python:3"]
    tasks = [task_of(task_id=f"t{number}", environment={"image": images[number % 2]}) for number in range(20)]
    async with driving(config_of(k=4), hosts=Hosts(2)) as drive:
        rows = await drive.run(tasks)
    assert_each_key_once(rows, 80)
    by_image = [[row for row in rows if int(row.task_id[1:]) % 2 == which] for which in (0, 1)]
    assert {(row.status, row.score) for row in by_image[1]} == {("completed", 1.0)}
    assert kinds(by_image[0])["failed", "sandbox", "CircuitOpen"] > 20
    given_up = next(row for row in by_image[0] if row.failure_type == "CircuitOpen")
    assert "image no-such was given up after 2 pauses" in (given_up.failure_message or "")
    assert given_up.retryable


async def test_a_setup_that_fails_is_not_tried_by_every_attempt() -> None:
    tasks = [task_of(task_id="bad", setup=["exit 3"], **BOXED), task_of(task_id="good", setup=["true"], **BOXED)]
    async with driving(config_of(k=30, retry={"breaker_setup_failures": 2})) as drive:
        rows = await drive.run(tasks)
    assert_each_key_once(rows, 60)
    bad = kinds([row for row in rows if row.task_id == "bad"])
    assert bad["failed", "setup", "CircuitOpen"] >= 20
    assert bad["failed", "setup", "SetupError"] + bad["failed", "setup", "CircuitOpen"] == 30
    assert {row.status for row in rows if row.task_id == "good"} == {"completed"}


async def test_a_verifier_that_never_works_is_given_up_and_no_score_is_zero() -> None:
    Needy.mended_after = 10**9
    tasks = [task_of(task_id=f"t{n}", verifier={"type": "tests.test_circuits:Needy"}) for n in range(40)]
    tasks += [task_of(task_id=f"m{n}") for n in range(5)]
    async with driving(config_of(k=2)) as drive:
        rows = await drive.run(tasks)
        progress = drive.driver.progress
    assert_each_key_once(rows, 90)
    needy = [row for row in rows if row.task_id.startswith("t")]
    assert {row.score for row in needy} == {None}
    assert {row.score for row in rows if row.task_id.startswith("m")} == {1.0}
    found = kinds(needy)
    assert found.keys() == {("completed", "verifier", "ModuleNotFoundError"), ("failed", "verifier", "CircuitOpen")}
    assert found["failed", "verifier", "CircuitOpen"] > 50
    assert progress.verifier_errors == found["completed", "verifier", "ModuleNotFoundError"]
    assert any("verifier tests.test_circuits:Needy was given up" in note for note in progress.notes)


@pytest.mark.slow
async def test_a_verifier_that_is_mended_goes_on_after_its_pause() -> None:
    Needy.raised, Needy.mended_after = 0, 8
    tasks = [task_of(task_id=f"t{n}", verifier={"type": "tests.test_circuits:Needy"}) for n in range(40)]
    async with driving(config_of(retry={"breaker_trips": 50})) as drive:
        rows = await drive.run(tasks)
        assert any("verifier tests.test_circuits:Needy is paused" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 40)
    assert Counter(row.score for row in rows) == {1.0: 32, None: 8}


async def test_an_agent_that_never_works_is_given_up_and_its_model_is_not_blamed() -> None:
    tasks = [task_of(task_id=f"t{n}") for n in range(40)]
    async with driving(config_of(agent="tests.test_circuits:Broken")) as drive:
        rows = await drive.run(tasks)
        notes, models = drive.driver.progress.notes, drive.driver.board.scheduler.breakers
    assert_each_key_once(rows, 40)
    found = kinds(rows)
    assert found.keys() == {("failed", "agent", "AgentError"), ("failed", "agent", "CircuitOpen")}
    assert found["failed", "agent", "CircuitOpen"] > 20
    assert any("agent tests.test_circuits:Broken was given up" in note for note in notes)
    assert not any("model" in note for note in notes)
    assert [(each.state, each.trips) for each in models] == [(BreakerState.CLOSED, 0)]


async def test_a_task_that_an_agent_cannot_work_with_stops_nothing_else() -> None:
    options = {"tasks": ["bad"]}
    tasks = [task_of(task_id="bad"), *(task_of(task_id=f"t{n}") for n in range(5))]
    async with driving(config_of(agent="tests.test_circuits:Broken", agent_options=options, k=20)) as drive:
        rows = await drive.run(tasks)
        notes = drive.driver.progress.notes
    assert_each_key_once(rows, 120)
    assert kinds(rows) == {("failed", "agent", "AgentError"): 20, ("completed", None, None): 100}
    assert not notes
