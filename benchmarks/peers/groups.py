"""What `make bench-peers` measures: groups of cases that do the same work, with the settings of each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.tiny_agent import CALLS
from benchmarks.work import WARM_UP


class Case(NamedTuple):
    """One row of a group's table."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    """Name of a peer's environment (envs.py); None: our own."""
    settings: str = ""
    """How it is set, and what is left of a rollout."""
    against: str | None = None
    """The case of ours that it is compared with; None: the first of its group."""
    few: bool = False
    """So dear that it runs the group's smaller number, counted for each."""
    needs: tuple[str, ...] = ()
    """`docker`, `compose`, or `root`: a row without them says so."""
    warm_up: int = WARM_UP


class Group(NamedTuple):
    """Cases that do the same work."""

    key: str
    title: str
    unit: str
    counted: str
    cases: tuple[Case, ...]
    calls: int = 0
    """Of a rollout to the stub server: the cases are given its URL, and its count is checked. 0: they need none."""


ENGINE, MOCK = "benchmarks.engine_case", ("--mock", "--url", "none")
INSPECT, ALONE = "benchmarks.peers.inspect_single", "benchmarks.peers.box_alone"
ROLLOUT = "benchmarks.peers.box_rollout"
AGENTS, VERIFIERS04 = "benchmarks.agent_rollouts", "benchmarks.peers.verifiers04"
TREE = "the case's process and all of its children; of ours the driver and the hosts, not Ray's own processes"
ALL = (
    "everything by control groups: the case with all that it starts, and with docker also dockerd, containerd, the "
    "shims and the containers (of any daemon of the machine: nothing else may use Docker meanwhile)"
)

HTTP = Group(
    "http",
    "Single-turn rollouts over HTTP",
    "rollout",
    f"{TREE}; not the stub server (50 ms), imports, and a warm-up",
    (
        Case("rollout_engine, Ray", ENGINE, settings="one host; a row, synced"),
        Case("bare aiohttp", "benchmarks.peers.bare_aiohttp", settings="uvloop, one session; nothing kept"),
        Case("verifiers 0.1.14", "benchmarks.peers.verifiers_single", environment="verifiers",
             settings="in process, max_concurrent as asked; results in memory"),
        Case("Inspect, defaults", INSPECT, environment="inspect",
             settings="max_connections = max_samples as asked, no display; a log entry"),
        Case("Inspect, lean", INSPECT, ("--lean",), "inspect", "also log_realtime and log read-back off; a log entry"),
        Case("synth-ai", "benchmarks.peers.synth_single", environment="synth",
             settings="direct mode, concurrency as asked; the task app (not counted) answers and scores; in memory"),
        Case("verifiers 0.4, null", VERIFIERS04, ("--harness", "null"), "verifiers04", few=True, warm_up=1,
             settings="harness null in runtime subprocess: a program for each rollout; a JSON line", needs=("root",)),
    ),
    calls=1,
)  # fmt: skip
NO_HTTP = Group(
    "mock",
    "Rollouts of a mock model, no HTTP",
    "rollout",
    f"{TREE}; not imports and a warm-up",
    (
        Case("rollout_engine, Ray", ENGINE, MOCK, settings="scripted model in the host; a row, synced"),
        Case("Inspect, defaults", INSPECT, MOCK, "inspect", "mockllm, no display; a log entry"),
        Case("Inspect, lean", INSPECT, (*MOCK, "--lean"), "inspect", "also log_realtime and log read-back off"),
    ),
)
BOX = Group(
    "box",
    "A sandbox made, one `true` in it, destroyed",
    "sandbox",
    ALL,
    (
        Case("namespace sandbox", ALONE, ("--way", "namespace"), settings="limits on, no network", needs=("root",)),
        Case("plain fork and exec", ALONE, ("--way", "fork"), settings="subprocess.run, no sandbox at all"),
        Case("docker sandbox", ALONE, ("--way", "docker"), settings="image pybox, limits on, no network",
             needs=("docker",)),
        Case("raw Docker Engine API", ALONE, ("--way", "raw"), settings="the same container by hand, docker-init",
             against="docker sandbox", needs=("docker",)),
    ),
)  # fmt: skip
BOX_ROLLOUT = Group(
    "sandboxed",
    "Rollouts with one sandbox and one exec each",
    "rollout",
    ALL,
    (
        Case("rollout_engine, namespace", ROLLOUT, ("--sandbox", "namespace"),
             settings="tool_loop, scripted model, no Ray; a row, synced", needs=("root",)),
        Case("rollout_engine, docker", ROLLOUT, ("--sandbox", "docker"), settings="the same, image pybox",
             needs=("docker",)),
        Case("Inspect, docker", "benchmarks.peers.inspect_box", environment="inspect", few=True,
             settings="its compose form (init, no network, x-local), max_samples = max_sandboxes as asked; a log entry",
             against="rollout_engine, docker", needs=("docker", "compose")),
        Case("Harbor, oracle", "benchmarks.peers.harbor_box", environment="harbor", few=True,
             settings="docker_image, public network, n_concurrent_trials as asked; a folder for each trial; its "
             "verifier is a second exec", against="rollout_engine, docker", needs=("docker", "compose")),
    ),
)  # fmt: skip
AGENT = Group(
    "agent",
    "Rollouts of an agent program with two model calls",
    "rollout",
    f"{ALL}; not the stub server (50 ms), imports, and a warm-up",
    (
        Case("rollout_engine, namespace", AGENTS, warm_up=8, needs=("root",),
             settings="a shell script, no network, its file judged by code in a fresh box, no Ray; a row, synced"),
        Case("verifiers 0.4, same program", VERIFIERS04, ("--harness", "program"), "verifiers04", warm_up=1,
             settings="a harness of its documentation's form in runtime subprocess: no sandbox at all; its file read "
             "by a reward function; a JSON line", needs=("root",)),
        Case("verifiers 0.4, bash", VERIFIERS04, ("--harness", "bash"), "verifiers04", few=True, warm_up=1,
             settings="its default harness in runtime subprocess, no sandbox: the model calls the shell once; the same",
             needs=("root",)),
        Case("rollout_engine, docker", AGENTS, ("--sandbox", "docker"), few=True, warm_up=8,
             settings="as the first, image pybox, a fresh container for the verifier too", needs=("docker",)),
        Case("verifiers 0.4, same program, docker", VERIFIERS04, ("--harness", "program", "--runtime", "docker"),
             "verifiers04", "the same harness in runtime docker, image pybox, its bridge network; a JSON line",
             "rollout_engine, docker", few=True, warm_up=1, needs=("docker",)),
    ),
    calls=CALLS,
)  # fmt: skip
GROUPS = (HTTP, NO_HTTP, BOX, BOX_ROLLOUT, AGENT)
