"""Randomness that is a pure function of what it is for: the same in any process, thread and order."""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from statistics import NormalDist

from rollout_engine.types import CallContext

_UNIT = 2.0**-53
_NORMAL = NormalDist()


def uniforms(context: CallContext, purpose: str) -> tuple[float, float]:
    """Two independent draws from [0, 1) for one purpose of one call.

    A hash, not `random.Random`: seeding a Mersenne twister for every call takes longer than all else of it.
    """
    # The task id comes last, for it may hold anything.
    key = f"{purpose}|{context.seed}|{context.round}|{context.model}|{context.attempt}|{context.turn}|{context.task_id}"
    first, second = struct.unpack("<QQ", blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return (first >> 11) * _UNIT, (second >> 11) * _UNIT


def exponential(u: float, mean: float) -> float:
    """The exponential quantile of `u`."""
    return -mean * math.log1p(-u)


def lognormal(u: float, mean: float, sigma: float) -> float:
    """The lognormal quantile of `u`; `sigma` is the spread of the logarithm, `mean` that of the value itself."""
    if mean <= 0.0:
        return 0.0
    return math.exp(math.log(mean) - sigma * sigma / 2 + sigma * _NORMAL.inv_cdf(min(max(u, _UNIT), 1.0 - _UNIT)))
