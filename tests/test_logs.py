"""Log lines say whose they are, hold no secret, fit their files, and change nothing for the application.

One test: .venv/bin/pytest tests/test_logs.py -k secret
"""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.config import LogSpec, RunConfig, log_level
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError
from rollout_engine.logfile import MAX_WAITING_BYTES, LogFile
from rollout_engine.loglines import About, JsonLines, Redactor, speak_of
from rollout_engine.logs import Logs, open_logs
from rollout_engine.rolloutline import MAX_TOOLS, tool_calls
from rollout_engine.types import Completion, Turn
from tests.helpers import make_config, make_tasks, scripted

KEY = "sk-not-a-real-key-8841"
OURS = logging.getLogger("rollout_engine.some.room")


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a log file: each is one JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(folder: Path | None, level: str = "info", run: str = "run", **spec: Any) -> Logs:
    return open_logs(folder, "driver-e1", About(run, 1), level, LogSpec(**spec), [KEY])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = [(name, logging.getLogger(name).level) for name in ("rollout_engine", "actors")]
    threads = set(threading.enumerate())
    yield
    for name, level in before:
        logger = logging.getLogger(name)
        assert (logger.level, logger.propagate, logger.handlers) == (level, True, [])
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "log writer"]


async def test_each_rollout_has_one_line_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    models = scripted("good", latency_ms=1), scripted("broken", p_500=1.0) | {"call_retries": 0}
    config = make_config(*models, k=2, retry={"max_retries": 0})
    async with RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        await engine.finish(make_tasks(3))
    [path] = (tmp_path / "run" / "logs").iterdir()
    assert path.name == "driver-e1.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = lines(path)
    assert {(line["epoch"], line["run_id"]) for line in written} == {(1, written[0]["run_id"])}
    said = {line["rollout_id"]: line for line in written if line.get("event") == "rollout"}
    assert len(said) == len([line for line in written if line.get("event") == "rollout"]) == 12
    good, broken = said["0/good/1/t2"], said["0/broken/0/t0"]
    assert (good["status"], good["score"], good["turns"], good["stop_reason"]) == ("completed", 1.0, 1, "finished")
    assert (good["task"], good["model"], good["attempt"], good["host_id"]) == ("t2", "good", 1, "host-0-e1")
    assert good["duration_s"] > 0
    assert good["completion_tokens"] > 0
    assert (broken["status"], broken["score"], broken["error"]) == ("failed", None, "model:ModelServerError")


async def test_a_line_of_an_agent_is_about_its_rollout(tmp_path: Path) -> None:
    config = make_config(agent="tests.test_logs:TalkingAgent", logs={"level": "debug"})
    async with RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        await engine.finish(make_tasks(2))
    said = [line for line in lines(tmp_path / "run" / "logs" / "driver-e1.jsonl") if line.get("message") == "thinking"]
    assert {(line["rollout_id"], line["host_id"], line["level"]) for line in said} == {
        ("0/m/0/t0", "host-0-e1", "debug"),
        ("0/m/0/t1", "host-0-e1", "debug"),
    }


class TalkingAgent:
    """Says at level debug that it thinks."""

    async def run(self, task: Any, model: Any, sandbox: Any, limits: Any, on_turn: Any) -> Any:
        OURS.debug("thinking")
        raise RuntimeError("and gives up")


async def test_level_off_and_a_temporary_run_leave_no_file(tmp_path: Path) -> None:
    async with RolloutEngine(config=make_config(logs={"level": "off"}), run_dir=tmp_path / "run") as engine:
        await engine.finish(make_tasks(1))
    assert not (tmp_path / "run" / "logs").exists()
    async with RolloutEngine(config=make_config()) as engine:
        await engine.finish(make_tasks(1))
        assert not (engine.run_dir / "logs").exists()


# -- secrets ------------------------------------------------------------------------------------------------------


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="[]"), min_size=6, max_size=40),
    st.text(max_size=20),
)
def test_no_secret_leaves_in_a_message_an_argument_or_a_traceback(secret: str, around: str) -> None:
    formatter = JsonLines(About("run", 1), Redactor([secret]))
    try:
        raise ValueError(f"{around}{secret}{around}")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "%s and %r", (secret, around + secret), info)
    line = formatter.format(record)
    shown = json.loads(line)
    assert secret not in line
    assert all(secret not in str(value) for name, value in shown.items() if name in ("message", "traceback"))


def test_a_key_that_is_logged_is_not_in_the_file(tmp_path: Path) -> None:
    logs = opened(tmp_path)
    OURS.warning("server said: bad key %s", KEY)
    OURS.error("with a header %r", {"authorization": f"Bearer {KEY}"})
    logs.close()
    text = (tmp_path / "driver-e1.jsonl").read_text()
    assert KEY not in text
    assert text.count("[key]") == 2


# -- files --------------------------------------------------------------------------------------------------------


