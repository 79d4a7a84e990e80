"""The contract of an object store, as far as a run needs one: whole objects by key, and one that is made only once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from rollout_engine.errors import InputError

T = TypeVar("T")

REMOTE = "://"
OPEN_PATIENCE_S = 15.0
"""How long a reader, or a driver that is just starting, tries again what may pass."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class ObjectError(OSError):
    """The store refused, or did not answer within the patience. Says which object, what, and what to do."""


class PassingError(Exception):
    """The store may answer another try: it timed out, cut the connection, or said that it is busy."""


class Stamp(NamedTuple):
    """By what a changed object is noticed."""

    size: int
    version: str


class Objects(Protocol):
    """The objects under one prefix. Keys are relative to it. Safe from several threads.

    All but `create` may be repeated without harm. Raises ObjectError, in bounded time.
    """

    uri: str
    """Without a slash at its end; never with credentials."""
    patience_s: float
    """How long an operation is tried again before it is an error. One more try may then still be under way."""

    def list(self, prefix: str = "") -> dict[str, Stamp]:
        """The keys that begin so. What `put` or `create` returned for before is in it."""
        ...

    def get(self, key: str) -> bytes | None:
        """None where there is none."""
        ...

    def put(self, key: str, data: bytes) -> Stamp:
        """Returns once the object is durable, whole, and seen by every reader."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """As `put`, but of several makers one succeeds. Raises FileExistsError for the others."""
        ...

    def exists(self, key: str) -> bool: ...

    def age_s(self, key: str) -> float:
        """Seconds since the object was written, by the store's own clock. Raises FileNotFoundError."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Keys that are not there are passed over."""
        ...

    def check_drivable(self) -> None:
        """Raises InputError where no run can be driven, whatever the store says: it is not asked."""
        ...

    def check_exclusive(self) -> None:
        """Raises InputError where `create` would let two makers succeed."""
        ...


def is_remote(path: object) -> bool:
    """Whether it is a URI and not a path."""
    return isinstance(path, str) and REMOTE in path


def open_objects(uri: str) -> Objects:
    """The store of a URI. Nothing is asked of it yet. Raises InputError where it cannot be one."""
    parts = urlsplit(uri)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InputError(
            "a run's URI is scheme://bucket/prefix and nothing else",
            where=f"{parts.scheme}://{parts.hostname or ''}{parts.path}",
            fix="credentials and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_ENDPOINT_URL, or the machine's role",
        )
    prefix = parts.path.removeprefix("/").removesuffix("/")
    if not parts.netloc or not prefix or any(part in ("", ".", "..") for part in prefix.split("/")):
        raise InputError("a run needs a bucket and a prefix of its own", where=uri, fix="as in s3://bucket/runs/a")
    if parts.scheme == "s3":
        from rollout_engine.store.s3 import S3Objects

        return S3Objects(parts.netloc, prefix)
    from rollout_engine.store.arrowfs import ArrowObjects

    return ArrowObjects(f"{parts.scheme}://{parts.netloc}/{prefix}")


def patiently(
    work: Callable[[], T],
    what: str,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `work` returns, tried again for so long while it raises PassingError. Raises ObjectError with `what`."""
    ends, pause, tries = clock() + patience_s, FIRST_PAUSE_S, 0
    while True:
        tries += 1
        try:
            return work()
        except PassingError as error:
            pause_now = pause * random.uniform(0.5, 1.0)
            if clock() + pause_now >= ends:
                raise ObjectError(
                    f"{what}: {error} ({tries} tries in {patience_s:g} s); check the store and the network to it"
                ) from error
        sleep(pause_now)
        pause = min(pause * 2, LONGEST_PAUSE_S)
