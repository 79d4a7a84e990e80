"""Model clients: messages in, one completion out, by kind of model. Importing this loads no HTTP client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from rollout_engine.config import ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.models.base import ModelClient
from rollout_engine.models.wire import sampling_of

if TYPE_CHECKING:
    from rollout_engine.models.local import LocalModel

__all__ = ["KINDS", "ModelClient", "check_model", "make_client", "make_local_model", "sampling_of"]

KINDS = ("openai", "replay", "scripted")

# Fields that belong to one kind: a base_url on a scripted model is a mistake that would otherwise go unseen.
_FIELDS = {"openai": {"base_url"}, "replay": {"file"}, "scripted": {"options"}}


def make_client(spec: ModelSpec, *, api_key: str | None = None) -> ModelClient:
    """The client of a model; the caller closes it. Raises InputError as `check_model` does."""
    if spec.kind == "openai":
        _check_openai(spec)
        from rollout_engine.models.openai import OpenAIClient

        return OpenAIClient(spec, api_key)
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
    if spec.kind == "openai":
        _check_openai(spec)
    elif ":" in spec.kind:
        _own_factory(spec)
        return
    else:
        make_local_model(spec)
    for kind, fields in _FIELDS.items():
        for field in fields if kind != spec.kind else ():
            if getattr(spec, field):
                raise InputError(
                    f"{field} means nothing to a model of kind {spec.kind}",
                    where=f"models.{spec.name}.{field}",
                    fix=f"remove it, or make it a model of kind {kind}",
                )


def _check_openai(spec: ModelSpec) -> None:
    example = f"-m {spec.name}=openai:MODEL@https://HOST/v1"
    if not spec.model:
        raise InputError("the model's name at its server is missing", f"models.{spec.name}.model", example)
    if not spec.base_url:
        raise InputError("the server's URL is missing", f"models.{spec.name}.base_url", example)
    finding = _url_fault(spec.base_url)
    if finding:
        raise InputError(finding, f"models.{spec.name}.base_url", example)


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
    if parts.path.rstrip("/").endswith("/completions"):
        return f"{url!r} names the call; the URL ends before /chat/completions"
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
