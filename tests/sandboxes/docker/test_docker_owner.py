"""Owners by label: python -m pytest tests/sandboxes/docker/test_docker_owner.py (needs no daemon)."""

from __future__ import annotations

import subprocess

from rollout_engine.sandboxes.docker.capture import Tail
from rollout_engine.sandboxes.docker.owner import OWNER, Owner, is_orphan, labels


def test_this_process_lives() -> None:
    me = Owner.me()
    assert Owner.parse(str(me)) == me
    assert not me.is_dead(local_daemon=True)
    assert not is_orphan(labels(me, "run", "host", 1), local_daemon=True)


def test_a_process_that_ended_is_dead_even_where_its_pid_is_taken_again() -> None:
    process = subprocess.Popen(["sleep", "60"])
    gone = Owner.me()._replace(pid=process.pid)
    process.kill()
    process.wait()
    assert gone.is_dead(local_daemon=True)
    assert Owner.me()._replace(started=1).is_dead(local_daemon=True)


def test_what_cannot_be_known_counts_as_alive() -> None:
    other_boot = Owner.me()._replace(boot="another")
    assert other_boot.is_dead(local_daemon=True)
    assert not other_boot.is_dead(local_daemon=False)
    assert not Owner.me()._replace(pid_namespace="1", pid=2**22).is_dead(local_daemon=True)


def test_labels_of_others_are_no_orphans() -> None:
    for text in ("", "x", "a:b:c:d", "a:b:1", "1:2:3:4:5"):
        assert not is_orphan({OWNER: text}, local_daemon=True)


def test_a_tail_keeps_the_end_and_says_that_it_cut() -> None:
    tail = Tail(10)
    tail.append(b"0123456789")
    assert (tail.value(), tail.truncated) == (b"0123456789", False)
    for number in range(50):
        tail.append(b"%d," % number)
    assert tail.value() == b"46,47,48,49,"[-10:]
    assert tail.truncated
