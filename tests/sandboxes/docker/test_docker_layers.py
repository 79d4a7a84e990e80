"""Prepared images, exports and streams where docker has ways of its own, and the same by the Engine's exec.

python -m pytest tests/sandboxes/docker/test_docker_layers.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollout_engine.sandboxes.base import EVERYTHING, SNAPSHOT, Recipe, Sandbox, SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
from tests.docker_here import Daemon

pytestmark = pytest.mark.docker
LIMIT_S = 60.0


async def out(sandbox: Sandbox, script: str, user: str | None = None) -> str:
    result = await sandbox.exec(["sh", "-c", script], user=user)
    assert result.ok, result
    return result.stdout.decode().strip()


async def once(provider: DockerProvider, spec: SandboxSpec, script: str) -> str:
    """What a script says in a sandbox of its own."""
    sandbox = await provider.open(spec)
    try:
        return await out(sandbox, script)
    finally:
        await sandbox.close()


async def exported(provider: DockerProvider, spec: SandboxSpec, script: str, *paths: str) -> SandboxSpec:
    sandbox = await provider.open(spec)
    await out(sandbox, script)
    return replace(spec, layers=(*spec.layers, await sandbox.export(paths)))


@pytest.fixture(scope="module")
async def plain(shared: DockerProvider) -> AsyncIterator[DockerProvider]:
    """Without the supervisor."""
    made = DockerProvider(run="plain", image="pybox", supervise=False)
    yield made
    await made.close()


async def test_prepared_images_are_bounded_in_number_and_made_again(daemon: Daemon) -> None:
    provider = DockerProvider(run="prep", image="busybox", prepared_limit=2)
    recipe = ("cat /proc/sys/kernel/random/uuid > id",)
    specs = [await provider.prepare(SandboxSpec(), Recipe({"n": b"%d" % number}, recipe)) for number in range(2)]
    ids = [await once(provider, spec, "cat id") for spec in specs]
    assert await once(provider, specs[0], "cat id") == ids[0]
    third = await provider.prepare(SandboxSpec(user="nobody"), Recipe({"n": b"2"}))
    assert len([name for name in daemon.left("prep") if "prepared" in name]) == 2
    assert await once(provider, third, "id -un; cat n") == "nobody\n2"
    assert await once(provider, specs[0], "cat id") == ids[0]
    assert await once(provider, specs[1], "cat id") not in ids
    await provider.close()
    assert daemon.left("prep") == []


async def test_everything_holds_programs_and_a_snapshot_does_not(shared: DockerProvider) -> None:
    script = (
        "echo x > /usr/bin/fake; echo x > /etc/ld.so.preload; rm /etc/debian_version; rm -r /var/cache/ldconfig;"
        " mkdir -m 700 -p /srv/a/b; echo y > /srv/a/b/c; echo evil > /usr/bin/env; rm /usr/bin/yes;"
        " ln /srv/a/b/c /srv/d"
    )
    look = (
        "cat /srv/a/b/c; stat -c %a /srv/a/b; stat -c %h /srv/d; for f in /usr/bin/fake /usr/bin/yes /etc/ld.so.preload"
        " /etc/debian_version /var/cache/ldconfig; do [ -e $f ] && echo $f; done; head -c 4 /usr/bin/env | tail -c 3"
    )
    snapshot = await exported(shared, SandboxSpec(), script, SNAPSHOT)
    assert await once(shared, snapshot, look) == "y\n700\n2\n/usr/bin/yes\nELF"
    whole = await exported(shared, SandboxSpec(), script.replace("echo x > /etc/ld.so.preload", "true"), EVERYTHING)
    assert await once(shared, whole, look) == "y\n700\n2\n/usr/bin/fake\nvil"


async def test_a_snapshot_cannot_bring_the_loaders_files_by_a_link(shared: DockerProvider) -> None:
    script = "cp -r /etc /srv/etc; echo /evil.so > /srv/etc/ld.so.preload; mv /etc /etc2; ln -s srv/etc /etc"
    spec = await exported(shared, SandboxSpec(), script, SNAPSHOT)
    assert await once(shared, spec, "[ ! -L /etc ] && [ ! -e /etc/ld.so.preload ] && echo clean") == "clean"


async def test_an_export_comes_to_a_limited_disk_and_from_it(shared: DockerProvider) -> None:
    limited = SandboxSpec(image="busybox", require_limits=True, disk_bytes=8 * 2**20, inodes=400)
    spec = await exported(shared, limited, "echo 1 > file; echo 2 > /tmp/other", EVERYTHING)
    assert await once(shared, spec, "cat file /tmp/other; touch here; touch /root/x 2>/dev/null || echo held") == (
        "1\n2\nheld"
    )


async def test_an_export_is_refused_before_its_bytes_are_moved(shared: DockerProvider) -> None:
    for script, limits in (
        ("truncate -s 1T huge", SandboxSpec()),
        ("for i in $(seq 60); do : > $i; done", SandboxSpec(inodes=50)),
    ):
        sandbox = await shared.open(limits)
        await out(sandbox, script)
        with pytest.raises(ValueError, match="export"):
            await sandbox.export(["."])
        await sandbox.close()


async def test_without_the_supervisor_too(plain: DockerProvider) -> None:
    spec = await plain.prepare(SandboxSpec(), Recipe({"keep": b"k", "gone": b"g"}, ("echo done > made",)))
    handed = await exported(plain, spec, "rm gone; echo new > new; setsid sleep 100 > /dev/null &", ".")
    assert await once(plain, handed, "cat keep made new; ls") == "kdone\nnew\nkeep\nmade\nnew"


async def sleeping(sandbox: Sandbox, *seconds: int) -> None:
    """Until these sleep, and no others: not shells that are about to."""
    lines = "for each in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $each; echo; done 2>/dev/null"
    wanted = "\n".join(f"sleep {each} " for each in seconds).strip()
    async with asyncio.timeout(LIMIT_S):
        while await out(sandbox, f"{lines} | grep '^sleep 10' | sort; true") != wanted:
            await asyncio.sleep(0.05)


async def test_quiescing_without_the_supervisor(plain: DockerProvider) -> None:
    sandbox = await plain.open(SandboxSpec())
    kept = await sandbox.start(["sh", "-c", "sleep 101 & sleep 102"])
    await sandbox.start(["sh", "-c", "sleep 103; true"])
    await out(sandbox, "setsid sh -c 'sleep 104 & sleep 105' > /dev/null 2>&1 &")
    await sleeping(sandbox, 101, 102, 103, 104, 105)
    await sandbox.quiesce([kept])
    await sleeping(sandbox, 101, 102)
    assert (await sandbox.poll(kept)).exit_code is None
    await sandbox.quiesce()
    await sleeping(sandbox)
    await sandbox.close()


async def test_talking_without_the_supervisor(plain: DockerProvider) -> None:
    sandbox = await plain.open(SandboxSpec())
    stream = await sandbox.connect(["sh", "-c", "echo e >&2; exec cat"])
    data = bytes(range(256)) * 4096
    writing, got = asyncio.create_task(stream.write(data)), b""
    while len(got) < len(data):
        got += await stream.read()
    await writing
    assert got == data
    assert (await stream.poll()).exit_code is None
    await stream.close()
    assert await stream.read() == b""
    status = await stream.poll()
    assert (status.exit_code, status.stderr) == (-9, b"e\n")
    deaf = await sandbox.connect(["sh", "-c", "read line; echo $line; sleep 100"])
    writing = asyncio.create_task(deaf.write(b"go\n" + b"x" * 2**22))
    assert await deaf.read() == b"go\n"
    assert not writing.done()
    await deaf.close()
    with pytest.raises(BrokenPipeError):
        await writing
    missing = await sandbox.connect(["no-such-program"])
    assert await missing.read() == b""
    assert (await missing.poll()).exit_code == 127
    with pytest.raises(BrokenPipeError):
        await missing.write(b"x")
    await sandbox.close()
