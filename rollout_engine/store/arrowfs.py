"""Runs on any other file system that pyarrow knows by URI (gs://, abfs://, hdfs://): to be read, not to be driven."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.fs

from rollout_engine.errors import InputError, describe
from rollout_engine.store.objects import OPEN_PATIENCE_S, ObjectError, Stamp

T = TypeVar("T")

ANSWER_S = 30.0
"""Whatever is asked of the store is answered within this time; of a file, each piece."""
PIECE_BYTES = 8 * 2**20
FIX = "use s3:// (a store's S3 interface by AWS_ENDPOINT_URL) or a mounted file system; here a run can be read"


class ArrowObjects:
    """The files below one directory. pyarrow offers no exclusive creation, so no driver may rely on it."""

    def __init__(self, uri: str, files: Any = None, root: str = "") -> None:
        """`files`: a pyarrow file system instead of the URI's own. Raises InputError where there is none."""
        self.uri = uri
        self.patience_s = OPEN_PATIENCE_S
        self._files: Any
        self._root: str
        try:
            self._files, self._root = (files, root) if files is not None else self._of_uri()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(
                f"is no place for a run: {describe(error)}", where=uri, fix="a path, or s3://bucket/prefix"
            ) from error

    def _of_uri(self) -> tuple[Any, str]:
        found: tuple[Any, str] = _bounded(lambda: pa.fs.FileSystem.from_uri(self.uri))
        return found

    def list(self, prefix: str = "") -> dict[str, Stamp]:
        below = pa.fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        try:
            found = _bounded(lambda: self._files.get_file_info(below))
        except (OSError, pa.ArrowException) as error:
            raise self._error("", error) from error
        stamps = {
            one.path[len(self._root) + 1 :]: Stamp(one.size or 0, str(one.mtime_ns)) for one in found if one.is_file
        }
        return {key: stamp for key, stamp in stamps.items() if key.startswith(prefix)}

    def get(self, key: str) -> bytes | None:
        try:
            with _bounded(lambda: self._files.open_input_stream(f"{self._root}/{key}")) as file:
                pieces = iter(lambda: _bounded(lambda: bytes(file.read(PIECE_BYTES))), b"")
                return b"".join(pieces)
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            raise self._error(key, error) from error

    def exists(self, key: str) -> bool:
        return bool(self._info(key).is_file)

    def age_s(self, key: str) -> float:
        info = self._info(key)
        if not info.is_file:
            raise FileNotFoundError(f"{self.uri}/{key}")
        age: float = (datetime.now(UTC) - info.mtime).total_seconds()
        return max(age, 0.0)

    def put(self, key: str, data: bytes) -> Stamp:
        self._refuse()

    def create(self, key: str, data: bytes) -> None:
        self._refuse()

    def delete(self, keys: Iterable[str]) -> None:
        self._refuse()

    def check_drivable(self) -> None:
        self._refuse()

    def check_exclusive(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            "a run cannot be driven here: the store's client has no exclusive creation, on which one driver per run "
            "rests",
            where=self.uri,
            fix=FIX,
        )

    def _info(self, key: str) -> Any:
        try:
            return _bounded(lambda: self._files.get_file_info(f"{self._root}/{key}"))
        except (OSError, pa.ArrowException) as error:
            raise self._error(key, error) from error

    def _error(self, key: str, error: BaseException) -> ObjectError:
        return ObjectError(f"{self.uri}/{key}: {describe(error)}")


def _bounded(work: Callable[[], T]) -> T:
    """What `work` returns, in a thread: where a client waits for ever, neither its caller nor a signal does.

    Raises TimeoutError, an OSError.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="object store", daemon=True).start()
    try:
        return answer.result(ANSWER_S)
    except TimeoutError as error:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {ANSWER_S:g} s; check the network and the credentials") from error
