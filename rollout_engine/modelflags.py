"""The `-m` flags: `NAME=KIND:REST` names a model, `NAME.FIELD=VALUE` sets one of its fields."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout_engine.config import KEY_VARIABLES, ModelSpec
from rollout_engine.errors import InputError
from rollout_engine.plugins import did_you_mean

KINDS = (*KEY_VARIABLES, "replay", "scripted")
EXAMPLE = "for instance -m strong=openai:gpt-x@https://host/v1 or -m weak=scripted:skill=0.4"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OWN = re.compile(r"[\w.]+:[\w.]+")
_URL = re.compile(r"@https?://", re.IGNORECASE)
_NEXT_URL = re.compile(r",(?=https?://)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)([eE][+-]?\d+)?")
_FIELDS = frozenset(ModelSpec.model_fields) - {"name"}
_OPEN_FIELDS = re.compile(r"(.+?)\.(options|extra_body|adaptive)\.(.+)")
_OF_A_KIND = frozenset({"kind", "model", "base_url", "base_urls", "api_key_env", "file", "options", "seed_header"})


@dataclass(frozen=True, slots=True)
class ModelFlag:
    """One `-m` flag, taken apart. `path` is empty where it names a model, else the field that it sets."""

    text: str
    name: str
    path: tuple[str, ...]
    value: str

    @property
    def where(self) -> str:
        return f"-m {self.text}"


def parse_flag(text: str) -> ModelFlag:
    """Takes a flag apart. Raises InputError."""
    left, equals, value = text.partition("=")
    if not equals:
        raise InputError("a model needs a name and a kind", f"-m {text}", EXAMPLE)
    name, path = _name_and_path(left)
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name of a model", f"-m {text}", f"letters, digits, . _ and -; {EXAMPLE}")
    return ModelFlag(text, name, path, value)


def parse_model(text: str, where: str) -> dict[str, Any]:
    """The fields of `KIND:REST`: openai:MODEL@URL, replay:FILE, scripted:OPTION=VALUE,..., or module:attribute.

    responses, anthropic and gemini are written as openai is.
    """
    kind, _, rest = text.partition(":")
    if kind in KEY_VARIABLES:
        return {"kind": kind, **_remote(kind, rest, where)}
    if kind == "replay":
        if not rest:
            raise InputError("the file of answers is missing", where, "for instance -m NAME=replay:answers.jsonl")
        return {"kind": kind, "file": rest}
    if kind == "scripted":
        return {"kind": kind, "options": _scripted(rest, where)}
    if _OWN.fullmatch(text) and _importable(kind):
        return {"kind": text}
    raise unknown_kind(text if ":" not in text else kind, where)


def unknown_kind(kind: str, where: str) -> InputError:
    near = did_you_mean(kind.partition(":")[0], KINDS)
    return InputError(
        f"unknown kind of model {kind!r}", where, f"{near}known: {', '.join(KINDS)}, or module:attribute of your own"
    )


def apply_flags(models: dict[str, dict[str, Any]], flags: Sequence[ModelFlag]) -> None:
    """Names and extends models in place; new ones come after those of the file. Raises InputError.

    A model of the file that a flag names anew keeps its sampling, limits and prices, and where the kind is the
    same also what the flag leaves open.
    """
    named: set[str] = set()
    for flag in flags:
        if not flag.path:
            if flag.name in named:
                raise InputError(f"the model {flag.name!r} is given twice", flag.where, "give each model its own name")
            named.add(flag.name)
            try:
                fields = parse_model(flag.value, flag.where)
            except InputError as error:
                raise _maybe_a_field(flag, models, error) from error
            models[flag.name] = _extended(models.get(flag.name, {}), fields)
    for flag in flags:
        if flag.path:
            if flag.name not in models:
                near = did_you_mean(flag.name, models)
                known = ", ".join(models) or "none"
                raise InputError(f"there is no model {flag.name!r}", flag.where, f"{near}models: {known}")
            _set_field(models[flag.name], flag)


def scalar(text: str) -> int | float | bool | str:
    """A value as its author meant it: a number, true or false, or text."""
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text == "true" if text in ("true", "false") else text


def _name_and_path(left: str) -> tuple[str, tuple[str, ...]]:
    if found := _OPEN_FIELDS.fullmatch(left):
        return found[1], (found[2], found[3])
    name, dot, field = left.rpartition(".")
    return (name, (field,)) if dot and field in _FIELDS else (left, ())


def _remote(kind: str, rest: str, where: str) -> dict[str, Any]:
    # Model names hold colons, slashes and at-signs; only the last one before a scheme starts the URL.
    starts = [found.start() for found in _URL.finditer(rest)]
    name, url = (rest[: starts[-1]], rest[starts[-1] + 1 :]) if starts else (rest, "")
    if not name:
        raise InputError("the model's name at its server is missing", where, f"write {kind}:MODEL@URL")
    urls = _NEXT_URL.split(url)
    if len(urls) > 1:
        return {"model": name, "base_urls": tuple(urls)}
    return {"model": name, "base_url": url} if url else {"model": name}


def _scripted(rest: str, where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name:
            raise InputError(f"{part!r} is no OPTION=VALUE", where, "for instance scripted:skill=0.7,latency_ms=50")
        if name in options:
            raise InputError(f"the option {name!r} is given twice", where, "give it once")
        options[name] = scalar(value)
    return options


def _importable(module: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _extended(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    if old.get("kind") != new["kind"]:
        return {**{name: value for name, value in old.items() if name not in _OF_A_KIND}, **new}
    if "options" in new and isinstance(old.get("options"), dict):
        new = {**new, "options": {**old["options"], **new["options"]}}
    # One way to say where a server is replaces the other.
    gone = {"base_url": "base_urls", "base_urls": "base_url"}
    return {**{name: value for name, value in old.items() if gone.get(name) not in new}, **new}


def _maybe_a_field(flag: ModelFlag, models: dict[str, dict[str, Any]], error: InputError) -> InputError:
    """`-m weak.temprature=1` reads like a model of that name; what was meant is a field of `weak`."""
    name, dot, field = flag.name.rpartition(".")
    if not dot or (name not in models and not did_you_mean(field, _FIELDS)):
        return error
    near = did_you_mean(field, _FIELDS) or f"fields: {', '.join(sorted(_FIELDS))}"
    return InputError(f"a model has no field {field!r}", flag.where, near.strip())


def _set_field(fields: dict[str, Any], flag: ModelFlag) -> None:
    if len(flag.path) == 2:
        inner = fields.get(flag.path[0])
        fields[flag.path[0]] = {**(inner if isinstance(inner, dict) else {}), flag.path[1]: scalar(flag.value)}
        return
    field, value = flag.path[0], flag.value
    if field == "base_urls" and value[:1] != "[":
        fields[field] = tuple(_NEXT_URL.split(value))
    elif field in ("options", "extra_body", "stop", "adaptive", "base_urls") and value[:1] in ("[", "{"):
        try:
            fields[field] = json.loads(value)
        except ValueError as error:
            raise InputError(
                f"this is no JSON: {error}", flag.where, f"or set -m {flag.name}.{field}.KEY=..."
            ) from error
    else:
        fields[field] = (value,) if field == "stop" else value
