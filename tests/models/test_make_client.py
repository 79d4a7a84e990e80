"""The door: which client a spec gets, and what a bad spec is told.

.venv/bin/pytest tests/models/test_make_client.py
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models import check_model, make_client
from rollout_engine.models.local import LocalClient
from rollout_engine.models.remote import RemoteClient

made_with: list[Any] = []


def own_client(spec: ModelSpec, api_key: str | None) -> Any:
    made_with.append((spec, api_key))
    return "a client of one's own"


def test_importing_the_package_loads_no_http_client() -> None:
    code = "import rollout_engine.models, sys; print({'httpx', 'aiohttp', 'pyarrow'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "set()"


def test_each_kind_has_its_client() -> None:
    assert isinstance(make_client(ModelSpec(name="m", kind="scripted")), LocalClient)
    openai = ModelSpec(name="m", kind="openai", model="gpt", base_url="https://host/v1")
    assert isinstance(make_client(openai, api_key="k"), RemoteClient)


def test_a_kind_of_ones_own_is_called_with_spec_and_key() -> None:
    spec = ModelSpec(name="m", kind=f"{__name__}:own_client")
    check_model(spec)
    made: Any = make_client(spec, api_key="k")
    assert made == "a client of one's own"
    assert made_with == [(spec, "k")]


@pytest.mark.parametrize(
    ("fields", "field", "finding"),
    [
        ({"kind": "openai"}, "model", "missing"),
        ({"kind": "openai", "model": "x"}, "base_url", "missing"),
        ({"kind": "openai", "model": "x", "base_url": "host/v1"}, "base_url", "not an http or https URL"),
        ({"kind": "openai", "model": "x", "base_url": "ftp://host/v1"}, "base_url", "not an http or https URL"),
        ({"kind": "openai", "model": "x", "base_url": "http:///v1"}, "base_url", "not an http or https URL"),
        ({"kind": "openai", "model": "x", "base_url": "http://host:99999/"}, "base_url", "not a URL"),
        ({"kind": "openai", "model": "x", "base_url": "http://[::1/v1"}, "base_url", "not a URL"),
        ({"kind": "openai", "model": "x", "base_url": "http://u:sesame@host/v1"}, "base_url", "user or password"),
        ({"kind": "openai", "model": "x", "base_url": "http://h/v1/chat/completions"}, "base_url", "ends before"),
        ({"kind": "openai", "model": "x", "base_url": "http://h/v1", "file": "f"}, "file", "means nothing"),
        ({"kind": "openai", "model": "x", "base_url": "http://h/v1", "options": {"a": 1}}, "options", "means nothing"),
        ({"kind": "scripted", "base_url": "http://h/v1"}, "base_url", "means nothing"),
        ({"kind": "replay"}, "file", "needs a file"),
        ({"kind": "no_such_module:make"}, "kind", "No module named"),
        ({"kind": "json:no_such_attribute"}, "kind", "no_such_attribute"),
        ({"kind": "json:__doc__"}, "kind", "not a callable"),
    ],
)
def test_a_bad_spec_is_told_where_what_and_how(fields: dict[str, Any], field: str, finding: str) -> None:
    spec = ModelSpec(name="m", **fields)
    with pytest.raises(InputError, match=finding) as caught:
        check_model(spec)
    assert caught.value.where == f"models.m.{field}"
    assert caught.value.fix
    assert "sesame" not in str(caught.value)
    if finding != "means nothing":
        with pytest.raises(InputError, match=finding):
            make_client(spec)


def test_an_unknown_kind_lists_the_kinds() -> None:
    spec = ModelSpec.model_construct(name="m", kind="gpt")
    for call in (check_model, make_client):
        known = "openai, responses, anthropic, gemini, replay, scripted, or module:attribute"
        with pytest.raises(InputError, match=known) as caught:
            call(spec)
        assert caught.value.where == "models.m.kind"


@pytest.mark.parametrize("url", ["http://localhost:8000/v1", "https://host/v1/", "http://[::1]:8000/v1?api-version=1"])
def test_good_urls_pass(url: str) -> None:
    check_model(ModelSpec(name="m", kind="openai", model="org/model:tag@x", base_url=url))
