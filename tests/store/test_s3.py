"""Objects on a real S3 server, and everything that may go wrong on the way to it. Run: pytest tests/store/test_s3.py"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pytest

from rollout_engine.errors import InputError, RunError
from rollout_engine.schema import batch_to_records
from rollout_engine.store import RunDir, create_run, mirrors, open_run
from rollout_engine.store.arrowfs import ArrowObjects
from rollout_engine.store.epochs import live_driver
from rollout_engine.store.mirror import fenced
from rollout_engine.store.mirrors import detach_all, mirror_of
from rollout_engine.store.objects import ObjectError, PassingError, open_objects, patiently
from rollout_engine.store.s3 import S3Objects
from tests.store.rows import batch, make_config, plan, record
from tests.store.s3_server import BUCKET, SECRET, Ask, Proxy, behind_proxy, moto_server

NUMBERS = count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with behind_proxy(server, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def uri() -> str:
    return f"s3://{BUCKET}/run-{next(NUMBERS)}"


@pytest.fixture
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What goes wrong in a test. Where nothing is answered, that is noticed soon; a busy server is waited for."""
    if request.param == "mute":
        monkeypatch.setattr("rollout_engine.store.s3.READ_S", 5.0)
    fault: str = request.param
    return fault


@pytest.fixture
def objects(proxy: Proxy, uri: str) -> S3Objects:
    return S3Objects(BUCKET, uri.rpartition("/")[2])


def on(method: str, part: str, fault: str, times: int = 1) -> Callable[[Ask], str | None]:
    """The fault for the first requests of that kind."""
    return lambda ask: fault if ask.method == method and part in ask.key and ask.number < times else None


def forget() -> None:
    """As another machine sees it: nothing is known but what is on the store."""
    detach_all()


def make_run(uri: str, **store: float) -> RunDir:
    return create_run(uri, make_config(store={"patience_s": 60.0, **store}))


def keys_of(uri: str) -> list[int]:
    return sorted(row.key for rows in open_run(uri).scan(pa_names()) for row in batch_to_records(rows))


def pa_names() -> list[str]:
    from rollout_engine.schema import LOG

    return list(LOG.names)


# -- objects --------------------------------------------------------------------------------------------------------


def test_what_is_put_is_listed_and_read(objects: S3Objects) -> None:
    stamp = objects.put("log/1-0.arrows", b"x" * 10)
    assert objects.list() == {"log/1-0.arrows": stamp}
    assert objects.list("plan/") == {}
    assert objects.get("log/1-0.arrows") == b"x" * 10
    assert objects.get("log/1-1.arrows") is None
    assert (objects.exists("log/1-0.arrows"), objects.exists("log/1")) == (True, False)
    assert objects.put("log/1-0.arrows", b"y" * 10) != stamp
    assert objects.age_s("log/1-0.arrows") < 60
    objects.delete(["log/1-0.arrows", "not-there"])
    assert objects.list() == {}


def test_a_list_of_many_pages_is_whole(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.store.s3.PAGE", 10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: objects.put(f"log/1-{number}.arrows", b"x"), range(25)))
    assert len(objects.list()) == 25
    objects.delete(objects.list())
    assert objects.list() == {}


def test_of_many_makers_one_succeeds(objects: S3Objects) -> None:
    def make(number: int) -> bool:
        try:
            objects.create("epochs/1.json", str(number).encode())
        except FileExistsError:
            return False
        return True

    assert make(0)
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(make, range(1, 9)))
    assert objects.get("epochs/1.json") == b"0"


def test_what_was_made_although_the_answer_was_an_error_is_ours(objects: S3Objects, proxy: Proxy) -> None:
    proxy.fault = on("PUT", "epochs", "lost_answer")
    objects.create("epochs/1.json", b"mine")
    with pytest.raises(FileExistsError):
        objects.create("epochs/1.json", b"another's")


def test_a_store_that_does_not_honour_the_condition_is_refused(objects: S3Objects, proxy: Proxy) -> None:
    objects.check_exclusive()
    objects.check_exclusive()
    objects.delete(objects.list())
    proxy.fault = on("PUT", "", "no_condition", 10)
    with pytest.raises(InputError, match="does not honour If-None-Match") as refused:
        objects.check_exclusive()
    assert refused.value.where == objects.uri


@pytest.mark.parametrize("fault", ["busy", "cut", "lost_answer", "mute"], indirect=True)
def test_what_passes_is_tried_again_and_the_object_is_whole(fault: str, objects: S3Objects, proxy: Proxy) -> None:
    proxy.fault = on("PUT", "log", fault, 1)
    objects.put("log/1-0.arrows", b"x" * 100_000)
    assert objects.get("log/1-0.arrows") == b"x" * 100_000
    assert len([ask for ask in proxy.asked if ask.method == "PUT"]) == 2


