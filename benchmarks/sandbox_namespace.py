"""What a namespace sandbox costs: CPU of a life, lives a second, one more command, memory of many live ones.

    python -m benchmarks.sandbox_namespace [--boxes 1000] [--rounds 5] [--user] [--docker IMAGE]

CPU is everything that the work caused, this process and the kernel's work for the boxes included, by a control
group of its own (cpuacct, or cpu.stat); where there is none, by /proc/stat, which also counts strangers. What is
printed is the best round: a shared machine only ever adds. Left out: image roots, setup commands, the network.
The event loop is the engine's own. Two yardsticks for a machine that others use too are taken in turns with the lives:
a Python that does nothing, and with `--docker` (a daemon of its own helps) lives of the docker sandbox, as many in
flight.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.control_group import Meter, metered
from rollout_engine.loopthread import new_event_loop
from rollout_engine.sandboxes.base import SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox

LIVES, EXECS, CREATED, DOCKER_LIVES = 100, 300, 50, 12
IN_FLIGHT = (1, 8, 16)
DOCKER_IN_FLIGHT = 8
ORDINARY_USER = 61_234


async def best(meter: Meter, rounds: int, count: int, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """CPU and wall milliseconds of one `work`, each the best of the rounds."""
    cpu, wall = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), meter.read()
        for _ in range(count):
            await work()
        wall.append((time.perf_counter() - started) * 1000 / count)
        cpu.append((meter.read() - used) / count)
    return min(cpu), min(wall)


def available_mb() -> float:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("MemAvailable"))


async def life(provider: SandboxProvider) -> None:
    box = await provider.open(SandboxSpec())
    assert (await box.exec(["true"])).ok
    await box.close()


async def lives(provider: SandboxProvider, count: int, in_flight: int) -> float:
    """Lives a second."""

    async def several() -> None:
        for _ in range(max(1, count // in_flight)):
            await life(provider)

    started = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(in_flight)))
    return max(1, count // in_flight) * in_flight / (time.perf_counter() - started)


async def bare_python() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "pass", env={})
    assert await child.wait() == 0


async def measure(meter: Meter, provider: NamespaceProvider, rounds: int, boxes: int) -> None:
    box = await provider.open(SandboxSpec())
    print(f"mode {(await provider.facts())['mode']}; limits {box.limits_enforced}")

    async def one_more() -> None:
        assert (await box.exec(["true"])).ok

    found = {in_flight: (float("inf"), 0.0) for in_flight in IN_FLIGHT}
    python = (float("inf"), float("inf"))
    for _ in range(rounds):
        for in_flight, (cpu, rate) in found.items():
            used = meter.read()
            rate = max(rate, await lives(provider, LIVES, in_flight))
            found[in_flight] = min(cpu, (meter.read() - used) / (LIVES // in_flight * in_flight)), rate
        once = await best(meter, 1, LIVES // 5, bare_python)
        python = min(python[0], once[0]), min(python[1], once[1])
    _say("a Python that does nothing", *python, "")
    for in_flight, (cpu, rate) in found.items():
        what, note = (
            f"create, exec true, destroy, x{in_flight}",
            f"{cpu / python[0]:.2f} times that Python; at most 8 ms",
        )
        print(f"{what:32} {cpu:8.2f} ms cpu {rate:8.1f} a second  {note}, at least 150", flush=True)
    _say("one more exec", *await best(meter, rounds, EXECS, one_more), "at most 1.5")
    await box.close()
    if boxes:
        await many(meter, provider, rounds, boxes)


async def beside_docker(provider: NamespaceProvider, rounds: int, image: str) -> None:
    """Both in turns, as many lives in flight."""
    from rollout_engine.sandboxes.docker import DockerProvider

    docker = DockerProvider(image=image)
    try:
        await life(docker)
        ours = theirs = 0.0
        for _ in range(rounds):
            theirs = max(theirs, await lives(docker, DOCKER_LIVES, DOCKER_IN_FLIGHT))
            ours = max(ours, await lives(provider, LIVES, DOCKER_IN_FLIGHT))
    finally:
        await docker.close()
    note = f"{theirs:.2f} a second of the docker sandbox: {ours / theirs:.1f} times; at least 20"
    print(f"{f'lives, {DOCKER_IN_FLIGHT} in flight':32} {ours:8.1f} a second beside {note}")


async def many(meter: Meter, provider: NamespaceProvider, rounds: int, boxes: int) -> None:
    """The cost of one more box at none, and at many that live."""
    live: list[NamespaceSandbox] = []
    extra: list[NamespaceSandbox] = []

    async def create() -> None:
        extra.append(await provider.open(SandboxSpec()))

    async def creating() -> tuple[float, float]:
        found = []
        for _ in range(rounds):
            found.append(await best(meter, 1, CREATED, create))
            await asyncio.gather(*(box.close() for box in extra))
            extra.clear()
            await asyncio.sleep(0.2)
        return min(cpu for cpu, _ in found), min(wall for _, wall in found)

    first = await creating()
    _say("create at 0 live", *first, "")
    before = available_mb()
    for start in range(0, boxes, 20):
        live += await asyncio.gather(*(provider.open(SandboxSpec()) for _ in range(start, min(boxes, start + 20))))
    await asyncio.sleep(1)
    each = (before - available_mb()) / boxes
    last = await creating()
    _say(f"create at {boxes} live", *last, f"{last[0] / first[0]:.2f} times that at 0; at most 1.5")
    print(f"{'memory of a live box':32} {each:8.2f} MB       at most 2.5")
    started = time.perf_counter()
    await asyncio.gather(*(box.close() for box in live))
    print(f"{f'closing {boxes}':32} {time.perf_counter() - started:8.2f} s")


def _say(what: str, cpu: float, wall: float, note: str) -> None:
    print(f"{what:32} {cpu:8.2f} ms cpu {wall:8.2f} ms wall   {note}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--user", action="store_true", help="as an ordinary user (where this is root)")
    parser.add_argument("--docker", metavar="IMAGE", help="also lives of the docker sandbox, of this image")
    args = parser.parse_args()
    with metered() as meter:
        load = os.getloadavg()[0]
        print(
            f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}"
        )
        print(f"cpu by {'a control group' if meter.by != '/proc/stat' else '/proc/stat'}, best of {args.rounds} rounds")
        provider = NamespaceProvider(run_as=ORDINARY_USER if args.user else None)
        try:
            await measure(meter, provider, args.rounds, args.boxes)
            if args.docker:
                await beside_docker(provider, args.rounds, args.docker)
        finally:
            await provider.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
