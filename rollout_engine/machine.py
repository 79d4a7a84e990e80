"""What this machine allows a process of ours."""

from __future__ import annotations

import ctypes
import gc
import os
import resource

import pyarrow as pa

from rollout_engine.errors import InputError

DESCRIPTORS_PER_ROLLOUT = 2
"""A connection to the model, and a socket or pipe of the sandbox."""
DESCRIPTORS_BASE = 512

COLLECT_AFTER = 50_000
"""Objects that a host's process makes, beyond those that it frees, between two searches for unreachable cycles."""
COLLECT_OLD, COLLECT_ALL = 5, 4
"""Every fifth search looks at older objects too, and every fourth of those at all that came after the start."""


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard one, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def check_descriptors(slots: int) -> None:
    """Raises InputError where the hard limit of open files is too low for so many rollouts at once."""
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_ROLLOUT * slots
    allowed = raise_descriptor_limit()
    if allowed < needed:
        raise InputError(
            f"{slots} rollouts at once need {needed} open files; the hard limit is {allowed}",
            where="host.slots",
            fix=f"raise it (ulimit -Hn {needed}, or LimitNOFILE), or lower host.slots",
        )


def give_back_memory() -> None:
    """Returns what allocators keep of freed memory to the system; without it a long run seems to grow for ever."""
    pa.default_memory_pool().release_unused()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # only glibc has it
        return
    trim(0)


def collect_seldom() -> None:
    """For a process that does nothing but run rollouts, once it is up.

    What is loaded by then is never garbage, and rollouts end without cycles. By Python's defaults each rollout in
    flight is walked again and again while it waits for its model, which takes a sixth of all that a host does.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, COLLECT_OLD, COLLECT_ALL)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
