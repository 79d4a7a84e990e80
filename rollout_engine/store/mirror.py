"""A run on an object store, as a folder of this machine in which all that reads and writes runs works as on a disk.

The objects are the truth. `pull` brings plan, log, epochs and run.json into the folder; `publish` sends a file of it.
A driver writes a file and has it published before it goes on, so nothing rests on the folder: whoever resumes the run
makes a new one. Segments of the log and parts of the plan are objects that never change.

Of each earlier epoch only those segments count that were there when the next epoch began (its `fence`): a driver looks
for a newer epoch after every put and before it acknowledges, so what it acknowledged is inside the fence, and a put
that arrives late, from a driver that has been superseded, is outside.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_engine.disk import ELSEWHERE, is_full, node
from rollout_engine.errors import InputError, RunError, describe
from rollout_engine.heldfolder import HeldFolder
from rollout_engine.store.layout import Layout
from rollout_engine.store.objects import OPEN_PATIENCE_S, ObjectError, Objects, Stamp

FETCHERS = 16
"""Objects that are fetched at once."""
_PREFIX = "rollout-mirror-"
_SEGMENT = re.compile(r"log/(\d+)-(\d+)\.arrows")
_PART = re.compile(r"plan/(\d+)-(\d+)\.jsonl")
_FENCE = re.compile(r"epochs/(\d+)\.fence")
_PLAIN = re.compile(r"run\.json|source\.json|groups\.parquet|rewards\.parquet|status\.json|epochs/\d+\.(?:json|fence)")
_TABLE = re.compile(r"(?:rollouts|turns)/part-\d+\.parquet|compacted\.json")


class Mirror:
    """The folder of one URI. Lives until `remove`, or until its process ends: the next mirror removes what is left."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.uri = objects.uri
        self._folder = HeldFolder(_PREFIX)
        self.root = self._folder.path / "run"
        self.root.mkdir()
        self.driving = False
        """This process writes the run: the folder is ahead of the objects, and nothing is pulled."""
        self._seen: dict[str, Stamp] = {}
        self._parts: dict[int, list[Stamp]] = {}

    def remove(self) -> None:
        """Removes the folder. Safe to call twice."""
        self._folder.remove()

    # -- from the store -----------------------------------------------------------------------------------------

    def pull(self, log: bool = True) -> None:
        """Brings the folder up to date. Raises InputError where the store refuses, RunError where objects are missing.

        Only what is new or has changed is fetched; without `log`, neither plan nor log.
        """
        if self.driving:
            return
        try:
            self._pull(log)
        except OSError as error:
            if is_full(error):
                raise InputError(
                    f"there is no room for its working copy on {node()}: {describe(error)}",
                    where=str(self._folder.path),
                    fix=ELSEWHERE,
                ) from error
            raise InputError(f"cannot be read: {describe(error)}", where=self.uri) from error

    def _pull(self, log: bool) -> None:
        layout = Layout(self.root)
        for folder in (layout.epochs, layout.plan, layout.log, layout.traces):
            folder.mkdir(exist_ok=True)
        found = self.objects.list()
        wanted = {key: stamp for key, stamp in found.items() if _PLAIN.fullmatch(key)}
        self._fetch(wanted)
        if not log:
            return
        counts = fenced(numbered(found, _SEGMENT), self._fences(wanted))
        wanted |= _counting(self.uri, "log/{}-{}.arrows", counts, found)
        self._fetch(wanted)
        self._pull_plan(numbered(found, _PART), found)
        for key in self._seen.keys() - wanted.keys():
            del self._seen[key]
            (self.root / key).unlink(missing_ok=True)

    def _fences(self, found: Iterable[str]) -> dict[int, dict[int, int]]:
        fences = ((named, key) for key in found if (named := _FENCE.fullmatch(key)) is not None)
        return {int(named[1]): self._read_fence(key) for named, key in fences}

    def _read_fence(self, key: str) -> dict[int, int]:
        try:
            raw = json.loads((self.root / key).read_bytes())
            return {int(epoch): int(count) for epoch, count in raw.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise RunError(f"{self.uri}/{key}: is damaged: {describe(error)}; restore it from a copy") from error

    def _fetch(self, wanted: Mapping[str, Stamp]) -> None:
        changed = [key for key, stamp in wanted.items() if self._seen.get(key) != stamp]
        with ThreadPoolExecutor(FETCHERS, "fetch") as pool:
            for key, data in zip(changed, pool.map(self.objects.get, changed), strict=True):
                if data is not None:
                    self._place(key, data)
                    self._seen[key] = wanted[key]

    def _place(self, key: str, data: bytes) -> None:
        path = self.root / key
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)

    def _pull_plan(self, numbers: Mapping[int, int], found: Mapping[str, Stamp]) -> None:
        """Each epoch's parts, put together as the one file that they are on a disk."""
        for epoch, stamps in self._counting_parts(numbers, found).items():
            known = self._parts.get(epoch, [])
            if stamps == known:
                continue
            fresh = known != stamps[: len(known)]
            keys = [f"plan/{epoch}-{number}.jsonl" for number in range(0 if fresh else len(known), len(stamps))]
            with ThreadPoolExecutor(FETCHERS, "fetch") as pool:
                data = b"".join(part or b"" for part in pool.map(self.objects.get, keys))
            path = Layout(self.root).plan_file(epoch)
            before = b"" if fresh or not path.exists() else path.read_bytes()
            self._place(f"plan/{epoch}.jsonl", before + data)
            self._parts[epoch] = stamps

    def _counting_parts(self, numbers: Mapping[int, int], found: Mapping[str, Stamp]) -> dict[int, list[Stamp]]:
        chosen = _counting(self.uri, "plan/{}-{}.jsonl", numbers, found)
        return {epoch: [chosen[f"plan/{epoch}-{n}.jsonl"] for n in range(count)] for epoch, count in numbers.items()}

    # -- to the store -------------------------------------------------------------------------------------------

    def start_driving(self, epoch: int, patience_s: float) -> None:
        """From here on the folder is written by this process. Fences off the epochs before. Raises InputError."""
        self.pull()
        try:
            if epoch > 1:
                counts = fenced(numbered(self.objects.list("log/"), _SEGMENT), self._fences(self._seen))
                self.objects.put(f"epochs/{epoch}.fence", json.dumps(counts).encode())
                self.pull()
        except OSError as error:
            raise InputError(f"cannot be written: {describe(error)}", where=self.uri) from error
        self.driving = True
        self.objects.patience_s = patience_s

    def stop_driving(self, epoch: int) -> None:
        """The folder belongs to readers again."""
        self.driving = False
        self.objects.patience_s = OPEN_PATIENCE_S
        plan = Layout(self.root).plan_file(epoch)
        if plan.exists() and plan.stat().st_size != sum(part.size for part in self._parts.get(epoch, ())):
            self._parts.pop(epoch, None)  # a part of it may have arrived or not: it is read again

    def publish(self, path: Path) -> None:
        """Sends a file of the folder. Returns once the store has it. Raises OSError."""
        key = self.key_of(path)
        self._seen[key] = self._put(key, path.read_bytes())

    def publish_plan(self, epoch: int, data: bytes) -> None:
        """Sends what was appended to an epoch's plan. Raises OSError."""
        parts = self._parts.setdefault(epoch, [])
        parts.append(self._put(f"plan/{epoch}-{len(parts)}.jsonl", data))

    def _put(self, key: str, data: bytes) -> Stamp:
        try:
            return self.objects.put(key, data)
        except ObjectError:
            # It was waited for in vain: what is left to do at the end of the run waits less.
            self.objects.patience_s = min(self.objects.patience_s, OPEN_PATIENCE_S)
            raise

    def publish_tables(self) -> None:
        """Replaces the Parquet tables of the store by those of the folder. Raises OSError.

        The manifest goes first and comes last: where it is, the tables beside it are one whole set.
        """
        there = {key for key in self.objects.list() if _TABLE.fullmatch(key)}
        self.objects.delete([key for key in there if key == "compacted.json"])
        new = [path for name in ("rollouts", "turns") for path in sorted((self.root / name).glob("part-*.parquet"))]
        for path in new:
            self.publish(path)
        self.objects.delete(there - {self.key_of(path) for path in new} - {"compacted.json"})
        self.publish(Layout(self.root).compacted)

    def key_of(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def numbered(keys: Iterable[str], pattern: re.Pattern[str]) -> dict[int, int]:
    """Epoch -> one more than the highest number of its objects, in order."""
    counts: dict[int, int] = {}
    for key in keys:
        if (found := pattern.fullmatch(key)) is not None:
            epoch, number = int(found[1]), int(found[2])
            counts[epoch] = max(counts.get(epoch, 0), number + 1)
    return dict(sorted(counts.items()))


def fenced(counts: Mapping[int, int], fences: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """How many segments of each epoch count: the first fence after an epoch speaks for it, and may know of none."""
    known = sorted(fences)
    limits = {}
    for epoch in sorted({*counts, *(epoch for fence in fences.values() for epoch in fence)}):
        by = bisect_right(known, epoch)
        limits[epoch] = fences[known[by]].get(epoch, 0) if by < len(known) else counts.get(epoch, 0)
    return limits


def _counting(uri: str, form: str, counts: Mapping[int, int], found: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """These objects of each epoch. Raises RunError where one of them is missing."""
    chosen = {}
    for epoch, count in counts.items():
        for number in range(count):
            key = form.format(epoch, number)
            if key not in found:
                raise RunError(f"{uri}/{key}: is missing, though the run had it; restore it from a copy")
            chosen[key] = found[key]
    return chosen
