"""run.json: what a run is, with what it was made, and which changes of its config would mix results."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, describe
from rollout_engine.schema import SCHEMA_VERSION
from rollout_engine.specs import Spec
from rollout_engine.store.files import read_record, write_atomic
from rollout_engine.store.mirrors import named

RunStatus: TypeAlias = Literal["running", "finished", "interrupted", "failed"]

_FREE = frozenset(
    {
        "ray",
        "hosts_per_node",
        "host",
        "store",
        "logs",
        "metrics",
        "retry",
        "rewards",
        "max_cost_usd",
        "max_tokens",
        "no_progress_s",
        "cluster_s",
        "plan_ahead",
    }
)
"""Fields of the config that change how a run is carried out, not what its rollouts are."""

_FREE_OF_MODEL = frozenset(
    {
        "api_key_env",
        "base_url",  # a server that was started again has another address
        "price_prompt",
        "price_completion",
        "base_urls",
        "url_max_concurrency",
        "max_concurrency",
        "adaptive",
        "requests_per_minute",
        "tokens_per_minute",
        "call_timeout_s",
        "connect_timeout_s",
        "call_retries",
        "max_response_bytes",
    }
)
_PACKAGES = ("rollout-engine", "pyarrow", "numpy", "pydantic", "ray", "httpx")


class RunInfo(Spec):
    """The content of run.json."""

    schema_version: str = SCHEMA_VERSION
    run_id: str
    status: RunStatus
    created_at: datetime
    config: RunConfig
    config_digest: str
    versions: dict[str, str]
    provenance: dict[str, Any]

    def write(self, path: Path) -> None:
        """Raises OSError."""
        write_atomic(path, self.encoded())

    def encoded(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def read_info(path: Path) -> RunInfo:
    """Raises InputError where the file is missing, damaged, edited, or of another version."""
    try:
        raw = read_record(path)
    except OSError as error:
        raise InputError(
            f"is no run directory: run.json cannot be read ({describe(error)})",
            where=named(path.parent),
            fix="name the directory that `rollout run -o` made",
        ) from error
    try:
        info, digest = _parse(raw, path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"is damaged: {_first(error)}",
            where=named(path),
            fix="restore it from a copy, or start a new run directory",
        ) from error
    if digest != info.config_digest:
        raise InputError(
            "its config was edited: it does not match config_digest",
            where=named(path),
            fix="undo the edit; what may change on resume is given to `rollout resume`",
        )
    return info


def _parse(raw: bytes, path: Path) -> tuple[RunInfo, str]:
    """The content, and the digest of its config as it stands there."""
    found = json.loads(raw)
    if found["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"has schema version {found['schema_version']!r}, this is {SCHEMA_VERSION!r}",
            where=named(path),
            fix="use the version of rollout-engine that made it (see `versions` in the file)",
        )
    return RunInfo.model_validate_json(raw), digest_of(found["config"])


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return describe(error)


def config_digest(config: RunConfig) -> str:
    """The digest of everything in a config that would mix results if it changed."""
    return digest_of(json.loads(config.model_dump_json()))


def digest_of(config: Mapping[str, Any]) -> str:
    """`config_digest` of a config as it stands in the file, whatever version wrote it."""
    text = json.dumps(_mixing(config), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mixing(config: Mapping[str, Any]) -> dict[str, Any]:
    models = [_mixing_of(model) for model in config["models"]]
    judges = {name: _mixing_of(judge) for name, judge in config.get("judges", {}).items()}
    kept = {name: value for name, value in config.items() if name not in _FREE}
    return {**kept, "models": models, "judges": judges}


def _mixing_of(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in _FREE_OF_MODEL}


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """`dotted.path: old -> new` for each change that would mix results."""
    both = set(old.model_names) & set(new.model_names)
    before, after = (dict(_flat(_comparable(config, both))) for config in (old, new))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path}: {_shown(before, path)} -> {_shown(after, path)}"
        for path in paths
        if before.get(path, ...) != after.get(path, ...)
    ]


def _comparable(config: RunConfig, models: set[str]) -> dict[str, Any]:
    """What would mix results, with the fields of these models under their names; the rest of them only by name."""
    mixing = _mixing(json.loads(config.model_dump_json()))
    named = {model["name"]: model for model in mixing["models"] if model["name"] in models}
    return {"model_names": list(config.model_names), **mixing, "models": named}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _shown(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path]) if path in values else "(absent)"


def versions() -> dict[str, str]:
    """The versions that took part, without importing anything."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where there is no git or no repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
