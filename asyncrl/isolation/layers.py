"""Reads archives of layers: what `docker save`, `podman save` and `skopeo copy` write."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, NoReturn, TypeVar

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.isolation.images import PATH, Image
from asyncrl.isolation.sandbox.kernel import MACHINE

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # by the name that OCI has for it
LARGEST_JSON = 4 << 20

T = TypeVar("T")


def refuse(text: str) -> NoReturn:
    raise ConfigError(text)


class _Platform(msgspec.Struct):
    architecture: str = ""


class _Descriptor(msgspec.Struct):
    digest: str
    platform: _Platform | None = None

    @property
    def name(self) -> str:
        return f"blobs/{self.digest.replace(':', '/')}"


class _Manifest(msgspec.Struct):
    """An OCI manifest, or a list of those of several machines."""

    manifests: list[_Descriptor] = []
    config: _Descriptor | None = None
    layers: list[_Descriptor] = []


class _Saved(msgspec.Struct, rename="pascal"):
    """Holds an entry of docker's manifest.json."""

    config: str
    layers: list[str]


class _Settings(msgspec.Struct, rename={"environment": "Env", "directory": "WorkingDir", "user": "User"}):
    environment: list[str] | None = None
    directory: str | None = None
    user: str | None = None


class _Config(msgspec.Struct):
    architecture: str = ""
    config: _Settings | None = None


def find_layers(
    tar: tarfile.TarFile, index: dict[str, tarfile.TarInfo], image: Image
) -> tuple[Iterator[IO[bytes]], Image]:
    """Find the layers of the one image of an archive, the lowest first, and put its settings into `image`."""

    def find(name: str) -> IO[bytes]:
        member = index.get(posixpath.normpath(name))
        file = tar.extractfile(member) if member else None  # it follows links inside the archive
        return file or refuse(f"its manifest names {name[:200]!r}, which the archive lacks")

    def read(name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(find(name).read(LARGEST_JSON), type=kind)
        except UNDECODABLE as error:
            refuse(f"{name[:200]!r} cannot be read ({error})")

    machine = MACHINES.get(MACHINE, MACHINE)
    if "manifest.json" in index:
        saved = read("manifest.json", list[_Saved])
        if len(saved) != 1:
            refuse(f"holds {len(saved)} images; save one")
        config = saved[0].config
        names = saved[0].layers
    else:
        manifest = read("index.json", _Manifest)
        for _ in range(3):  # it may list lists
            if manifest.config:
                break
            named = {each.name: each.platform or _Platform(machine) for each in manifest.manifests}
            found = [name for name, platform in named.items() if platform.architecture == machine]
            if len(found) != 1:
                refuse(f"holds {len(found)} images for {machine}; save one")
            manifest = read(found[0], _Manifest)
        if not manifest.config:
            refuse("has no manifest with a configuration")
        config = manifest.config.name
        names = [layer.name for layer in manifest.layers]
    given = read(config, _Config)
    if given.architecture not in ("", machine):
        refuse(f"is an image for {given.architecture}; this machine is {machine}")
    settings = given.config or _Settings()
    variables = (line.partition("=")[::2] for line in settings.environment or ())
    environment = {"PATH": PATH} | {name: value for name, value in variables if name}  # else none can start
    directory = posixpath.join("/", settings.directory or "")
    user = settings.user or ""
    if "\0" in "".join((*environment, *environment.values(), directory, user)):
        refuse("its settings hold a NUL")
    directory = posixpath.normpath(directory)
    image = msgspec.structs.replace(image, environment=environment, directory=directory, user=user)
    return map(find, names), image
