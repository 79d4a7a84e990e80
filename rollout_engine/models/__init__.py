"""Model clients: messages in, one completion out, by kind of model. Importing this loads no HTTP client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from rollout_engine.config import KEY_VARIABLES, ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models.base import ModelClient
from rollout_engine.models.wire import sampling_of

if TYPE_CHECKING:
    from rollout_engine.models.local import LocalModel

__all__ = ["KINDS", "ModelClient", "check_model", "make_client", "make_local_model", "sampling_of"]

KINDS = (*KEY_VARIABLES, "replay", "scripted")

# Fields that belong to one kind: a base_url on a scripted model is a mistake that would otherwise go unseen.
_FIELDS = {"openai": {"base_url", "base_urls", "url_max_concurrency"}, "replay": {"file"}, "scripted": {"options"}}


def make_client(spec: ModelSpec, *, api_key: str | None = None) -> ModelClient:
    """The client of a model; the caller closes it. Raises InputError as `check_model` does."""
    if spec.kind in KEY_VARIABLES:
        _check_remote(spec)
        from rollout_engine.models.dialects import DIALECTS
        from rollout_engine.models.remote import RemoteClient

        return RemoteClient(spec, api_key, DIALECTS[spec.kind])
    if ":" in spec.kind:
        return cast(ModelClient, _own_factory(spec)(spec, api_key))
    from rollout_engine.models.local import LocalClient

    return LocalClient(spec, make_local_model(spec))


def make_local_model(spec: ModelSpec) -> LocalModel:
    """A scripted or replay model itself, for its client and for our server. Raises InputError."""
    if spec.kind == "scripted":
        from rollout_engine.models.scripted import ScriptedModel, scripted_options

        return ScriptedModel(scripted_options(spec))
    if spec.kind == "replay":
        from rollout_engine.models.recording import load_answers, recorded_name
        from rollout_engine.models.replay import ReplayModel

        return ReplayModel(load_answers(spec), recorded_name(spec))
    raise _unknown_kind(spec)


def check_model(spec: ModelSpec) -> None:
    """Everything about a model that can be wrong before it is called. Raises InputError: field, finding, fix."""
    if spec.kind in KEY_VARIABLES:
        _check_remote(spec)
    elif ":" in spec.kind:
        _own_factory(spec)
        return
    else:
        make_local_model(spec)
    own = "openai" if spec.kind in KEY_VARIABLES else spec.kind
    for kind, fields in _FIELDS.items():
        for field in fields if kind != own else ():
            if getattr(spec, field):
                raise InputError(
                    f"{field} means nothing to a model of kind {spec.kind}",
                    where=f"models.{spec.name}.{field}",
                    fix=f"remove it, or make it a model of kind {kind}",
                )


def _check_remote(spec: ModelSpec) -> None:
    example = f"-m {spec.name}={spec.kind}:MODEL@https://HOST/v1{'beta' if spec.kind == 'gemini' else ''}"
    if not spec.model:
        raise InputError("the model's name at its server is missing", f"models.{spec.name}.model", example)
    where = f"models.{spec.name}.base_urls" if spec.base_urls else f"models.{spec.name}.base_url"
    if spec.base_url and spec.base_urls:
        raise InputError("base_url and base_urls are both set", where, "name all servers in base_urls")
    if not spec.urls:
        raise InputError("the server's URL is missing", where, example)
    if len(set(spec.base_urls)) < len(spec.base_urls):
        raise InputError("the same URL is named twice", where, "name each server once")
    for url in spec.urls:
        finding = _url_fault(url)
        if finding:
            raise InputError(finding, where, example)


def _url_fault(url: str) -> str | None:
    """What is wrong with a base URL. Says nothing of its text where that may hold a password."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError as error:
        return f"not a URL: {error}"
    if parts.username is not None or parts.password is not None:
        return "the URL holds a user or password; a key goes into the variable named by api_key_env"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits or not url.isascii():
        return f"{url!r} is not an http or https URL"
    path = parts.path.rstrip("/")
    for call in ("/chat/completions", "/completions", "/responses", "/messages"):
        if path.endswith(call):
            return f"{url!r} names the call; the URL ends before {'/chat/completions' if 'comp' in call else call}"
    return None


def _own_factory(spec: ModelSpec) -> Any:
    module_name, _, attribute = spec.kind.partition(":")
    where = f"models.{spec.name}.kind"
    fix = "name a callable (spec, api_key) -> ModelClient as module:attribute, importable on every host"
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise InputError(f"cannot load {spec.kind}: {error}", where, fix) from error
    if not callable(found):
        raise InputError(f"{spec.kind} is a {type(found).__name__}, not a callable", where, fix)
    return found


def _unknown_kind(spec: ModelSpec) -> InputError:
    kinds = ", ".join(KINDS)
    return InputError(
        f"there is no kind of model {spec.kind!r}",
        where=f"models.{spec.name}.kind",
        fix=f"kinds: {kinds}, or module:attribute of your own",
    )
