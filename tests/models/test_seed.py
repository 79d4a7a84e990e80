"""The x-rollout-seed header.

.venv/bin/pytest tests/models/test_seed.py
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.models.seed import parse_seed_header, seed_header
from rollout_engine.types import CallContext

contexts = st.builds(
    CallContext,
    seed=st.integers(-(2**63), 2**63),
    round=st.integers(0, 2**31),
    task_id=st.text(min_size=1, max_size=512),
    model=st.text(min_size=1, max_size=100),
    attempt=st.integers(0, 2**31),
    turn=st.integers(0, 2**31),
    solution=st.none(),
    script=st.none(),
    gate=st.none(),
)


@given(contexts)
def test_the_header_says_which_rollout_it_is(context: CallContext) -> None:
    header = seed_header(context)
    assert header.isascii()
    assert header.isprintable()
    assert " " not in header
    assert len(header) < 8000  # aiohttp takes headers of up to 8,190 bytes
    assert parse_seed_header(header) == context


@pytest.mark.parametrize("header", ["", "1/2/3", "a/0/t/m/0/0", "1/0/t/m/0/0/9", "1/0/t/m//0"])
def test_anything_else_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match=r"seed|int"):
        parse_seed_header(header)
