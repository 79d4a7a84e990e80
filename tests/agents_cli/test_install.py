"""An installation is made once per node, whoever asks; what goes wrong is named, and nothing half-made stays.

One test: .venv/bin/pytest tests/agents_cli/test_install.py -k once
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from rollout_engine.agents.cli.install import Installer, check_directory
from rollout_engine.agents.cli.program import Package
from rollout_engine.errors import AgentError, AgentUnavailable

PLACE = "node_modules/tiny-agent/run.sh"

needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None and os.environ.get("ROLLOUT_REQUIRE") != "1", reason="there is no npm"
)


def package(tmp_path: Path, programs: dict[str, str] | None = None) -> Package:
    """An npm package in a file, which needs no registry."""
    script = {"postinstall": f"touch {tmp_path}/ran"}
    files = {
        "package.json": json.dumps({"name": "tiny-agent", "version": "1.0.0", "scripts": script}),
        "run.sh": "#!/bin/sh\necho tiny\n",
    }
    path = tmp_path / "tiny-agent-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return Package("npm", (str(path),), programs if programs is not None else {"*": PLACE})


@needs_npm
async def test_many_who_ask_at_once_share_one_installation_and_no_script_of_it_runs(tmp_path: Path) -> None:
    made, cache = package(tmp_path), str(tmp_path / "cache")
    one, other = Installer(made, cache, 120), Installer(made, cache, 120)
    found = await asyncio.gather(one.directory(), one.directory(), other.directory())
    assert len(set(found)) == 1
    assert (Path(found[0]) / PLACE).read_text() == "#!/bin/sh\necho tiny\n"
    assert not (tmp_path / "ran").exists()
    stamp = os.stat(found[0]).st_ino
    assert os.stat(await Installer(made, cache, 120).directory()).st_ino == stamp, "it was made once"
    assert [name for name in os.listdir(cache) if not name.startswith(".")] == [Path(found[0]).name]


@needs_npm
async def test_a_package_that_cannot_be_had_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    missing = Package("npm", (str(tmp_path / "no-such-agent.tgz"),), {"*": PLACE})
    with pytest.raises(AgentError, match=r"no-such-agent.*cannot be installed: npm ended with"):
        await Installer(missing, str(cache), 120).directory()
    assert [name for name in os.listdir(cache) if not name.startswith(".")] == []


@needs_npm
async def test_an_installation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(AgentError, match=r"was not installed within 0\.01 s"):
        await Installer(package(tmp_path), str(cache), 0.01).directory()
    assert [name for name in os.listdir(cache) if not name.startswith(".")] == []


async def test_without_npm_the_fix_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentUnavailable, match="there is no npm on this node"):
        await Installer(package(tmp_path), str(tmp_path / "cache"), 60).directory()


async def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(AgentUnavailable, match="writable for nobody else"):
        await Installer(package(tmp_path), str(cache), 60).directory()


def test_a_directory_without_the_program_or_for_another_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match="there is no directory"):
        check_directory(str(tmp_path / "none"), None)
    with pytest.raises(AgentUnavailable, match=r"holds no node_modules"):
        check_directory(str(tmp_path), package(tmp_path))
    with pytest.raises(AgentUnavailable, match="is not made for"):
        check_directory(str(tmp_path), package(tmp_path, {"pdp11": "x"}))
