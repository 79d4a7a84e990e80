"""A Ray of this machine for the tests of one folder, with token authentication said explicitly."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.auth import reread_ray_config
from tests.ray.rays import SHORT, SharedRay

AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@contextlib.contextmanager
def running_ray() -> Iterator[SharedRay]:
    """This process is connected to it, and driver processes may join it by its address.

    A fixture over it is written in each folder's conftest: one that is imported from another folder would live until
    the whole session's end, and no other Ray could start in this process.
    """
    # Not in HOME: the token is this cluster's alone.
    folder = Path(tempfile.mkdtemp(prefix="ray-test-", dir=SHORT))
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    before = {name: os.environ.pop(name, None) for name in AUTH}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    try:
        yield from _running(folder, token)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _running(folder: Path, token: Path) -> Iterator[SharedRay]:
    try:
        import ray

        reread_ray_config()  # another test of this process may have imported Ray before the token was there
        context = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    except Exception as error:
        if os.environ.get("ROLLOUT_REQUIRE") == "1":
            raise
        pytest.skip(f"Ray does not start on this machine: {error}")
    try:
        yield SharedRay(context.address_info["gcs_address"], Path(context.address_info["session_dir"]), token)
    finally:
        ray.shutdown()