def test_patience_ends(objects: S3Objects, proxy: Proxy) -> None:
    objects.patience_s = 0.5
    proxy.fault = on("PUT", "log", "busy", 1000)
    with pytest.raises(
        ObjectError, match=rf"{objects.uri}/log/1-0.arrows: .*HTTP 503 SlowDown.*tries in 0.5 s"
    ) as said:
        objects.put("log/1-0.arrows", b"x")
    assert SECRET not in str(said.value)


@pytest.mark.parametrize(("failures", "tries"), [(0, 1), (3, 4), (100, 7)])
def test_pauses_grow_and_the_time_is_bounded(failures: int, tries: int) -> None:
    now, made = [0.0], [0]

    def work() -> str:
        made[0] += 1
        if made[0] <= failures:
            raise PassingError("busy")
        return "done"

    def sleep(seconds: float) -> None:
        now[0] += seconds

    if failures == 100:
        with pytest.raises(ObjectError, match="busy"):
            patiently(work, "it", 10.0, lambda: now[0], sleep)
        assert now[0] <= 10.0
        assert made[0] > 5
    else:
        assert patiently(work, "it", 10.0, lambda: now[0], sleep) == "done"
        assert made[0] == tries


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["s3://bucket", "s3://", "s3://bucket//a", "s3://bucket/a/../b", "nonsense://x/y"])
def test_a_uri_that_can_be_no_run_is_refused(bad: str) -> None:
    with pytest.raises(InputError) as refused:
        open_objects(bad)
    assert refused.value.fix