def test_files_are_put_aside_and_the_oldest_go(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "logs" / "x.jsonl", max_bytes=10_000, kept=2)
    file.setFormatter(JsonLines(About("run", 1), Redactor()))
    for number in range(400):
        file.handle(logging.LogRecord("x", logging.WARNING, "", 0, "line %d", (number,), None))
        if number % 20 == 19:
            file.flush()
    file.close()
    found = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in found] == ["x.jsonl", "x.jsonl.1", "x.jsonl.2"]
    assert all(path.stat().st_size <= 10_000 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)
    kept = [line["message"] for path in found[::-1] for line in lines(path)]
    assert 50 < len(kept) < 400
    assert kept == [f"line {number}" for number in range(400 - len(kept), 400)]


def test_a_disk_that_is_too_slow_costs_lines_and_says_how_many(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "x.jsonl", max_bytes=2**30, kept=0)
    file.setFormatter(logging.Formatter('{"message": "%(message)s"}'))
    with file.disk:
        for _ in range(10):
            file.handle(logging.LogRecord("x", logging.INFO, "", 0, "x" * (MAX_WAITING_BYTES // 4), (), None))
    file.close()
    written = lines(tmp_path / "x.jsonl")
    assert len(written) == 4
    assert written[-1]["message"] == "7 lines were dropped: the disk is behind"


def test_a_folder_that_cannot_be_made_is_a_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    logs = opened(tmp_path / "file" / "logs")
    OURS.warning("goes to the application")
    logs.close()
    assert "no log file can be written" in caplog.text
    assert "goes to the application" in caplog.text


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "driver-e1.jsonl").symlink_to(tmp_path / "target")
    logs = opened(tmp_path)
    OURS.warning("hello")
    logs.close()
    assert (tmp_path / "target").read_text() == "kept"
    assert "no log file" in caplog.text


# -- the application ----------------------------------------------------------------------------------------------


def test_the_application_gets_what_it_got_before_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = opened(tmp_path, "debug")
    OURS.debug("only for the file")
    OURS.info("also only for the file")
    OURS.warning("for both")
    logs.close()
    OURS.info("for nobody")
    assert [record.message for record in caplog.records] == ["for both"]
    assert [line["message"] for line in lines(tmp_path / "driver-e1.jsonl")] == [
        "only for the file",
        "also only for the file",
        "for both",
    ]


def test_two_runs_in_one_process_have_each_their_own_lines(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "a", run="first"), opened(tmp_path / "b", run="second")

    def in_context(run: str) -> None:
        speak_of(About(run, 1))
        OURS.info("about %s", run)

    for run in ("first", "second"):
        thread = threading.Thread(target=in_context, args=(run,))  # a thread has a context of its own
        thread.start()
        thread.join()
    OURS.info("about nobody")
    first.close()
    second.close()
    for folder, run in (("a", "first"), ("b", "second")):
        said = [line["message"] for line in lines(tmp_path / folder / "driver-e1.jsonl")]
        assert said == [f"about {run}", "about nobody"]


def test_what_no_level_wants_is_never_made_into_text(tmp_path: Path) -> None:
    class Expensive:
        def __str__(self) -> str:
            raise AssertionError("made into text for nobody")

    logs = opened(tmp_path, "info")
    OURS.debug("%s", Expensive())
    logs.close()
    logs = opened(tmp_path, "debug")
    OURS.debug("%s", "now it is wanted")
    logs.close()
    assert [line["message"] for line in lines(tmp_path / "driver-e1.jsonl")] == ["now it is wanted"]


def test_without_a_folder_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs = opened(None)
    OURS.info("hello %s", KEY)
    logs.close()
    assert json.loads(capsys.readouterr().err)["message"] == "hello [key]"


# -- levels -------------------------------------------------------------------------------------------------------


def test_the_config_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", "DEBUG")
    assert log_level(RunConfig()) == "debug"
    assert log_level(RunConfig.model_validate({"logs": {"level": "error"}})) == "error"
    monkeypatch.delenv("ROLLOUT_LOG_LEVEL")
    assert log_level(RunConfig()) == "info"
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", "loud")
    with pytest.raises(InputError, match="no log level 'loud'"):
        log_level(RunConfig())


# -- tools --------------------------------------------------------------------------------------------------------


def turn_with(calls: Any) -> Turn:
    return Turn(0, [], Completion({"role": "assistant", "content": "", "tool_calls": calls}, "stop"))


def test_tool_calls_are_counted_by_name_and_names_are_bounded() -> None:
    calls = [{"function": {"name": "shell"}}, {"function": {"name": "shell"}}, {"function": {"name": "x" * 1000}}]
    assert tool_calls([turn_with(calls), turn_with(None)]) == {"shell": 2, "x" * 64: 1}
    many = [{"function": {"name": f"tool-{number}"}} for number in range(1000)]
    counted = tool_calls([turn_with(many)])
    assert len(counted) == MAX_TOOLS + 1
    assert sum(counted.values()) == 1000


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_whatever_an_agent_calls_a_turn_counting_does_not_fail(calls: Any) -> None:
    tool_calls([turn_with(calls), calls])
