"""One sandbox and one `true` in it, n times: ours, the raw Docker Engine API, and plain fork and exec of `true`.

    python -m benchmarks.peers.box_alone --way namespace|docker|raw|fork [-n 60] [--in-flight 4]

CPU is that of everything, see everything.py. Docker's lives use the image `pybox` without a network. `raw` is the
least that a client can do (sandbox_docker.py); `fork` is `subprocess.run(["true"])` by this Python, with no sandbox.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.measure import emit, result, versions
from benchmarks.peers.everything import Everything, docker_host
from benchmarks.sandbox_docker import Raw
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
from rollout_engine.sandboxes.namespace import NamespaceProvider

IMAGE = "pybox"
WARM_UP = 2


async def ours(provider: DockerProvider | NamespaceProvider) -> None:
    """Raises AssertionError where the command fails."""
    box = await provider.open(SandboxSpec())
    try:
        assert (await box.exec(["true"])).ok
    finally:
        await box.close()


async def repeat(life: Callable[[], Awaitable[None]], n: int, in_flight: int) -> None:
    """n lives, at most `in_flight` at once."""
    left = iter(range(n))

    async def worker() -> None:
        for _ in left:
            await life()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(n, in_flight)):
            group.create_task(worker())


async def measure_ours(way: str, n: int, in_flight: int, meter: Everything) -> None:
    provider = DockerProvider(image=IMAGE) if way == "docker" else NamespaceProvider()
    try:
        await repeat(lambda: ours(provider), WARM_UP, in_flight)
        meter.start()
        await repeat(lambda: ours(provider), n, in_flight)
        meter.stop()
    finally:
        await provider.close()


def measure_threads(life: Callable[[], object], n: int, in_flight: int, meter: Everything) -> None:
    with ThreadPoolExecutor(in_flight) as pool:
        for count in (WARM_UP, n):
            meter.start()
            for done in [pool.submit(life) for _ in range(count)]:
                done.result()
            meter.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--way", choices=("namespace", "docker", "raw", "fork"), required=True)
    parser.add_argument("-n", type=int, default=60)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    lives = {
        "raw": Raw(docker_host().removeprefix("unix://"), IMAGE).life,
        "fork": lambda: subprocess.run(["true"], check=True),
    }
    with Everything(docker=args.way in ("docker", "raw")) as meter:
        if args.way in lives:
            measure_threads(lives[args.way], args.n, args.in_flight, meter)
        else:
            asyncio.run(measure_ours(args.way, args.n, args.in_flight, meter))
    parts = meter.parts_ms(args.n)
    known = {"rollout-engine": versions(["rollout-engine"])["rollout-engine"]}
    about = {"docker": known, "namespace": known, "raw": {"Engine API": "1.41"}, "fork": {"Linux": os.uname().release}}
    emit(result(args.way, args.n, args.in_flight, meter, parts_ms=parts, by=meter.by, versions=about[args.way]))


if __name__ == "__main__":
    main()
