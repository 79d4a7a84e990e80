"""`docker compose` v2 for the peers that need it, where the machine has none: taken once from Debian's packages.

Standard library only. The machine's own apt sources with the release's name put to `trixie` (the first with v2), in a
private apt configuration below `.cache`; nothing is installed, the plugin's one file is unpacked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.cases import CACHE

HOME = CACHE / "docker-config"
RELEASE = "trixie"
LIMIT_S = 300.0
PLUGIN = "usr/libexec/docker/cli-plugins/docker-compose"


class ComposeError(Exception):
    """There is no `docker compose` v2 and none can be had; the message says why."""


def docker_config() -> Path:
    """A folder for DOCKER_CONFIG with which `docker compose` works; made where needed. Raises ComposeError."""
    if shutil.which("docker") is None:
        raise ComposeError("there is no docker command")
    if not works(HOME):
        fetch(HOME / "cli-plugins" / "docker-compose")
    if not works(HOME):
        raise ComposeError(f"docker compose does not work with {HOME}")
    return HOME


def works(config: Path) -> bool:
    """Whether `docker compose` is there, from the machine or this folder."""
    environment = {**os.environ, "DOCKER_CONFIG": str(config)}
    asked = ["docker", "compose", "version", "--short"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.returncode == 0 and done.stdout.strip().removeprefix("v").startswith("2")


def later(text: str, codename: str) -> str:
    """The deb822 stanzas of the distribution's main archive, for RELEASE instead of `codename`."""
    stanzas = re.split(r"\n\s*\n", text.strip())
    suites = re.compile(r"^Suites:.*$", re.MULTILINE)
    found = [stanza for stanza in stanzas if re.search(rf"^Suites:.*(?<!\S){codename}(?!\S)", stanza, re.MULTILINE)]
    return "\n\n".join(suites.sub(f"Suites: {RELEASE}", stanza) for stanza in found) + "\n"


def fetch(target: Path) -> None:
    """Put the plugin of Debian's package at `target`. Raises ComposeError."""
    release = Path("/etc/os-release").read_text()
    codename = re.search(r"^VERSION_CODENAME=\"?(\w+)", release, re.MULTILINE)
    known = "\n\n".join(path.read_text() for path in Path("/etc/apt/sources.list.d").glob("*.sources"))
    sources = later(known, codename.group(1)) if codename else ""
    if not sources.strip():
        raise ComposeError("no `docker compose` v2, and no Debian sources to take it from")
    with tempfile.TemporaryDirectory() as folder:
        apt = private_apt(Path(folder), sources)
        for arguments in (["update"], ["download", "docker-compose"]):
            run([*apt, *arguments], folder)
        (package,) = Path(folder).glob("docker-compose_*.deb")
        run(["dpkg-deb", "-x", str(package), f"{folder}/root"], folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        shutil.copy(Path(folder, "root", PLUGIN), part)
        part.rename(target)


def private_apt(folder: Path, sources: str) -> list[str]:
    """apt-get with lists and caches of its own."""
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (folder / name).mkdir(parents=True)
    (folder / "parts" / "later.sources").write_text(sources)
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": f"{folder}/parts",
        "Dir::State::lists": f"{folder}/lists",
        "Dir::Cache": f"{folder}/cache",
        "APT::Sandbox::User": "root",
    }
    return ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def run(argv: list[str], folder: str) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise ComposeError(f"no `docker compose` v2: {' '.join(argv[:1] + argv[-2:])}: {done.stderr.strip()[-500:]}")
