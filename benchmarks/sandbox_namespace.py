"""What a namespace sandbox costs: CPU of a life, of one more command, and memory of many live ones.

    python benchmarks/sandbox_namespace.py [--boxes 1000] [--rounds 5] [--user]

CPU is everything that the work caused, this process and the kernel's work for the boxes included, by a control
group of its own (cpuacct, or cpu.stat); where there is none, by /proc/stat, which also counts strangers. What is
printed is the best round: a shared machine only ever adds. Left out: image roots, setup commands, the network.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterator

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox

LIVES, EXECS, CREATED = 100, 300, 50
ORDINARY_USER = 61_234


class Meter:
    """Milliseconds of CPU so far."""

    def __init__(self) -> None:
        self.by, self._path = "/proc/stat", ""
        for root in (
            "/sys/fs/cgroup/cpuacct",
            "/sys/fs/cgroup/cpu,cpuacct",
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup",
        ):
            name = "cpuacct.usage" if "cpuacct" in root else "cpu.stat"
            path = f"{root}/rollout-bench-{os.getpid()}"
            with contextlib.suppress(OSError):
                os.mkdir(path)
                self._path = path
                if os.path.exists(f"{path}/{name}"):
                    _write(f"{path}/cgroup.procs", str(os.getpid()))
                    self.by = f"{path}/{name}"
                    return
                os.rmdir(path)

    def read(self) -> float:
        with open(self.by) as file:
            text = file.read()
        if self.by.endswith("cpuacct.usage"):
            return int(text) / 1e6
        if self.by.endswith("cpu.stat"):
            return int(text.split()[1]) / 1e3
        fields = [int(word) for word in text.splitlines()[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) * 1000 / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if self.by != "/proc/stat":
            _write(f"{os.path.dirname(self._path)}/cgroup.procs", str(os.getpid()))
            for _ in range(50):
                with contextlib.suppress(OSError):
                    os.rmdir(self._path)
                    return
                time.sleep(0.1)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()
    try:
        yield meter
    finally:
        meter.close()


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


async def measure(meter: Meter, provider: NamespaceProvider, rounds: int, boxes: int) -> None:
    async def life() -> None:
        box = await provider.open(SandboxSpec())
        assert (await box.exec(["true"])).ok
        await box.close()

    box = await provider.open(SandboxSpec())
    print(f"mode {(await provider.facts())['mode']}; limits {box.limits_enforced}")

    async def one_more() -> None:
        assert (await box.exec(["true"])).ok

    _say("create, exec true, destroy", *await best(meter, rounds, LIVES, life), "at most 8")
    _say("one more exec", *await best(meter, rounds, EXECS, one_more), "at most 1.5")
    await box.close()
    await many(meter, provider, rounds, boxes)


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
        finally:
            await provider.close()


if __name__ == "__main__":
    asyncio.run(main())
