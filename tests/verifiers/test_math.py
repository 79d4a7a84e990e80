"""Mathematical equality: what counts as the same, what ends a comparison that hangs, and what is missing where.

make one T=tests/verifiers/test_math.py
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
import venv
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.errors import InputError, VerifierError, VerifierTimeout, VerifierUnavailable
from rollout_engine.machine import cores
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import EVERYTHING, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Score, Trajectory
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.maths.pool import MathPool, parse_line
from rollout_engine.verifiers.workshop import Workshop
from tests.sandboxes.backends import ISOLATING, absent, working

TASK = Task(task_id="t", prompt="p", verifier={"type": "math", "expected": "1"})
HANGS = r"\boxed{9^{9^{9^{9}}}}"
"""sympy begins to write this number down."""
RIGHT, WRONG = Score(1.0, True), Score(0.0, False)


@pytest.fixture
async def shop() -> AsyncIterator[Workshop]:
    if importlib.util.find_spec("math_verify") is None:
        absent("math-verify is not installed: pip install 'rollout-engine[math]'")
    made = Workshop(warm=False)
    yield made
    await made.close()


async def verdict(shop: Workshop | None, expected: Any, answer: str | None, **fields: Any) -> Score:
    spec = {"type": "math", "expected": expected, **fields}
    return await make_verifier(spec, workshop=shop).verify(TASK, Trajectory(final_answer=answer), None)


async def gone(pids: set[int]) -> None:
    async with asyncio.timeout(60):
        while any(is_there(pid) for pid in pids):
            await asyncio.sleep(0.02)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def told_of(pid: int, what: str) -> bytes:
    return Path(f"/proc/{pid}/{what}").read_bytes()


async def test_what_is_the_same(shop: Workshop) -> None:
    for expected, answer in [
        (r"\frac{1}{2}", r"So it is $\boxed{0.5}$."),
        ("x^2", r"\boxed{x \cdot x}"),
        (42, "The answer is 42"),
        ("1,000", r"\boxed{1000}"),
        (r"\{1, 2\}", r"$\boxed{\{2, 1\}}$"),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}"),
    ]:
        assert await verdict(shop, expected, answer) == RIGHT, (expected, answer)


async def test_what_is_not_and_an_answer_without_an_expression_is_wrong(shop: Workshop) -> None:
    for answer in [r"\boxed{41}", "no number here", "", "  ", None, "((((" * 5_000, "\x00 \ud800", r"\boxed{"]:
        assert await verdict(shop, 42, answer) == WRONG, answer


async def test_only_the_end_of_a_long_answer_is_looked_at(shop: Workshop) -> None:
    assert await verdict(shop, 42, "7 + " * 200_000 + r"\boxed{42}") == RIGHT


async def test_an_expected_text_without_an_expression_is_no_finding(shop: Workshop) -> None:
    with pytest.raises(VerifierError, match="the expected expression"):
        await verdict(shop, " ", "42")


async def test_a_comparison_that_hangs_is_killed_and_the_next_one_works(shop: Workshop) -> None:
    assert await verdict(shop, 9, r"\boxed{9}") == RIGHT
    pids = shop.maths().pids
    before = time.process_time()
    with pytest.raises(VerifierTimeout, match=r"within 1\.5 s"):
        await verdict(shop, 9, HANGS, limit_s=1.5)
    assert time.process_time() - before < 0.75  # none of it happened here
    await gone(pids)
    assert await verdict(shop, 9, r"\boxed{9}") == RIGHT


async def test_there_are_never_more_processes_than_cores(shop: Workshop) -> None:
    asked = [asyncio.create_task(verdict(shop, 9, r"\boxed{9}")) for _ in range(4 * cores())]
    most = 0
    while not all(task.done() for task in asked):
        most = max(most, len(shop.maths().pids))
        await asyncio.sleep(0.01)
    assert 0 < most <= cores()
    assert all(task.result() == RIGHT for task in asked)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_no_process_outlives_its_verdict_or_its_host(shop: Workshop, how: str) -> None:
    pool = shop.maths()
    assert await verdict(shop, 9, r"\boxed{9}") == RIGHT
    asked = asyncio.create_task(verdict(shop, 9, HANGS, limit_s=60))
    await asyncio.sleep(0)
    pids = pool.pids
    assert pids
    if how == "cancelled":
        asked.cancel()
    else:
        await pool.close()
        with pytest.raises(VerifierError, match="ended"):
            await asked
    await asyncio.gather(asked, return_exceptions=True)
    await gone(pids)


async def test_the_process_has_no_keys_and_no_privileges(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    assert await verdict(shop, 9, r"\boxed{9}") == RIGHT
    (pid,) = shop.maths().pids
    lines = told_of(pid, "status").decode().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert told_of(pid, "environ") == b""
        assert int(status["CapEff"], 16) == 0 or status["Uid"].startswith("0")


async def test_the_package_is_missing_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    shop = Workshop(warm=False)
    try:
        for _ in range(2):  # found out once, said each time
            with pytest.raises(VerifierUnavailable, match=r"needs the package math-verify .*No module named"):
                await verdict(shop, 42, "42")
    finally:
        await shop.close()


async def test_the_package_is_missing_in_the_sandbox() -> None:
    provider = await working(ISOLATING[0])
    box = await provider.open(SandboxSpec())
    verifier = make_verifier({"type": "math", "expected": 42, "isolation": "fresh"}, workshop=Workshop(provider))
    try:
        with pytest.raises(VerifierUnavailable, match=r"in the sandbox, .* needs .*: install math-verify for /"):
            await verifier.verify(TASK, Trajectory(final_answer="42"), box)
    finally:
        await box.close()
        await provider.close()


async def test_it_runs_in_a_sandbox_whose_python_has_the_package(shop: Workshop, tmp_path: Path) -> None:
    provider = make_provider("local", directory=tmp_path)
    box = await provider.open(SandboxSpec(trusted=True))

    async def inside(answer: str, **fields: Any) -> Score:
        spec = {"type": "math", "expected": 9, "isolation": "fresh", **fields}
        return await make_verifier(spec, workshop=shop).verify(TASK, Trajectory(final_answer=answer), box)

    try:
        assert await inside(r"\boxed{3^2}") == RIGHT
        assert await inside(r"\boxed{8}") == WRONG
        with pytest.raises(VerifierTimeout):
            await inside(HANGS, limit_s=0.5)
        assert not shop.maths().pids
    finally:
        await box.close()
        await provider.close()


PACKAGES = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy", "mpmath")


def installed(folder: Path) -> Path:
    """A copy of the package and of what it needs, as an image would have them; tests of theirs are left out."""
    for name in PACKAGES:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if (source := Path(str(found.locate_file(top)))).is_dir():
                shutil.copytree(source, folder / top, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ISOLATING[0], ISOLATING[-1]], ids=["root", "docker"])
async def test_it_runs_in_an_isolated_sandbox_with_a_layer_that_has_the_package(
    shop: Workshop, kind: str, tmp_path: Path
) -> None:
    provider = await working(kind)
    spec = SandboxSpec()
    try:
        made = await provider.open(spec)
        (python, *_) = await Workshop(provider).python(made, spec)
        found_at = await made.exec([python, "-I", "-c", "import site; print(site.getsitepackages()[0])"])
        folder = found_at.stdout.decode().strip()
        await made.upload(installed(tmp_path / "packages"), folder)
        with_it = replace(spec, layers=(await made.export([EVERYTHING]),))
        box = await provider.open(with_it)

        async def inside(answer: str, **fields: Any) -> Score:
            verifier = make_verifier({"type": "math", "expected": 9, "isolation": "fresh", **fields}, workshop=shop)
            return await verifier.verify(TASK, Trajectory(final_answer=answer), box)

        assert await inside(r"\boxed{3^2}") == RIGHT
        assert await inside(r"\boxed{8}") == WRONG
        with pytest.raises(VerifierTimeout):
            await inside(HANGS, limit_s=0.5)
        assert not shop.maths().pids, "nothing of it ran on the host"
    finally:
        await provider.close()


@pytest.mark.parametrize("line", [b"", b"\xff\n", b"[]\n", b"1\n", b"{" * 100_000])
def test_what_comes_back_is_not_taken_for_granted(line: bytes) -> None:
    with pytest.raises(VerifierError):
        parse_line(line)


@pytest.mark.parametrize(
    "fields", [{}, {"expected": None}, {"expected": "1", "limit_s": 0}, {"expected": "1", "isolation": "snapshot"}]
)
def test_what_cannot_be_used_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="verifier"):
        make_verifier({"type": "math", **fields})


def test_a_pool_that_nobody_asked_has_no_process() -> None:
    assert MathPool().pids == set()
