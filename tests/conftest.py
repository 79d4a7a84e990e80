"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing of the claim.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is for what a script puts in the background; the programs under test would inherit it, and hear no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = (
    "agents_cli/test_cancelled.py",
    "agents_cli/test_kills.py",
    "agents_real/",
    "sandboxes/",
    "verifiers/test_agent_programs.py",
    "verifiers/test_agents.py",
    "verifiers/test_hostile",
    "ray/test_driver_loss.py",
    "ray/test_host_loss.py",
    "ray/test_nodes.py",
    "ray/test_job.py",
    "store/test_poison.py",
    "store/test_s3",
    "cli/test_detach.py",
    "ray/test_connect.py",
    "ray/test_agents.py",
    "ray/test_driver_actor.py",
    "ray/test_exits.py",
    "ray/test_leases.py",
    "ray/test_seen.py",
    "ray/test_waiting.py",
    "ray/test_judges.py",
    "verifiers/test_cores.py",
    "cli/test_interrupt.py",
    "cli/test_status.py",
    "verifiers/test_math.py",
    "agents_cli/test_command.py",
    "test_loop.py",
    "test_metrics.py",
    "test_sandbox_tasks.py",
    "test_theory.py",
    "test_watch.py",
    "store/test_kill.py",
    "nodes/",
    "chaos/",
)
"""Attacks, kills, leftovers, limits that are waited for, whole clusters: for `make test-all` and CI alone."""

QUICK = {
    "test_output_and_success",
    "test_a_non_zero_exit_is_a_result",
    "test_a_signal_is_a_negative_code",
    "test_arguments_arrive_as_they_are",
    "test_stdin_arrives_whole_and_ends",
    "test_a_timeout_raises_with_the_output_so_far",
    "test_the_sandbox_lives_on_after_a_timeout",
    "test_the_hosts_secrets_are_not_there",
    "test_the_specs_environment_and_the_calls_own",
    "test_what_is_written_is_read",
    "test_a_link_inside_the_sandbox_is_read_through",
    "test_upload_a_directory_adds_to_one_that_is_there",
    "test_download_follows_no_link_and_opens_no_pipe",
    "test_stop_kills_the_group",
    "test_all_but_the_named_jobs_end",
    "test_it_happens_once_for_all_who_ask",
    "test_only_what_was_named_comes",
    "test_close_is_idempotent_and_final",
    "test_an_echo_answers_while_it_runs",
    "test_a_server_in_the_sandbox_is_listed_called_and_ended",
    "test_a_bundle_adds_to_what_is_there",
}
"""Of the contract, what `make test` tries on docker, where every test costs a container, and as an ordinary user, where
nearly all is as for root: something of each part."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small tmpfs")
    target = tmp_path / "small"
    target.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(target)], check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        name = str(item.path.relative_to(here))
        again = item.get_closest_marker("docker") or "namespace-user" in item.name
        costly = name.startswith("contracts/") and again and not _is_quick(item)
        if name.startswith(SLOW) or costly:
            item.add_marker("slow")


def _is_quick(item: pytest.Item) -> bool:
    return getattr(item, "originalname", item.name) in QUICK
