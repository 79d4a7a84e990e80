"""Removes containers, networks, volumes and made images by their labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.sandboxes.docker import owner
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.images import remove_image

_REMOVAL_S = 30.0
_FILTER = {"label": owner.OWNER}


class Reaped(NamedTuple):
    """What was removed, by kind."""

    containers: int = 0
    networks: int = 0
    volumes: int = 0
    images: int = 0


async def reap(engine: Engine, chosen: Callable[[Mapping[str, str]], bool]) -> Reaped:
    """Removes what carries an owner's label and is `chosen` by its labels."""
    return await engine.ask("reap", lambda api: _reap(api, chosen))


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
        if error.status_code != 409:
            raise
        _await_removal(api, name)


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


def _reap(api: APIClient, chosen: Callable[[Mapping[str, str]], bool]) -> Reaped:
    containers = [found for found in api.containers(all=True, filters=_FILTER) if chosen(found["Labels"])]
    for found in containers:
        remove_container(api, found["Id"])
    networks = [found for found in api.networks(filters=_FILTER) if chosen(found["Labels"])]
    for found in networks:
        remove_network(api, found["Id"])
    volumes = [found for found in api.volumes(filters=_FILTER)["Volumes"] or [] if chosen(found["Labels"])]
    for found in volumes:
        remove_volume(api, found["Name"])
    images = [found for found in api.images(filters={"label": owner.MADE}) if chosen(found["Labels"] or {})]
    for found in images:
        remove_image(api, found["Id"])
    return Reaped(len(containers), len(networks), len(volumes), len(images))


def _await_removal(api: APIClient, name: str) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while time.monotonic() < deadline:
        try:
            api.inspect_container(name)
        except NotFound:
            return
        time.sleep(0.05)
