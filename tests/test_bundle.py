"""A bundle is checked as a whole before anything of it is in a sandbox.

One test: .venv/bin/pytest tests/test_bundle.py -k link
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.errors import BadBundle, TooLarge
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.bundle import unpack, upload_bundle


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def directory(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=0o755)


def bundle(path: Path, *members: tuple[tarfile.TarInfo, bytes], compression: str = "") -> Path:
    with tarfile.open(str(path), f"w:{compression}") as tar:
        for entry, data in members:
            tar.addfile(entry, io.BytesIO(data))
    return path


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    provider = make_provider("local", directory=tmp_path)
    yield await provider.open(SandboxSpec())
    await provider.close()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_files_directories_and_links_come_with_their_modes(tmp_path: Path, compression: str) -> None:
    made = bundle(
        tmp_path / "b.tar",
        directory("./"),
        member("./run", b"#!/bin/sh\n", mode=0o4755),
        directory("empty"),
        member("deep/er/file", b"x" * 100_000),
        link("deep/er/up", "../../run"),
        link("again", "deep/er/file", tarfile.LNKTYPE),
        link("dangling", "deep/nothing"),
        compression=compression,
    )
    unpack(made, tmp_path / "tree", 300_000, 10)
    tree = tmp_path / "tree"
    assert names(tree) == ["again", "dangling", "deep", "deep/er", "deep/er/file", "deep/er/up", "empty", "run"]
    assert (tree / "run").stat().st_mode & 0o7777 == 0o755
    assert (tree / "deep/er/up").read_bytes() == b"#!/bin/sh\n"
    assert (tree / "again").read_bytes() == b"x" * 100_000


HOSTILE = {
    "absolute": [member("/etc/x", b"x")],
    "dots": [member("a/../../x", b"x")],
    "null": [link("a", "b"), member("a/x", b"x")],
    "a link that is absolute": [link("a", "/etc")],
    "a link out": [link("a", "../x")],
    "a deeper link out": [directory("d"), link("d/a", "../../x")],
    "a link out by another link": [directory("d"), link("d/a", "."), link("b", "d/a/../../x")],
    "through a link": [directory("d"), link("l", "d"), member("l/file", b"x")],
    "a link where a directory was": [member("d/file", b"x"), link("d", "/")],
    "a directory where a link was": [link("d", "e"), directory("d")],
    "twice": [member("a", b"1"), member("a", b"2")],
    "a file where a directory is": [directory("a"), member("a", b"x")],
    "below a file": [member("a", b"x"), member("a/b", b"x")],
    "a hard link out": [link("a", "/etc/passwd", tarfile.LNKTYPE)],
    "a hard link to nothing": [link("a", "b", tarfile.LNKTYPE)],
    "a hard link to a link": [link("b", "c"), link("a", "b", tarfile.LNKTYPE)],
    "a pipe": [member("a", type=tarfile.FIFOTYPE)],
    "a device": [member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a long name": [member("x" * 300, b"x")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
async def test_what_leads_out_of_the_bundle_is_refused_and_nothing_is_uploaded(
    sandbox: Sandbox, tmp_path: Path, scratch: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    made = bundle(tmp_path / "b.tar", member("first", b"x"), *members)
    with pytest.raises(BadBundle):
        await upload_bundle(sandbox, made, "into")
    assert not (await sandbox.exec(["ls", "into"])).ok
    assert names(scratch) == []


@pytest.mark.parametrize(
    "members",
    [
        [member("a", b"x" * 600), member("b", b"x" * 600)],
        [member("a", b"x" * 600), link("b", "a", tarfile.LNKTYPE)],
        [member(f"{number}", b"") for number in range(11)],
        [member("a", pax_headers={"comment": "x" * 100_000})],
    ],
    ids=["bytes", "hard links", "files", "heads"],
)
@pytest.mark.parametrize("compression", ["", "gz"])
async def test_a_bundle_above_a_limit_is_refused(
    sandbox: Sandbox, tmp_path: Path, scratch: Path, members: Any, compression: str
) -> None:
    made = bundle(tmp_path / "b.tar", *members, compression=compression)
    with pytest.raises(TooLarge):
        await upload_bundle(sandbox, made, "into", max_bytes=1000, max_files=10)
    assert not (await sandbox.exec(["ls", "into"])).ok
    assert names(scratch) == []


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_an_archive_that_is_cut_anywhere_or_is_none_is_refused(tmp_path: Path, compression: str) -> None:
    whole = bundle(tmp_path / "b.tar", member("a", b"x" * 700), member("b", b"y" * 700), compression=compression)
    data = whole.read_bytes()
    content = len(data) if compression else 2 * (512 + 1024)  # zeros follow
    for number, size in enumerate([0, 1, 100, 512, 1000, 1536, content // 3, content // 2, content - 1]):
        (tmp_path / "cut").write_bytes(data[: min(size, content - 1)])
        with pytest.raises(BadBundle):
            unpack(tmp_path / "cut", tmp_path / f"tree{number}", 10_000, 10)


async def test_a_cancelled_upload_leaves_nothing_on_the_host(sandbox: Sandbox, tmp_path: Path, scratch: Path) -> None:
    made = bundle(tmp_path / "b.tar", *(member(f"{number}", b"x" * 10_000) for number in range(500)))
    uploading = asyncio.create_task(upload_bundle(sandbox, made, "into"))
    await asyncio.sleep(0.005)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert names(scratch) == []
