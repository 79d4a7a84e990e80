"""The config of a run from a TOML file and flags; a flag wins over the file, and errors name the place of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.modelflags import apply_flags, parse_flag, parse_model, unknown_kind
from rollout_engine.problems import Problem, all_of, dotted, problems_of
from rollout_engine.toml import KeyPath, read_toml


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `rollout run` is told: the config, and where tasks come from and rows go to (None: not said)."""

    config: RunConfig
    tasks: str | None = None
    run_dir: str | None = None


@dataclass(slots=True)
class _Layers:
    """The raw fields, and where each was given: by a line of the file, or by a flag."""

    path: Path | None
    fields: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    flags: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: tuple[str, ...]) -> str:
        """The place of a field, or of the nearest table around it that is written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.flags:
                return self.flags[path[:length]] + (f": field '{dotted(path)}'" if length < len(path) else "")
            if path[:length] in self.lines:
                return f"{self.path}:{self.lines[path[:length]]}: field '{dotted(path)}'"
        return f"field '{dotted(path)}'" if path else str(self.path or "the run's config")


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, model_flags: Sequence[str] = ()
) -> RunConfig:
    """The config of a run: see `load_run`, whose `tasks` and `run_dir` it drops."""
    return load_run(path, overrides, model_flags).config


def load_run(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, model_flags: Sequence[str] = ()
) -> RunOptions:
    """Reads a TOML file (None: no file), then flags over it.

    `overrides` maps dotted fields (`limits.agent_s`) to values; None means that the flag was not given.
    `model_flags` are the values of `-m`. The file's fields are those of RunConfig, and `tasks` and `run_dir`.
    Models are ordered as in the file, then as the flags name new ones. Raises InputError that lists all problems.
    """
    layers = _Layers(None if path is None else Path(path))
    if layers.path is not None:
        layers.fields, layers.lines = read_toml(layers.path)
    models = _models(layers)
    flags = [parse_flag(text) for text in model_flags]
    apply_flags(models, flags)
    for flag in flags:
        layers.flags["models", flag.name, *flag.path] = flag.where
    for name, value in (overrides or {}).items():
        if value is not None:
            _override(layers, tuple(name.split(".")), value)
    tasks, run_dir = (_text(layers, name) for name in ("tasks", "run_dir"))
    fields = {name: value for name, value in layers.fields.items() if name not in ("tasks", "run_dir")}
    return RunOptions(_validated(layers, fields, models), tasks, run_dir)


def _models(layers: _Layers) -> dict[str, dict[str, Any]]:
    """The [models.NAME] tables of the file, in their order; a string in place of a table is read like a flag."""
    written = layers.fields.pop("models", {})
    if not isinstance(written, dict):
        raise InputError("models must be tables", layers.where(("models",)), "write one [models.NAME] for each")
    models: dict[str, dict[str, Any]] = {}
    for name, fields in written.items():
        where = layers.where(("models", name))
        if isinstance(fields, str):
            models[name] = parse_model(fields, where)
        elif not isinstance(fields, dict):
            raise InputError("a model must be a table", where, f"write [models.{dotted([name])}]")
        elif "name" in fields:
            raise InputError("unknown field", layers.where(("models", name, "name")), "the table's name is the model's")
        else:
            models[name] = dict(fields)
    return models


def _override(layers: _Layers, path: tuple[str, ...], value: Any) -> None:
    layers.flags[path] = f"option '{dotted(path)}'"
    table = layers.fields
    for part in path[:-1]:
        inner = table.get(part)
        table[part] = dict(inner) if isinstance(inner, dict) else {}
        table = table[part]
    table[path[-1]] = value


def _text(layers: _Layers, name: str) -> str | None:
    value = layers.fields.get(name)
    if value is not None and not isinstance(value, str | Path):
        raise InputError(f"must be text, found {value!r}", layers.where((name,)), "give a path")
    return None if value is None else str(value)


def _validated(layers: _Layers, fields: dict[str, Any], models: dict[str, dict[str, Any]]) -> RunConfig:
    data = {**fields, "models": [{"name": name, **model} for name, model in models.items()]}
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        found = problems_of(error, RunConfig, data)
        raise all_of([_input_error(layers, problem, list(models), data) for problem in found]) from error


def _input_error(layers: _Layers, problem: Problem, names: list[str], data: dict[str, Any]) -> InputError:
    path = tuple(str(part) for part in problem.path)
    if path[:1] != ("models",) or len(path) < 2:
        return InputError(problem.message, layers.where(path), problem.fix)
    index = int(path[1])
    path = ("models", names[index], *path[2:])
    if path[2:] == ("kind",) and "kind" in data["models"][index]:
        return unknown_kind(str(data["models"][index]["kind"]), layers.where(path))
    if path[2:] == ("name",):
        return InputError(
            f"{names[index]!r} is no name of a model", layers.where(path[:2]), "letters, digits, . _ and -"
        )
    return InputError(problem.message, layers.where(path), problem.fix)
