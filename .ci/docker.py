#!/usr/bin/env python3
"""A private Docker daemon for tests, on a machine that has none (root, apt; nothing is pulled).

    eval "$(.ci/docker.py start)"       exports DOCKER_HOST; `start` is quick where it already runs
    .ci/docker.py stop                  ends the daemon and unmounts what it mounted
    .ci/docker.py run -- make test-all  starts it, runs a command under it, ends it with the command
    .ci/docker.py start busybox         with this image alone
    .ci/docker.py rootless -- COMMAND   COMMAND beside a rootless daemon, whose user's id is in ROOTLESS_UID

The images `busybox` (the static busybox) and `pybox` (a Debian root with python3) are made here.
Its address pool holds only eight networks, so that a test can use it up.
State: `.cache/docker` (or ROLLOUT_DOCKER_STATE: a daemon of its own), `/run/rollout-docker-*`. More options for the
daemon: ROLLOUT_DOCKER_OPTIONS.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
OWN_STATE = os.environ.get("ROLLOUT_DOCKER_STATE")
OPTIONS = os.environ.get("ROLLOUT_DOCKER_OPTIONS", "").split()
CACHE = Path(OWN_STATE) if OWN_STATE else REPO / ".cache" / "docker"
RUN = Path("/run") / f"rollout-docker-{hashlib.sha256((OWN_STATE or str(REPO)).encode()).hexdigest()[:8]}"
HOST = f"unix://{RUN}/docker.sock"
PACKAGES = {  # the file that shows a package is there
    "docker.io": "/usr/sbin/dockerd",
    "iptables": "/usr/sbin/iptables",
    "busybox-static": "/bin/busybox",
    "debootstrap": "/usr/sbin/debootstrap",
    "uidmap": "/usr/bin/newuidmap",
    "rootlesskit": "/usr/bin/rootlesskit",
}
START_S = 60.0
STOP_S = 30.0


def say(text: str) -> None:
    print(f"docker: {text}", file=sys.stderr, flush=True)


def install() -> None:
    missing = [name for name, path in PACKAGES.items() if not Path(path).exists()]
    if not missing:
        return
    say(f"installing {' '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        subprocess.run(["apt-get", "-q", *arguments], env=env, stdout=sys.stderr, check=True)


def daemon_pid() -> int | None:
    """The daemon of this checkout, if it lives."""
    try:
        pid = int((RUN / "pid").read_text())
        return pid if b"dockerd" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def launch() -> None:
    """Starts dockerd and waits for its own word that it is ready (sd_notify), or for its death."""
    RUN.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, (CACHE / "dockerd.log").open("wb") as log:
        (RUN / "notify").unlink(missing_ok=True)
        ready.bind(str(RUN / "notify"))
        daemon = subprocess.Popen(
            [
                "dockerd", "--host", HOST, "--data-root", str(CACHE / "data"), "--exec-root", str(RUN / "exec"),
                "--pidfile", str(RUN / "pid"), "--default-address-pool", "base=10.231.0.0/25,size=28", *OPTIONS,
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "NOTIFY_SOCKET": str(RUN / "notify")},
        )  # fmt: skip
        pidfd = os.pidfd_open(daemon.pid)
        seen, _, _ = select.select([ready, pidfd], [], [], START_S)
        os.close(pidfd)
    if ready not in seen:
        daemon.kill()
        sys.exit(f"docker: the daemon did not start; see {CACHE / 'dockerd.log'}")


def engine(*arguments: str, host: str = HOST) -> list[str]:
    return ["docker", "--host", host, *arguments]


def has_image(name: str) -> bool:
    return subprocess.run(engine("image", "inspect", name), capture_output=True).returncode == 0


def import_busybox(host: str = HOST) -> None:
    with tempfile.TemporaryDirectory() as root:
        for folder in ("bin", "tmp", "etc", "root", "workspace"):
            Path(root, folder).mkdir()
        Path(root, "tmp").chmod(0o1777)
        Path(root, "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        Path(root, "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
        shutil.copy("/bin/busybox", Path(root, "bin/busybox"))
        subprocess.run(["chroot", root, "/bin/busybox", "--install", "-s", "/bin"], check=True)
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        importing = engine("import", "-", "busybox:latest", host=host)
        subprocess.run(importing, stdin=tar.stdout, stdout=sys.stderr, check=True)


def import_pybox() -> None:
    archive = CACHE / "pybox.tar"
    if not archive.exists():
        build_pybox(archive)
    subprocess.run(engine("import", str(archive), "pybox:latest"), stdout=sys.stderr, check=True)


def build_pybox(archive: Path) -> None:
    say("building the Debian root of pybox (once; under a minute)")
    codename = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    with tempfile.TemporaryDirectory() as root:
        suite = codename["VERSION_CODENAME"].strip('"')
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3", suite, root], stdout=sys.stderr, check=True
        )
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(Path(root, waste), ignore_errors=True)
        part = archive.with_suffix(".part")
        subprocess.run(["tar", "-C", root, "-cf", str(part), "."], check=True)
        part.rename(archive)


def start(*images: str) -> None:
    """Without names: with all images."""
    install()
    if daemon_pid() is None:
        launch()
    for name, make in (("busybox", import_busybox), ("pybox", import_pybox)):
        if (not images or name in images) and not has_image(name):
            make()


def stop() -> None:
    """SIGTERM lets dockerd end its containers; what it does not end within the limit is killed."""
    pid = daemon_pid()
    if pid is not None:
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], STOP_S)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], STOP_S)
        os.close(pidfd)
    unmount()
    shutil.rmtree(RUN, ignore_errors=True)


def unmount() -> None:
    """A killed daemon leaves mounts under its folders."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in reversed([path for path in mounts if path.startswith((f"{CACHE}/", f"{RUN}/"))]):
        subprocess.run(["umount", "-l", path], check=False)


