"""Images that are files: an OCI layout (a folder or a tar), or what `docker save` wrote. Nothing here is unpacked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple, TypeAlias

from rollout_engine.errors import SandboxStartError

_CHUNK = 2**20
_MAX_JSON_BYTES = 4 * 2**20
_MAX_LAYERS, _MAX_DEPTH = 500, 4
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PARTS = re.compile(
    r"\.?|blobs(/sha256(/[0-9a-f]{64})?)?|oci-layout|(index|manifest)\.json|repositories"
    r"|[0-9a-f]{64}(\.json|/(layer\.tar|json|VERSION))?"
)
"""Whatever such an archive holds, by its names: any other tar soon has another one."""
_Open: TypeAlias = Callable[[str], IO[bytes]]


class LayerFile(NamedTuple):
    """A layer as it lies in the image: maybe compressed. `sha256` is of what lies there."""

    name: str
    sha256: str


class ImageFile:
    """An image in a file. `read` gives a layer's bytes, checked at their end."""

    def __init__(
        self, path: str, open_part: _Open, config: dict[str, Any], digest: str, layers: list[LayerFile]
    ) -> None:
        self._path, self._open, self.digest, self.layers = path, open_part, digest, layers
        settings = config.get("config") or {}
        self.env = dict(item.split("=", 1) for item in settings.get("Env") or [] if "=" in item)
        self.user = str(settings.get("User") or "")

    def read(self, layer: LayerFile) -> Iterator[bytes]:
        """Raises SandboxStartError where its bytes are not those that the image names."""
        digest = hashlib.sha256()
        with _part(self._open, self._path, layer.name) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != layer.sha256:
            raise SandboxStartError(f"image {self._path}: layer {layer.name} is not what the image says; save it again")


@contextlib.contextmanager
def open_image(path: str) -> Iterator[ImageFile | None]:
    """The image at a path; None where that is an ordinary folder or tar. Raises SandboxStartError, OSError."""
    try:
        if os.path.isdir(path):
            yield _from_layout(path, partial(_open_below, path)) if is_layout(path) else None
            return
        with tarfile.open(path) as tar:
            parts = _parts(tar)
            yield None if parts is None else _from_archive(path, tar, parts)
    except (tarfile.TarError, EOFError) as error:
        raise SandboxStartError(f"{path} is no tar that can be read: {error}") from error


def is_layout(directory: str) -> bool:
    """Whether a directory is an image, and no root by itself."""
    return os.path.isfile(os.path.join(directory, "oci-layout"))


def _open_below(directory: str, name: str) -> IO[bytes]:
    return open(os.path.join(directory, name), "rb")


def _parts(tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo] | None:
    """By name; None at the first name that no image holds."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        name = member.name.removeprefix("./")
        if not _PARTS.fullmatch(name):
            return None
        found[name] = member
    return found if {"oci-layout", "manifest.json"} & set(found) else None


def _from_archive(path: str, tar: tarfile.TarFile, parts: dict[str, tarfile.TarInfo]) -> ImageFile:
    def open_part(name: str) -> IO[bytes]:
        file = tar.extractfile(parts[name]) if name in parts else None
        if file is None:
            raise FileNotFoundError(name)
        return file

    return _from_saved(path, open_part) if "manifest.json" in parts else _from_layout(path, open_part)


def _from_saved(path: str, open_part: _Open) -> ImageFile:
    """As `docker save` writes it. Layers are named by path, and known by the digests of their uncompressed forms."""
    listed = _json(open_part, path, "manifest.json")
    if not isinstance(listed, list) or len(listed) != 1:
        raise SandboxStartError(f"image {path} must hold one image, and holds {len(listed)}: save one at a time")
    config_name, names = str(listed[0]["Config"]), [str(name) for name in listed[0]["Layers"]]
    config = _json(open_part, path, config_name)
    digests = [_hex(path, digest) for digest in config["rootfs"]["diff_ids"]]
    if len(digests) != len(names):
        raise SandboxStartError(f"image {path} names {len(names)} layers and {len(digests)} digests of them")
    layers = [LayerFile(name, _digest_in(name) or digest) for name, digest in zip(names, digests, strict=True)]
    return _image(path, open_part, config, json.dumps(config, sort_keys=True), layers)


def _digest_in(name: str) -> str | None:
    """A blob is named by its own digest, whatever its compression."""
    return name.removeprefix("blobs/sha256/") if name.startswith("blobs/sha256/") else None


def _from_layout(path: str, open_part: _Open) -> ImageFile:
    found = _json(open_part, path, "index.json")
    for _ in range(_MAX_DEPTH):
        if "manifests" not in found:
            break
        found = _blob(open_part, path, _choose(path, found["manifests"])["digest"])
    if "layers" not in found:
        raise SandboxStartError(f"image {path}: its index leads to no manifest")
    for layer in found["layers"]:
        if str(layer.get("mediaType", "")).endswith("zstd"):
            raise SandboxStartError(f"image {path}: a layer is compressed by zstd; save it with gzip, or uncompressed")
    layers = [LayerFile(*_blob_name(path, layer["digest"])) for layer in found["layers"]]
    return _image(path, open_part, _blob(open_part, path, found["config"]["digest"]), json.dumps(found), layers)


def _image(path: str, open_part: _Open, config: dict[str, Any], text: str, layers: list[LayerFile]) -> ImageFile:
    if len(layers) > _MAX_LAYERS:
        raise SandboxStartError(f"image {path} has {len(layers)} layers, which is more than {_MAX_LAYERS}")
    return ImageFile(path, open_part, config, hashlib.sha256(text.encode()).hexdigest(), layers)


def _choose(path: str, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest for this machine; one that names no platform is for all."""
    here = _MACHINES.get(platform.machine(), platform.machine())
    for manifest in manifests:
        its = manifest.get("platform") or {}
        if its.get("architecture", here) == here and its.get("os", "linux") == "linux":
            return manifest
    raise SandboxStartError(f"image {path} has nothing for linux/{here}")


def _blob_name(path: str, digest: str) -> tuple[str, str]:
    found = _hex(path, digest)
    return f"blobs/sha256/{found}", found


def _hex(path: str, digest: str) -> str:
    found = _DIGEST.fullmatch(str(digest))
    if found is None:
        raise SandboxStartError(f"image {path}: {digest!r:.100} is no sha256 digest")
    return found[1]


def _blob(open_part: _Open, path: str, digest: str) -> dict[str, Any]:
    name, expected = _blob_name(path, digest)
    with _part(open_part, path, name) as file:
        data = file.read(_MAX_JSON_BYTES)
    if hashlib.sha256(data).hexdigest() != expected:
        raise SandboxStartError(f"image {path}: {name} is not what the image says; save it again")
    found: dict[str, Any] = _object(path, name, data)
    return found


def _json(open_part: _Open, path: str, name: str) -> Any:
    with _part(open_part, path, name) as file:
        return _object(path, name, file.read(_MAX_JSON_BYTES))


def _object(path: str, name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SandboxStartError(f"image {path}: {name} is no JSON: {error}") from error


@contextlib.contextmanager
def _part(open_part: _Open, path: str, name: str) -> Iterator[IO[bytes]]:
    """A part that is not there, or not as images have it, is one error, whatever shows it."""
    try:
        with open_part(name) as file:
            yield file
    except (OSError, EOFError, KeyError, tarfile.TarError) as error:
        raise SandboxStartError(f"image {path}: {name} is missing or cannot be read: {error}") from error