@pytest.mark.parametrize("bad", [f"s3://key:{SECRET}@bucket/run", f"s3://bucket/run?secret_key={SECRET}"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(bad: str) -> None:
    with pytest.raises(InputError, match="credentials") as refused:
        open_objects(bad)
    assert SECRET not in str(refused.value)


def test_no_bucket_no_right_and_no_credentials_are_told_with_what_to_do(
    proxy: Proxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"s3://no-such-bucket/run: .*NoSuchBucket; make the bucket"):
        create_run("s3://no-such-bucket/run", make_config())
    proxy.fault = lambda ask: "refuse"
    with pytest.raises(InputError, match=rf"{uri}.*HTTP 403 AccessDenied; let these credentials") as refused:
        create_run(uri, make_config())
    assert SECRET not in str(refused.value)
    with pytest.raises(InputError, match="HTTP 403"):
        open_run(uri)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    forget()
    with pytest.raises(InputError, match="NoCredentialsError; set AWS_ACCESS_KEY_ID"):
        open_run(uri)


def test_an_address_that_is_no_url_or_where_nobody_listens_is_told(
    uri: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no url")
    with pytest.raises(InputError, match=r"cannot be set up.*\n.*AWS_ENDPOINT_URL"):
        open_run(uri)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("rollout_engine.store.s3.OPEN_PATIENCE_S", 0.5)
    mirrored = mirrors.attach(uri)
    mirrored.objects.patience_s = 0.5
    with pytest.raises(InputError, match=rf"{uri}.*EndpointConnectionError"):
        open_run(uri)


def test_a_place_that_holds_something_else_is_left_alone(objects: S3Objects, uri: str) -> None:
    objects.put("thesis.tex", b"x")
    with pytest.raises(InputError, match=rf"{uri}: is not empty"):
        create_run(uri, make_config())
    with pytest.raises(InputError, match="is no run directory"):
        open_run(uri)
    assert list(objects.list()) == ["thesis.tex"]


def test_a_file_system_without_exclusive_creation_is_read_and_not_driven(
    proxy: Proxy, uri: str, tmp_path: Path
) -> None:
    run = create_run(tmp_path / "run", make_config())
    writer = run.start()
    plan(writer, 2)
    writer.commit([batch([record(0)])])
    writer.close("finished")
    objects = ArrowObjects("gs://bucket/run", pa.fs.LocalFileSystem(), str(tmp_path / "run"))
    assert "log/1-0.arrows" in objects.list()
    assert objects.get("nothing") is None
    with pytest.raises(InputError, match="cannot be driven here"):
        objects.check_exclusive()
    with pytest.raises(InputError, match="cannot be driven here"):
        objects.put("x", b"")


def test_a_run_that_could_not_be_driven_is_refused_without_asking_the_store() -> None:
    with pytest.raises(InputError, match=r"gs://nowhere-at-all/run: a run cannot be driven here"):
        create_run("gs://nowhere-at-all/run", make_config())


class Mute:
    """A client of a store that never answers."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def get_file_info(self, _: object) -> None:
        self.over.wait()

    def open_input_stream(self, _: str) -> None:
        self.over.wait()


def test_a_client_that_waits_for_ever_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.store.arrowfs.ANSWER_S", 0.2)
    mute = Mute()
    objects = ArrowObjects("gs://bucket/run", mute, "run")
    try:
        for ask in (objects.list, lambda: objects.get("run.json"), lambda: objects.exists("run.json")):
            with pytest.raises(ObjectError, match=r"no answer within 0\.2 s; check the network"):
                ask()
    finally:
        mute.over.set()


# -- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_is_written_and_read_by_another_machine(proxy: Proxy, uri: str) -> None:
    run = make_run(uri)
    writer = run.start()
    plan(writer, 2)
    writer.commit([batch([record(0), record(1)])])
    writer.commit([batch([record(2)])])
    forget()
    assert keys_of(uri) == [0, 1, 2], "what is acknowledged is on the store"


def test_the_tables_lie_on_the_store_for_any_reader(proxy: Proxy, uri: str, objects: S3Objects) -> None:
    writer = make_run(uri).start()
    plan(writer, 2)
    writer.commit([batch([record(key) for key in range(8)])])
    done = writer.compact()
    writer.close("finished")
    forget()
    assert done.rollouts == 8
    names = set(objects.list())
    assert {"rollouts/part-00000.parquet", "turns/part-00000.parquet", "compacted.json", "run.json"} <= names
    files = pa.fs.S3FileSystem(access_key="tester", secret_key=SECRET, endpoint_override=proxy.url, region="us-east-1")
    with files.open_input_file(f"{uri.removeprefix('s3://')}/rollouts/part-00000.parquet") as file:
        assert len(pa.parquet.read_table(file)) == 8
    assert json.loads(objects.get("run.json") or b"")["status"] == "finished"


def test_a_second_driver_is_refused_and_one_that_was_superseded_stops(proxy: Proxy, uri: str) -> None:
    first = make_run(uri).start()
    plan(first, 2)
    first.commit([batch([record(0)])])
    with pytest.raises(InputError, match=f"a driver works on this run: pid {os.getpid()}"):
        open_run(uri).start()
    seize(uri)
    with pytest.raises(RunError, match="another driver has taken over"):
        first.commit([batch([record(1)])])


def seize(uri: str) -> None:
    """The next epoch, taken as if its holder had died."""
    objects = open_objects(uri)
    raw = json.loads(objects.get("epochs/1.json") or b"")
    objects.put("epochs/1.json", json.dumps({**raw, "released": True}).encode())
    objects.create("epochs/2.json", json.dumps({**raw, "epoch": 2}).encode())


def test_rows_that_arrive_after_another_driver_took_over_do_not_count(proxy: Proxy, uri: str) -> None:
    first = make_run(uri).start()
    plan(first, 2)
    first.commit([batch([record(0, host_id="old")])])
    objects = open_objects(uri)
    raw = json.loads(objects.get("epochs/1.json") or b"")
    objects.put("epochs/1.json", json.dumps({**raw, "released": True}).encode())
    forget()
    second = open_run(uri).start()
    late = pa.BufferOutputStream()
    rows = batch([record(1, host_id="late")])
    with pa.ipc.new_stream(late, rows.schema) as stream:
        stream.write_batch(rows)
    objects.put("log/1-1.arrows", late.getvalue().to_pybytes())
    second.commit([batch([record(1, host_id="new")])])
    second.close("interrupted")
    forget()
    table = open_run(uri).rollouts(["host_id"])
    assert sorted(table.column("host_id").to_pylist()) == ["new", "old"]


@pytest.mark.parametrize(
    ("counts", "fences", "limits"),
    [
        ({}, {}, {}),
        ({1: 3, 2: 1}, {}, {1: 3, 2: 1}),
        ({1: 3, 2: 1}, {2: {1: 2}}, {1: 2, 2: 1}),
        ({1: 3, 2: 1, 3: 5}, {2: {1: 2}, 3: {1: 2}}, {1: 2, 2: 0, 3: 5}),
        ({1: 3, 3: 5}, {3: {1: 3, 2: 0}}, {1: 3, 2: 0, 3: 5}),
    ],
)
def test_the_first_fence_after_an_epoch_speaks_for_it(
    counts: dict[int, int], fences: dict[int, dict[int, int]], limits: dict[int, int]
) -> None:
    assert fenced(counts, fences) == limits


@pytest.mark.parametrize("fault", ["busy", "cut", "lost_answer", "mute"], indirect=True)
def test_a_commit_over_a_bad_line_is_whole_and_no_row_is_doubled(fault: str, proxy: Proxy, uri: str) -> None:
    writer = make_run(uri, patience_s=60.0).start()
    plan(writer, 2)
    proxy.fault = lambda ask: fault if ask.method == "PUT" and ask.number == 0 and "/log/" in f"/{ask.key}" else None
    writer.commit([batch([record(0), record(1)])])
    writer.commit([batch([record(2)])])
    writer.close("interrupted")
    proxy.fault = lambda ask: None
    forget()
    assert keys_of(uri) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["refuse", "mute"], indirect=True)
def test_a_commit_that_cannot_be_made_is_an_error_with_the_object_and_loses_nothing_before(
    fault: str, proxy: Proxy, uri: str
) -> None:
    writer = make_run(uri, patience_s=1.0).start()
    plan(writer, 2)
    writer.commit([batch([record(0)])])
    proxy.fault = on("PUT", "log", fault, 100)
    with pytest.raises(
        RunError, match=rf"cannot write {uri}/log/1-1.arrows: .*(403|does not answer)[\s\S]*rollout resume"
    ):
        writer.commit([batch([record(1)])])
    proxy.fault = lambda ask: None
    writer.close("failed")
    forget()
    assert keys_of(uri) in ([0], [0, 1]), "what was stored without an answer may count; it was not acknowledged"
    again = open_run(uri).start()
    again.commit([batch([record(1)])])
    again.compact()
    assert len(again.run.rollouts()) == 2
    again.close("finished")


def test_a_missing_segment_and_a_damaged_fence_are_told(proxy: Proxy, uri: str, objects: S3Objects) -> None:
    writer = make_run(uri).start()
    plan(writer, 2)
    for key in range(3):
        writer.commit([batch([record(key)])])
    writer.close("interrupted")
    open_run(uri).start().close("interrupted")
    kept = objects.get("log/1-1.arrows") or b""
    objects.delete(["log/1-1.arrows"])
    forget()
    with pytest.raises(RunError, match=rf"{uri}/log/1-1.arrows: is missing"):
        open_run(uri)
    objects.put("log/1-1.arrows", kept)
    objects.put("epochs/2.fence", b"{")
    with pytest.raises(RunError, match=rf"{uri}/epochs/2.fence: is damaged"):
        open_run(uri)


def test_a_driver_whose_clock_is_hours_off_is_judged_by_the_store_s(proxy: Proxy, uri: str, objects: S3Objects) -> None:
    run = make_run(uri)
    writer = run.start()
    raw = json.loads(objects.get("epochs/1.json") or b"")
    hours_ago = {**raw, "heartbeat": raw["heartbeat"] - 7200, "machine": "another", "host": "far"}
    objects.put("epochs/1.json", json.dumps(hours_ago).encode())
    driver = live_driver(run.layout.epochs)
    assert driver is not None
    assert driver.host == "far"
    writer.epoch.release()


def test_a_mirror_is_removed_with_its_process_and_one_of_the_killed_by_the_next(
    proxy: Proxy, uri: str, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys\nfrom rollout_engine.store.mirrors import attach\n"
        "print(attach(sys.argv[1]).root, flush=True)\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    def mirror(end: str) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", code, uri, end],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
        return Path(done.stdout.strip())

    assert not mirror("end").exists()
    killed = mirror("kill")
    assert killed.exists()
    assert not mirror("end").exists()
    assert not killed.exists()
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_new_is_fetched(proxy: Proxy, uri: str) -> None:
    writer = make_run(uri).start()
    plan(writer, 2)
    writer.commit([batch([record(0)])])
    mirror = mirror_of(writer.run.path)
    assert mirror is not None
    mirror.driving = False
    mirrors._mirrors.pop(mirror.root)
    assert keys_of(uri) == [0]
    proxy.asked.clear()
    mirrors._mirrors[mirror.root] = mirror
    mirror.driving = True
    writer.commit([batch([record(1)])])
    mirrors._mirrors.pop(mirror.root)
    assert keys_of(uri) == [0, 1]
    got = [ask.key for ask in proxy.asked if ask.method == "GET" and re.search(r"log/.*arrows", ask.key)]
    assert [key.rpartition("/")[2] for key in got] == ["1-1.arrows"]
    mirrors._mirrors[mirror.root] = mirror
