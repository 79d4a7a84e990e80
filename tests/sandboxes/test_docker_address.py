"""Which addresses of a Docker daemon are served, and what is said of the others. Needs no daemon."""

from __future__ import annotations

import re

import pytest

from rollout_engine.errors import InputError
from rollout_engine.sandboxes.docker import DockerProvider
from rollout_engine.sandboxes.docker.engine import address_of
from rollout_engine.sandboxes.docker.hijack import Address


@pytest.mark.parametrize(
    ("host", "tls", "found"),
    [
        ("ssh://somewhere", "", "DOCKER_HOST: scheme of 'ssh://somewhere' is not supported"),
        ("https://somewhere:2376", "", "DOCKER_HOST: scheme of 'https://somewhere:2376'"),
        ("nonsense", "", "DOCKER_HOST: 'nonsense' is no address"),
        ("tcp://somewhere:port", "", "DOCKER_HOST: 'tcp://somewhere:port' is no address"),
        ("tcp://somewhere:2376", "1", "DOCKER_TLS_VERIFY: TLS to 'tcp://somewhere:2376' is not supported"),
    ],
)
def test_an_address_that_is_not_served_is_refused_with_what_to_do(
    host: str, tls: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", tls)
    with pytest.raises(InputError, match=re.escape(found)) as caught:
        DockerProvider()
    assert "ssh -L" in str(caught.value)


def test_addresses_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert address_of("unix:///run/docker.sock") == Address(path="/run/docker.sock")
    monkeypatch.delenv("DOCKER_TLS_VERIFY")
    assert address_of("tcp://somewhere:2375") == Address(host="somewhere", port=2375)
    assert address_of("tcp://[::1]:2375") == Address(host="::1", port=2375)
