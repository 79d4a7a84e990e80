"""Makes a run's directory, or its place on an object store, where there is nothing yet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, describe
from rollout_engine.store.files import TEMPORARY, write_exclusive
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import local_root, mirror_of, named
from rollout_engine.store.rundir import RunDir, make_rooms
from rollout_engine.store.runinfo import RunInfo, config_digest, git_state, versions


def create_run(
    path: str | os.PathLike[str],
    config: RunConfig,
    run_id: str | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> RunDir:
    """Makes a run directory. Raises InputError, with nothing written, where it cannot or must not be made."""
    layout = Layout(local_root(path))
    if not config.models:
        raise InputError("a run needs at least one model", where="models", fix="give one with -m NAME=KIND:REST")
    mirror = mirror_of(layout.root)
    if mirror is not None:
        mirror.objects.check_drivable()
    _refuse_taken(layout)
    info = _new_info(config, run_id, provenance or {})
    existed = layout.root.exists()
    try:
        if mirror is not None:
            mirror.objects.create(layout.run_json.name, info.encoded())
        layout.root.mkdir(parents=True, exist_ok=True)
        write_exclusive(layout.run_json, info.encoded())
        make_rooms(layout)
    except FileExistsError:
        _refuse_taken(layout)
        raise
    except OSError as error:
        if not existed and layout.root.is_dir() and not layout.run_json.exists():
            layout.root.rmdir()
        raise InputError(
            f"cannot be made: {describe(error)}", where=named(layout.root), fix="choose a writable place with -o"
        ) from error
    return RunDir(layout, info)


def _new_info(config: RunConfig, run_id: str | None, provenance: Mapping[str, Any]) -> RunInfo:
    now = datetime.now(UTC)
    return RunInfo(
        run_id=run_id or f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        status="running",
        created_at=now,
        config=config,
        config_digest=config_digest(config),
        versions=versions(),
        provenance={"git": git_state(Path()), **provenance},
    )


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a run is there, to be opened. Raises InputError where a store does not say."""
    layout = Layout(local_root(path))
    mirror = mirror_of(layout.root)
    try:
        return layout.run_json.exists() if mirror is None else mirror.objects.exists(layout.run_json.name)
    except OSError as error:
        raise InputError(f"cannot be used: {describe(error)}", where=named(layout.root)) from error


def _refuse_taken(layout: Layout) -> None:
    """Raises InputError where the path is a run already, or anything else that is not an empty directory."""
    where = named(layout.root)
    try:
        names = _names_in(layout)
    except OSError as error:
        raise InputError(f"cannot be used: {describe(error)}", where=where, fix="choose another place") from error
    if layout.run_json.name in names:
        raise InputError(
            "is a run already", where=where, fix=f"go on with it by `rollout resume {where}`, or choose another -o"
        )
    if names:
        raise InputError(
            f"is not empty and no run directory (it holds {sorted(names)[0]!r})",
            where=where,
            fix="choose a new or an empty directory",
        )


def _names_in(layout: Layout) -> list[str]:
    """What is in the directory, or below the prefix, already. Raises OSError."""
    if (mirror := mirror_of(layout.root)) is not None:
        return list(mirror.objects.list())
    root = layout.root
    return [path.name for path in root.iterdir() if not path.match(TEMPORARY)] if root.exists() else []
