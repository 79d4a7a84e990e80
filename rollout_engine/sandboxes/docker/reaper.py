"""Removes containers, networks, volumes and made images by their labels."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxAway
from rollout_engine.sandboxes.docker import owner
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import explanation
from rollout_engine.sandboxes.docker.images import remove_image

log = logging.getLogger(__name__)

_REMOVAL_S = 30.0
_PAUSE_S = 0.5
_FILTER = {"label": owner.OWNER}


class Reaped(NamedTuple):
    """What was removed, by kind."""

    containers: int = 0
    networks: int = 0
    volumes: int = 0
    images: int = 0


async def reap(engine: Engine, chosen: Callable[[Mapping[str, str]], bool], patience_s: float = 0.0) -> Reaped:
    """Removes what carries an owner's label and is `chosen` by its labels.

    What the daemon refuses to remove (it was killed while it did, or is at it) holds up nothing else; it is tried again
    for `patience_s`, and then named in the log. A daemon that does not answer is waited for as long.
    """
    clock, total = asyncio.get_running_loop().time, Reaped()
    ends = clock() + patience_s
    while True:
        try:
            reaped, refused = await engine.ask("reap", lambda api: _reap(api, chosen))
        except SandboxAway:
            if clock() >= ends:
                raise
        else:
            total = Reaped(*map(sum, zip(total, reaped, strict=True)))
            if not refused or clock() >= ends:
                break
        await asyncio.sleep(_PAUSE_S)
    if refused:
        log.warning("docker: not removed: %s", "; ".join(refused))
    return total


def remove(api: APIClient, name: str) -> None:
    """A sandbox's container, then its network, if it has one of its own."""
    remove_container(api, name)
    remove_network(api, name)


def remove_container(api: APIClient, name: str) -> None:
    """Kills and removes at once, with the volumes that are its own; one that somebody removes already is waited for."""
    try:
        api.remove_container(name, v=True, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409 or not _await_removal(api, name):
            raise


def remove_network(api: APIClient, name: str) -> None:
    try:
        api.remove_network(name)
    except NotFound:
        return


def remove_volume(api: APIClient, name: str) -> None:
    """One that a container under removal still holds answers 409; it goes with that container or the next time."""
    try:
        api.remove_volume(name, force=True)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _reap(api: APIClient, chosen: Callable[[Mapping[str, str]], bool]) -> tuple[Reaped, list[str]]:
    """What was removed, and what the daemon says of the rest."""
    refused: list[str] = []

    def each(remove_one: Callable[[APIClient, str], None], found: Iterable[str]) -> int:
        removed = 0
        for name in found:
            try:
                remove_one(api, name)
                removed += 1
            except APIError as error:
                refused.append(f"{name}: {explanation(error)}")
        return removed

    # One after the other: a network or an image is free only when its containers are gone.
    containers = [found["Id"] for found in api.containers(all=True, filters=_FILTER) if chosen(found["Labels"])]
    removed = each(remove_container, containers)
    networks = each(remove_network, [one["Id"] for one in api.networks(filters=_FILTER) if chosen(one["Labels"])])
    volumes = [one["Name"] for one in api.volumes(filters=_FILTER)["Volumes"] or [] if chosen(one["Labels"])]
    gone = each(remove_volume, volumes)
    made = [one["Id"] for one in api.images(filters={"label": owner.MADE}) if chosen(one["Labels"] or {})]
    return Reaped(removed, networks, gone, each(remove_image, made)), refused


def _await_removal(api: APIClient, name: str) -> bool:
    """Whether it is gone in time."""
    deadline = time.monotonic() + _REMOVAL_S
    while time.monotonic() < deadline:
        try:
            api.inspect_container(name)
        except NotFound:
            return True
        time.sleep(0.05)
    return False