def run(command: list[str]) -> int:
    start()
    try:
        return subprocess.run(command, env={**os.environ, "DOCKER_HOST": HOST}, check=False).returncode
    finally:
        stop()


ROOTLESS = """
exec rootlesskit --net=host --copy-up=/etc --copy-up=/run --state-dir="$HOME/kit" sh -c '
rm -rf /run/docker /run/containerd
exec dockerd --rootless --bridge=none --iptables=false --userland-proxy=false --host "unix://$HOME/docker.sock" \\
    --data-root "$HOME/data" --exec-root "$HOME/exec" --pidfile "$HOME/pid"'
"""


def rootless(command: list[str]) -> int:
    """A daemon of an ordinary user, with `busybox`, for as long as a command runs; the user goes with it.

    The command runs as root, with that user's DOCKER_HOST, TMPDIR and ROOTLESS_UID: it becomes that user by itself.
    """
    name = f"rollout-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", name], check=True)  # with a range of ids for its containers
    try:
        user = pwd.getpwnam(name)
        with tempfile.TemporaryDirectory(prefix="rollout-rootless-") as folder:
            for path in (Path(folder), Path(folder, "tmp")):
                path.mkdir(exist_ok=True)
                os.chown(path, user.pw_uid, user.pw_gid)
            env = {"HOME": folder, "XDG_RUNTIME_DIR": folder, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            become = ["setpriv", "--reuid", name, "--regid", str(user.pw_gid), "--clear-groups"]
            with Path(folder, "log").open("wb") as log:
                daemon = subprocess.Popen(
                    [*become, "sh", "-c", ROOTLESS], env=env, stdout=log, stderr=log, start_new_session=True
                )
            try:
                return beside(
                    daemon, Path(folder), {"TMPDIR": f"{folder}/tmp", "ROOTLESS_UID": str(user.pw_uid)}, command
                )
            finally:
                daemon.terminate()
                daemon.wait(STOP_S)
    finally:
        subprocess.run(["userdel", name], check=False)


def beside(daemon: subprocess.Popen[bytes], folder: Path, env: dict[str, str], command: list[str]) -> int:
    host = f"unix://{folder}/docker.sock"
    deadline = time.monotonic() + START_S
    while subprocess.run(engine("info", host=host), capture_output=True).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline:
            say((folder / "log").read_text()[-3000:])
            return 1
        time.sleep(0.1)
    import_busybox(host)
    return subprocess.run(command, env={**os.environ, **env, "DOCKER_HOST": host}, check=False).returncode


def main(arguments: list[str]) -> int:
    match arguments:
        case ["start", *images]:
            start(*images)
            print(f"export DOCKER_HOST={HOST}")
        case ["stop"]:
            stop()
        case ["run", "--", *command] if command:
            return run(command)
        case ["rootless", "--", *command] if command:
            return rootless(command)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
