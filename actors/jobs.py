"""Hands a command to the job server of a Ray cluster, which runs it on the cluster whatever becomes of us."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from actors.auth import prepare_auth
from rollout_engine.errors import InputError, describe

SUBMIT_S = 60.0
"""A server that has not taken the job by then is unreachable, or too slow to be of use."""

Found: TypeAlias = "queue.SimpleQueue[str | BaseException]"


def submit_job(address: str, entrypoint: str, folder: str) -> str:
    """Returns the job's id. `folder` becomes its working directory. Raises InputError."""
    found: Found = queue.SimpleQueue()
    with _meant(address):
        # A daemon: the client has no limits of its own, and must not hold our exit up.
        threading.Thread(target=_submit, args=(address, entrypoint, folder, found), daemon=True).start()
        try:
            answer = found.get(timeout=SUBMIT_S)
        except queue.Empty:
            answer = TimeoutError(f"no answer in {SUBMIT_S:g} s")
    if isinstance(answer, str):
        return answer
    raise InputError(
        f"the job server at {address} does not take the job: {_first_line(answer)}",
        where="ray",
        fix="check the address (the dashboard's, port 8265 by default), and RAY_AUTH_MODE and RAY_AUTH_TOKEN",
    ) from None


@contextmanager
def _meant(address: str) -> Iterator[None]:
    """Ray's variables say the address that is meant, for they would win over it; and our token is used."""
    kept = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    os.environ["RAY_ADDRESS"] = address
    restore = prepare_auth(address)
    try:
        yield
    finally:
        restore()
        del os.environ["RAY_ADDRESS"]
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def _submit(address: str, entrypoint: str, folder: str, found: Found) -> None:
    try:
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray").setLevel(logging.ERROR)  # how it packs the folder is not for our users
        client = JobSubmissionClient(address)
        found.put(client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": folder}))
    except BaseException as error:
        found.put(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in describe(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
