"""Users by name or number, as the container's own files know them."""

from __future__ import annotations

from docker.errors import APIError

from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.docker import files
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import translate
from rollout_engine.sandboxes.docker.files import Ids

_MAX_BYTES = 2**20


async def ids_of(engine: Engine, container: str, user: str) -> Ids:
    """`name`, `uid`, either with `:gid`. Raises SandboxStartError for a name that the image does not know."""
    name, _, group = user.partition(":")
    if name in ("", "0", "root") and not group:
        return Ids()
    if name.isdigit() and (group.isdigit() or not group):
        return Ids(int(name), int(group or 0))
    try:
        data = await engine.call("read users", lambda api: files.read(api, container, "/etc/passwd", _MAX_BYTES))
    except FileNotFoundError:
        data = b""
    except APIError as error:
        raise translate(error, "read users") from error
    for line in data.decode(errors="replace").splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[0] == name:
            return Ids(int(fields[2]), int(group) if group.isdigit() else int(fields[3]))
    raise SandboxStartError(f"docker: the image has no user {name!r}")
