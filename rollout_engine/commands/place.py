"""RUN as it is typed: a directory, or the URI of an object store."""

from __future__ import annotations

from pathlib import Path


def run_path(typed: str) -> Path:
    """Where the run lies on this machine; a URI's working copy is brought up to date when the run is opened.

    Raises InputError where the URI cannot be one. Light: what object stores need is imported for a URI alone.
    """
    if "://" not in typed:
        return Path(typed)
    from rollout_engine.store.mirrors import local_root

    return local_root(typed)


def has_run(typed: str) -> bool:
    """Whether a run is there. Raises InputError where an object store does not say."""
    from rollout_engine.store import is_run

    return is_run(run_path(typed))
