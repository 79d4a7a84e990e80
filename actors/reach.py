"""Whether Ray is to be found at an address, asked before Ray is: it would try for up to a minute, and hang."""

from __future__ import annotations

import queue
import socket
import threading

from ray.exceptions import AuthenticationError

from rollout_engine.errors import InputError, describe

CONNECT_S = 10.0
"""An address that does not take a connection within this is unreachable; so is one that then says nothing."""


def check_reachable(address: str) -> None:
    """Raises InputError where nothing listens at HOST:PORT."""
    if address.startswith("ray://"):
        raise InputError(
            f"Ray Client addresses ({address}) are not supported",
            where="ray",
            fix="run on a node of the cluster, or with `ray job submit`",
        )
    if address.startswith(("http://", "https://")):
        raise InputError(
            f"{address} is a job server",
            where="ray",
            fix="hand it the run with --detach (and -o s3://BUCKET/PREFIX), or give the address of the head's GCS",
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise InputError(
            f"no Ray at {address}: {describe(error)}",
            where="ray",
            fix="check --ray and RAY_ADDRESS, or use --ray local",
        ) from error


def check_welcome(address: str) -> None:
    """Raises InputError where it is no Ray that listens, or one that does not take our token. Needs `prepare_auth`."""
    found: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    # A daemon: it may be stuck for a minute in C++, which nothing can cut short, and must not hold our exit up.
    threading.Thread(target=_ask, args=(address, found), name="ask for Ray", daemon=True).start()
    try:
        error = found.get(timeout=CONNECT_S)
    except queue.Empty:
        raise InputError(
            f"what listens at {address} does not answer as Ray does within {CONNECT_S:g} s",
            where="ray",
            fix="give the address of the head's GCS (`ray status` shows it; its port is 6379 by default)",
        ) from None
    if isinstance(error, AuthenticationError):
        raise InputError(
            f"the Ray at {address} wants a token, and ours is missing or wrong",
            where="ray",
            fix="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token "
            "(~/.ray/auth_token on its head)",
        ) from None


def _ask(address: str, found: queue.SimpleQueue[BaseException | None]) -> None:
    """Any other finding than these two is left to ray.init, which says it better."""
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        GcsClient(address=address)
    except BaseException as error:
        found.put(error)
    else:
        found.put(None)
